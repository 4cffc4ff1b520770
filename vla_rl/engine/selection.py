"""Which parameters learn: all, the action expert's, or low-rank adapters."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vla_rl.engine.config import EngineConfig, EngineConfigError, LoraSettings
from vla_rl.engine.tensors import full_tensor

ADAPTER = "default"
"""peft's name of the only adapter."""


@runtime_checkable
class HasExpert(Protocol):
    """A policy that can say which of its parameters are its action expert's."""

    def parameter_names(self, selection: Literal["all", "expert"]) -> Sequence[str]:
        """Names, as in `named_parameters`, of what trains under `all`, or of the expert and its projections."""
        ...


@runtime_checkable
class HasHeads(Protocol):
    """A policy that can say which of its parameters belong to heads that it was given to learn."""

    def head_names(self) -> Sequence[str]:
        """Names, as in `named_parameters`."""
        ...


def select_trainable(policy: nn.Module, config: EngineConfig, seed: int = 0) -> None:
    """Freeze what shall not learn (in place), and insert adapters for `lora`, whose first weights depend on `seed` alone; heads learn
    beside these.

    Raises EngineConfigError where the policy has no expert, or no layer that an adapter name matches.
    """
    if config.trainable == "expert":
        _train_only(policy, _expert_names(policy))
    elif config.trainable == "lora":
        _insert_adapters(policy, config.lora, seed)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise EngineConfigError(f"engine.trainable {config.trainable!r} leaves no parameter of {type(policy).__name__} to train")


def plain_weights(policy: nn.Module, trainable_only: bool, substitutes: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Full tensors under the names the policy has without adapters; adapters are merged into the weight they change.

    `substitutes` replaces parameters by name (an average of the weights). Each tensor is gathered by a collective:
    every rank walks the whole generator, in the same order.
    """
    adapted = _adapted_layers(policy)
    names = set(policy.state_dict().keys())
    with torch.no_grad():
        for name, tensor in list(policy.named_parameters()) + list(policy.named_buffers()):
            if name not in names or ".lora_" in name:
                continue
            layer = name.removesuffix(".base_layer.weight") if name.endswith(".base_layer.weight") else None
            learns = tensor.requires_grad or layer in adapted
            if trainable_only and not learns:
                continue
            full = full_tensor(substitutes.get(name, tensor)).detach()
            if layer is not None and layer in adapted:
                full = full + _update(layer, adapted[layer], substitutes)
            yield name.replace(".base_layer.", "."), full


def _expert_names(policy: nn.Module) -> set[str]:
    if not isinstance(policy, HasExpert):
        raise EngineConfigError(
            f"engine.trainable is 'expert' and {type(policy).__name__} names no expert (parameter_names); allowed for it: all, lora"
        )
    return set(policy.parameter_names("expert"))


def _train_only(policy: nn.Module, names: set[str]) -> None:
    known = [name for name, _ in policy.named_parameters()]
    unknown = names - set(known)
    if unknown:
        raise EngineConfigError(f"{type(policy).__name__}.parameter_names gives names it has no parameter for: {sorted(unknown)}")
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name in names)


def _insert_adapters(policy: nn.Module, settings: LoraSettings, seed: int) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    _check_targets(policy, settings.target_modules)
    policy.requires_grad_(False)
    lora = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.target_modules), lora_dropout=0.0)  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(lora, policy, adapter_name=ADAPTER)
    heads = set(policy.head_names()) if isinstance(policy, HasHeads) else set[str]()
    for name, parameter in policy.named_parameters():
        if name in heads:
            parameter.requires_grad_(True)


def _check_targets(policy: nn.Module, targets: Sequence[str]) -> None:
    linear = {name.rpartition(".")[2] for name, module in policy.named_modules() if isinstance(module, nn.Linear)}
    for target in targets:
        if target not in linear:
            nearest = difflib.get_close_matches(target, linear, n=1)
            hint = f"; nearest: {nearest[0]!r}" if nearest else ""
            raise EngineConfigError(
                f"engine.lora.target_modules has {target!r}, which no linear layer of {type(policy).__name__} ends in{hint}; "
                f"allowed: {', '.join(sorted(linear))}"
            )


def _adapted_layers(policy: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in policy.named_modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")}


def _update(name: str, layer: nn.Module, substitutes: dict[str, Tensor]) -> Tensor:
    """scaling * B @ A of one adapted linear layer (Hu et al. 2021, section 4.1)."""
    down, up = (_adapter_weight(name, layer, part, substitutes) for part in ("lora_A", "lora_B"))
    scaling: float = layer.scaling[ADAPTER]  # pyright: ignore[reportIndexIssue, reportAssignmentType, reportArgumentType]
    return scaling * (up @ down)


def _adapter_weight(name: str, layer: nn.Module, part: str, substitutes: dict[str, Tensor]) -> Tensor:
    key = f"{name}.{part}.{ADAPTER}.weight"
    return full_tensor(substitutes[key] if key in substitutes else getattr(layer, part)[ADAPTER].weight)
