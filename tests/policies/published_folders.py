"""Small checkpoint folders in exactly the layouts of LeRobot and openpi: names, nesting, dtypes, shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.processor_pi0 import Pi0NewLineProcessor
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.processor import PolicyProcessorPipeline, TokenizerProcessorStep
from lerobot.processor.factory import make_default_policy_processor_steps
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.processor import IMAGES
from vla_rl.policies.statistics import ACTION, STATE, Statistics
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER

RESOLUTION = 48
CHUNK, HORIZON = 6, 4
LANGUAGE_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


def small_policy(family: str, statistics: Statistics) -> PolicyModule:
    """A policy of the published structure (8 and 16 heads, padded dimensions, vocabulary heads) with random weights that bfloat16 holds."""
    config = replace(
        PI0_PRESETS[f"{family}_base"],
        chunk_length=CHUNK,
        executed_horizon=HORIZON,
        denoise_steps=3,
        vision=VisionConfig(stem="patch", image_size=28, patch_size=14, conv_channels=(), width=32, depth=2, mlp_width=44, heads=16),
        language=TransformerConfig(width=48, depth=2, mlp_width=80, heads=8, kv_heads=1, head_width=12),
        expert=TransformerConfig(width=32, depth=2, mlp_width=56, heads=8, kv_heads=1, head_width=12),
        vocabulary=1024,
        prompt_tokens=64,
        model_state_dim=32,
        model_action_dim=32,
    )
    policy = make_policy(config, statistics, policy_spec(config, RESOLUTION), seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in policy.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).bfloat16().float()
    return policy.eval()


def published_tensors(policy: PolicyModule) -> dict[str, Tensor]:
    """LeRobot's names; every second tensor in bfloat16, as `to_bfloat16_for_selected_params` leaves some in float32."""
    tensors = policy.published_weights(policy.state_dict())
    return {name: tensor.bfloat16() if index % 2 else tensor.clone() for index, (name, tensor) in enumerate(tensors.items())}


def stats_tensors(statistics: Statistics) -> dict[str, dict[str, Tensor]]:
    """Dataset statistics as LeRobot hands them to its processors, with features that a policy does not read."""
    stats = {feature: {key: torch.tensor(value) for key, value in entry.items()} for feature, entry in statistics.to_dict().items()}
    image = {"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1)}
    return stats | {IMAGES + VIEWS[0]: image, "timestamp": {"mean": torch.zeros(1), "std": torch.ones(1)}}


def write_lerobot_pi0(folder: Path, policy: PolicyModule, statistics: Statistics, **fields: Any) -> None:
    """A pi0 or pi0.5 as LeRobot 0.6 saves it: its own config and processor classes write the files."""
    folder.mkdir(parents=True)
    pi05 = policy.config.family == "pi05"
    config = (PI05Config if pi05 else PI0Config)(
        device="cpu",
        chunk_size=CHUNK,
        n_action_steps=HORIZON,
        num_inference_steps=policy.config.denoise_steps,
        tokenizer_max_length=policy.config.prompt_tokens,
        image_resolution=(28, 28),
        input_features=input_features(),
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        **fields,
    )
    config.validate_features()
    config._save_pretrained(folder)
    steps = make_default_policy_processor_steps(config, stats_tensors(statistics))
    tokenize = TokenizerProcessorStep(tokenizer=shipped_tokenizer(), max_length=config.tokenizer_max_length)
    middle = [steps.normalize, Pi05PrepareStateTokenizerProcessorStep(), tokenize, steps.to_device]
    middle = middle if pi05 else [Pi0NewLineProcessor(), tokenize, steps.to_device, steps.normalize]
    write_processors(folder, [steps.rename_observations, steps.add_batch_dim, *middle], [steps.unnormalize, steps.to_cpu])
    save_file(published_tensors(policy), folder / "model.safetensors", metadata={"format": "pt"})


def input_features(views: Sequence[str] = VIEWS, state_dim: int = STATE_DIM) -> dict[str, PolicyFeature]:
    pictures = {IMAGES + view: PolicyFeature(FeatureType.VISUAL, (3, RESOLUTION, RESOLUTION)) for view in views}
    return pictures | {STATE: PolicyFeature(FeatureType.STATE, (state_dim,))}


def write_processors(folder: Path, before: list[Any], after: list[Any]) -> None:
    """Both pipelines, with the tokenizer beside them."""
    PolicyProcessorPipeline(before, name="policy_preprocessor").save_pretrained(folder)
    PolicyProcessorPipeline(after, name="policy_postprocessor").save_pretrained(folder)
    if not (folder / "tokenizer").is_dir():
        shutil.copytree(SHIPPED_TOKENIZER, folder / "tokenizer")


def shipped_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED_TOKENIZER / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def write_openpi(folder: Path, policy: PolicyModule, statistics: Statistics, asset: str = "my/robot", shards: int = 1) -> None:
    """A pi0 or pi0.5 as openpi's converter writes it: no `model.` prefix, the embedding only as vocabulary head, statistics as an asset."""
    (folder / "assets" / asset).mkdir(parents=True)
    tensors = {name.removeprefix("model."): tensor for name, tensor in published_tensors(policy).items()}
    tensors[LANGUAGE_HEAD] = tensors.pop(EMBEDDING)
    write_tensors(folder, tensors, shards)
    config = {"action_dim": 32, "action_horizon": CHUNK, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
    (folder / "config.json").write_text(json.dumps(config | {"precision": "bfloat16"}))
    names = {"state": STATE, "actions": ACTION}
    kept = ("mean", "std", "q01", "q99")
    stats = {name: {key: statistics.to_dict()[feature][key] for key in kept} for name, feature in names.items()}
    (folder / "assets" / asset / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    shutil.copytree(SHIPPED_TOKENIZER, folder / "tokenizer")


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """One file, or shards with Hugging Face's index."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    names = {name: f"model-{index % shards + 1:05d}-of-{shards:05d}.safetensors" for index, name in enumerate(tensors)}
    for file in sorted(set(names.values())):
        save_file({name: tensor for name, tensor in tensors.items() if names[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
