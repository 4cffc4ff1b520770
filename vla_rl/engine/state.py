"""Everything a training run must remember beyond its counters, as one state dict for torch.distributed.checkpoint.

Sharded tensors are saved as shards and read back for any number of ranks; the RNG of each rank is kept under its number.
"""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from vla_rl.engine.engine import Engine

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""One key per moment and parameter, so that a checkpoint fits another number of ranks."""


def training_state(engine: Engine) -> dict[str, Any]:
    """Weights, moments, average and RNG; the layout into which a checkpoint is read as well."""
    _complete_moments(engine.optimizer)
    return {
        "model": get_model_state_dict(engine.policy),
        "optimizer": get_optimizer_state_dict(engine.policy, engine.optimizer, options=_FLAT),
        "average": dict(engine.average.values) if engine.average is not None else {},
        "rng": _packed([_rng_state()] if engine.world.size == 1 else engine.world.gather(_rng_state())),
    }


def restore_state(engine: Engine, state: dict[str, Any]) -> None:
    """Put a read `training_state` back; ranks beyond those that were saved keep the RNG they started with."""
    set_model_state_dict(engine.policy, state["model"])
    set_optimizer_state_dict(engine.policy, engine.optimizer, state["optimizer"], options=_FLAT)
    if engine.average is not None:
        engine.average.values = dict(state["average"])
    saved = _unpacked(state["rng"])
    if engine.world.rank < len(saved):
        _set_rng_state(saved[engine.world.rank])


def _complete_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that no update has moved yet the state from which AdamW begins.

    A checkpoint so has the same names whoever was held still. torch's own way is an update with gradients of 0, which counts as one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                step = torch.zeros((), device=parameter.device)
                moments = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": step, **moments}


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}  # noqa: NPY002


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _packed(value: Any) -> bytes:
    """One opaque leaf: state dicts are flattened, and lists of other lengths would not be found again."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=False)
