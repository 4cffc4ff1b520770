"""OpenVLA-OFT with discrete actions: its folder becomes a token policy bit for bit, which computes what OpenVLA's code computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from published_folders import write_tensors
from torch import Tensor

from vla_rl.config import ConfigError
from vla_rl.episode import VIEWS, Observation
from vla_rl.policies.base import TokenBatch
from vla_rl.policies.checkpoint import CheckpointError, load_policy, save_policy
from vla_rl.policies.critic import CriticConfig
from vla_rl.policies.extend import extend_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.inspect import inspect_checkpoint
from vla_rl.policies.processor import Normalization
from vla_rl.policies.statistics import ACTION, STATE, Statistics
from vla_rl.policies.tokenizer import SHIPPED_TOKENIZER, TOKENIZER_FILE
from vla_rl.policies.tokens.action_tokens import OpenVlaTokenizer
from vla_rl.policies.tokens.backbone import STOP_TOKEN
from vla_rl.policies.tokens.config import TOKEN_PRESETS, ActionTokensConfig, LanguageConfig, PrismaticConfig, TokenConfig, VitConfig
from vla_rl.policies.tokens.fused_vision import DINO_MEAN, DINO_STD
from vla_rl.policies.tokens.imported import VISION
from vla_rl.policies.tokens.policy import TokenPolicy

Observe = Callable[..., list[Observation]]
RESOLUTION, SIDE, BINS, SPARE = 32, 28, 256, 64
SMALL = TokenConfig(
    action_tokens=ActionTokensConfig(kind="openvla", bins=BINS),
    prismatic=PrismaticConfig(image_size=SIDE, dino=VitConfig(32, 3, 48), siglip=VitConfig(48, 2, 56), registers=2),
    language=LanguageConfig("llama", width=32, depth=2, mlp_width=64, heads=2, kv_heads=2, head_width=16, norm_eps=1e-5),
    vocabulary=1400,
    prompt_tokens=64,
    normalization=Normalization.QUANTILES,
    pad_images=False,
    shift_pixels=0,
)
SAMPLING = Exploration(method="tokens", temperature=1.6)


def write_tokenizer(folder: Path) -> Path:
    """The shipped one, which begins every prompt with a start token, as Llama's does."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SHIPPED_TOKENIZER / TOKENIZER_FILE, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("llama") / "tokenizer")


def small_openvla(statistics: Statistics, tokenizer: Path, views: int = 1) -> TokenPolicy:
    """Random weights that bfloat16 holds, and tokens that depend on everything."""
    spec = policy_spec(SMALL, RESOLUTION, views=VIEWS[:views])
    policy = make_policy(SMALL, statistics, spec, seed=1, tokenizer_folder=str(tokenizer))
    assert isinstance(policy, TokenPolicy)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in policy.named_parameters():
        spread = 0.5 if name.endswith("lm_head.weight") else 0.05
        parameter.data = (parameter.data + spread * torch.randn(parameter.shape, generator=generator)).bfloat16().float()
    return policy.eval()


def write_openvla(folder: Path, policy: TokenPolicy, statistics: Statistics, **fields: Any) -> None:
    """As OpenVLA-OFT's `finetune.py` leaves a merged checkpoint: bfloat16 shards with an index, and the processor's files beside them."""
    write_tokenizer(folder)
    tensors = {policy.published_name(name): tensor.bfloat16() for name, tensor in policy.state_dict().items()}
    write_tensors(folder, tensors, shards=3)
    config: dict[str, Any] = {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [SIDE, SIDE],
        "n_action_bins": BINS,
        "norm_stats": {},
        "pad_to_multiple_of": SPARE,
        "text_config": text_config(policy.config.language, policy.config.vocabulary),
        "timm_model_ids": list(VISION),
        "timm_override_act_layers": [None, None],
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
    }
    (folder / "config.json").write_text(json.dumps(config | fields))
    (folder / "dataset_statistics.json").write_text(json.dumps({"libero_object_no_noops": dataset_entry(statistics)}))


def text_config(language: LanguageConfig, rows: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": language.width,
        "num_hidden_layers": language.depth,
        "intermediate_size": language.mlp_width,
        "num_attention_heads": language.heads,
        "rms_norm_eps": language.norm_eps,
        "torch_dtype": "bfloat16",
    }


def dataset_entry(statistics: Statistics) -> dict[str, Any]:
    """Actions of OpenVLA's LIBERO data: the gripper is 0 when closed and 1 when open, and its mask is off."""
    keys = ("min", "max", "mean", "std", "q01", "q99")
    action, state = ({key: list(statistics.to_dict()[feature][key]) for key in keys} for feature in (ACTION, STATE))
    for key, value in zip(keys, (0.0, 1.0, 0.5, 0.5, 0.0, 1.0)):
        action[key][6] = value
    return {"action": action | {"mask": [True] * 6 + [False]}, "proprio": state, "num_transitions": 100, "num_trajectories": 2}


@pytest.fixture
def folder(statistics: Statistics, tokenizer: Path, tmp_path: Path) -> Path:
    write_openvla(tmp_path / "theirs", small_openvla(statistics, tokenizer), statistics)
    return tmp_path / "theirs"


def equal_weights(first: TokenPolicy | Any, second: TokenPolicy | Any) -> bool:
    other = second.state_dict()
    return other.keys() == first.state_dict().keys() and all(torch.equal(w, other[name]) for name, w in first.state_dict().items())


def chunks(policy: Any, observations: list[Observation]) -> np.ndarray:
    return policy.postprocess(policy.act(policy.preprocess(observations), range(len(observations))).actions_BCA)


def test_a_folder_goes_in_out_and_in_again(folder: Path, statistics: Statistics, tokenizer: Path, observe: Observe, tmp_path: Path) -> None:
    original = small_openvla(statistics, tokenizer)
    imported = load_policy(folder)
    assert imported.config == original.config and equal_weights(imported, original)
    assert (imported.spec.views, imported.spec.resolution, imported.spec.chunk_length) == (("image",), 256, 8)
    save_policy(imported, tmp_path / "ours")
    again = load_policy(tmp_path / "ours")
    assert equal_weights(again, imported) and again.config == imported.config and again.spec == imported.spec
    np.testing.assert_array_equal(chunks(again, observe(2, RESOLUTION)), chunks(imported, observe(2, RESOLUTION)))
    assert not list((tmp_path / "ours" / "tokenizer").glob("*.safetensors*")), "the weights beside the tokenizer are not copied with it"


def test_the_dry_run_lists_every_tensor_and_its_destination(folder: Path) -> None:
    report = inspect_checkpoint(folder)
    plans = {plan.name: plan.destination for plan in report.tensors}
    assert report.problems == () and report.layout.value == "openvla"
    assert plans["vision_backbone.featurizer.blocks.1.ls1.scale_factor"] == "model.vision.dino.blocks.1.ls1.gamma"
    assert plans["vision_backbone.fused_featurizer.attn_pool.latent"] == "model.vision.siglip.attn_pool.latent"
    assert plans["language_model.model.layers.1.mlp.up_proj.weight"] == "model.language.model.layers.1.mlp.up_proj.weight"
    assert plans["language_model.lm_head.weight"] == "model.language.lm_head.weight"
    assert plans["projector.fc3.bias"] == "model.projector.fc3.bias"
    assert set(plans.values()) == set(load_policy(folder).state_dict())


def openvla_tokens(policy: TokenPolicy, observation: Observation) -> Tensor:
    """OpenVLA-OFT's `predict_action` without heads, one row, nothing padded, step by step (`modeling_prismatic.py`)."""
    batch = policy.preprocess([observation])
    ids = batch.tokens_BL[0, batch.token_mask_BL[0]]
    vision, language = policy.model.vision, policy.model.language
    picture = (batch.images_BVCHW[0, :1] + 1) / 2
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (DINO_MEAN, DINO_STD))
    dino = vision.dino.get_intermediate_layers((picture - mean) / std, n={1})[0]  # type: ignore[union-attr]
    siglip = vision.siglip.get_intermediate_layers((picture - 0.5) / 0.5, n={0})[0]  # type: ignore[union-attr]
    patches = policy.model.projector(torch.cat((dino, siglip), 2))  # type: ignore[operator]
    words = language.get_input_embeddings()(torch.cat((ids, torch.ones(56, dtype=torch.long), torch.tensor([STOP_TOKEN]))))[None]
    words[:, len(ids) : len(ids) + 56] = 0.0
    sequence = torch.cat((words[:, :1], patches, words[:, 1:]), 1)
    everything = torch.ones(1, 1, sequence.shape[1], sequence.shape[1], dtype=torch.bool)
    logits = language(inputs_embeds=sequence, attention_mask=everything).logits
    first = patches.shape[1] + len(ids) - 1
    rows = SMALL.vocabulary
    return logits[0, first : first + 56, rows - BINS - SPARE : rows - SPARE].argmax(-1) + rows - BINS - SPARE


@torch.no_grad()
def test_tokens_and_actions_are_openvlas(statistics: Statistics, tokenizer: Path, observe: Observe) -> None:
    """Also in a batch whose prompts differ in length."""
    policy = small_openvla(statistics, tokenizer)
    first, second = observe(2, RESOLUTION)
    observations = [first, replace(second, prompt="pick up the black bowl next to the plate and place it in the top drawer of the cabinet")]
    output = policy.act(policy.preprocess(observations), [0, 1], replace(SAMPLING, temperature=1e-4))
    assert output.tokens_BT is not None
    centers = np.convolve(np.linspace(-1, 1, BINS), [0.5, 0.5], "valid")
    for row, observation in enumerate(observations):
        tokens = openvla_tokens(policy, observation)
        assert len(tokens.unique()) > 2, "positions differ"
        torch.testing.assert_close(output.tokens_BT[row] + SMALL.vocabulary - BINS - SPARE, tokens, rtol=0, atol=0)
        wanted = centers[np.clip(SMALL.vocabulary - SPARE - tokens.numpy() - 1, 0, BINS - 2)].reshape(8, 7)
        np.testing.assert_allclose(output.actions_BCA[row], wanted, atol=1e-6)  # float32


def test_openvlas_action_tokens() -> None:
    """`prismatic/vla/action_tokenizer.py` by hand, with NumPy's digitize."""
    tokenizer, values = OpenVlaTokenizer(BINS, 1), np.array([[-1.0, -0.999, -0.1, 0.0, 0.1, 0.999, 1.0]])
    tokens, _ = tokenizer.encode(torch.from_numpy(values)[:, None])
    np.testing.assert_array_equal(tokens[0], BINS - np.digitize(values[0], np.linspace(-1, 1, BINS)))
    decoded = tokenizer.decode(tokens, torch.ones_like(tokens, dtype=torch.bool))
    assert np.abs(decoded[0, 0].numpy() - values[0]).max() <= 1 / (BINS - 1) + 1e-6
    every = torch.arange(1, 1 + 7 * 36)[None]
    again, _ = tokenizer.encode(tokenizer.decode(every, torch.ones_like(every, dtype=torch.bool)))
    torch.testing.assert_close(again, every)
    assert tokenizer.encode(torch.full((1, 1, 7), 2.0))[0].eq(0).all(), (
        "the first token is of 1 and beyond, and decodes to the last interval"
    )


def test_statistics_unmask_the_gripper_and_turn_it_around(folder: Path, statistics: Statistics) -> None:
    """`_unnormalize_actions`, then `normalize_gripper_action` and `invert_gripper_action` of OpenVLA's LIBERO script."""
    policy = load_policy(folder)
    entry = dataset_entry(statistics)["action"]
    low, high = (np.array(entry[key]) for key in ("q01", "q99"))
    model = np.array([-0.5, 0.0, 0.5, -0.2, 0.2, 0.4, 0.0])
    for gripper, env in ((0.0, 1.0), (1.0, -1.0), (0.5, 0.0)):
        model[6] = gripper
        wanted = np.append(0.5 * (model[:6] + 1) * (high[:6] - low[:6] + 1e-8) + low[:6], env)
        given = torch.from_numpy(model).float().expand(1, 8, 7)
        np.testing.assert_allclose(policy.postprocess(given)[0, 0], np.clip(wanted, -1, 1), atol=1e-6)
    with_open = policy.processor.action.forward(torch.tensor([0.0, 0, 0, 0, 0, 0, -1.0]))
    assert float(with_open[6]) == pytest.approx(1.0, abs=1e-6)


def test_it_learns_and_scores_like_every_token_policy(statistics: Statistics, tokenizer: Path, observe: Observe) -> None:
    policy = extend_policy(small_openvla(statistics, tokenizer), CriticConfig(queries=1, hidden=(8,)), None, seed=0)
    batch = policy.preprocess(observe(2, RESOLUTION))
    output = policy.act(batch, [3, 4], SAMPLING)
    assert output.tokens_BT is not None and output.token_mask_BT is not None and output.log_prob_BC is not None
    scored = policy.log_prob(batch, TokenBatch(output.tokens_BT, output.token_mask_BT), SAMPLING)
    torch.testing.assert_close(scored.log_prob_BC, output.log_prob_BC, rtol=0, atol=0)
    torch.testing.assert_close(policy.value(batch), output.value_B, rtol=0, atol=0)
    targets = np.zeros((2, 8, 7), np.float32)
    sums = policy.train().sft_loss(policy.preprocess(observe(2, RESOLUTION), targets), [0, 1])
    sums.loss_sum.backward()
    without = {name for name, parameter in policy.named_parameters() if parameter.grad is None and not name.startswith("critic.")}
    assert without == {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    assert without and all(".vision." in name for name in without), "only what lies behind the layer that is read"


def test_the_published_size_has_the_published_names_and_shapes(statistics: Statistics, tokenizer: Path) -> None:
    config = TOKEN_PRESETS["openvla_oft"]
    with torch.device("meta"):
        policy = make_policy(config, statistics, policy_spec(config, 256, views=VIEWS[:1]), tokenizer_folder=str(tokenizer))
    shapes = {policy.published_name(name): tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
    # total_size of openvla-7b's model.safetensors.index.json, in bfloat16
    assert 2 * sum(int(np.prod(shape)) for shape in shapes.values()) == 15_082_474_368
    assert shapes["vision_backbone.featurizer.pos_embed"] == (1, 256, 1024)
    assert shapes["vision_backbone.featurizer.reg_token"] == (1, 4, 1024)
    assert shapes["vision_backbone.fused_featurizer.blocks.26.mlp.fc1.weight"] == (4304, 1152)
    assert shapes["projector.fc1.weight"] == (8704, 2176) and shapes["language_model.lm_head.weight"] == (32064, 4096)


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("name", "does"),
    [("action_head--150000_checkpoint.pt", "regresses"), ("proprio_projector--150000_checkpoint.pt", "sees the state")],
)
def test_other_forms_are_named(folder: Path, name: str, does: str) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"holds {name}: that OpenVLA-OFT {does}.*policy\.remote"):
        load_policy(folder)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"timm_model_ids": ["vit_large_patch14_clip_336.openai"]}, "timm_model_ids is"),
        ({"image_sizes": [28, 56]}, "pictures of one size"),
        ({"text_config": {"model_type": "phi"}}, "must be a Llama's"),
    ],
)
def test_what_a_config_asks_for_and_cannot_have_is_named(folder: Path, values: dict[str, Any], said: str) -> None:
    edit(folder / "config.json", **values)
    with pytest.raises(CheckpointError, match=said):
        load_policy(folder)


def test_files_that_are_missing_or_damaged_are_named(folder: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        shutil.copytree(folder, tmp_path / name)
        return tmp_path / name

    edit((lost := broken("two")) / "dataset_statistics.json", bridge={})
    with pytest.raises(CheckpointError, match="has libero_object_no_noops, bridge; it must have one"):
        load_policy(lost)
    ((lost := broken("none")) / "dataset_statistics.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks dataset_statistics\.json"):
        load_policy(lost)
    edit((lost := broken("startless")) / TOKENIZER_FILE, post_processor=None)
    with pytest.raises(CheckpointError, match="without a start token"):
        load_policy(lost)
    ((lost := broken("shard")) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002-of-00003"):
        load_policy(lost)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoding": "autoregressive", "prefix_attention": "causal"}, "leave decoding at 'parallel'"),
        ({"reasoning_tokens": 4}, "leave reasoning_tokens at 0"),
        ({"action_tokens": ActionTokensConfig()}, "set it to 'openvla'"),
        ({"vocabulary": 320}, "leave no text"),
    ],
)
def test_configs_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PrismaticConfig(patch_size=0), "patch_size is 0, it must be at least 1"),
        (lambda: VitConfig(width=32, depth=3, mlp_width=48, heads=0), "heads is 0, it must be at least 1"),
    ],
)
def test_sizes_that_no_transformer_has(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
