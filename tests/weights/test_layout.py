"""What travels, in which order, and that both sides mean the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synced_policy import SyncedPolicy
from torch import nn

from vla_rl.engine.config import EngineConfig, LoraSettings
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import World
from vla_rl.weights.buckets import pieces
from vla_rl.weights.digest import weights_digest
from vla_rl.weights.errors import LayoutMismatch
from vla_rl.weights.layout import TensorEntry, WeightLayout, engine_layout, held_weights, policy_layout, synced_weights


def test_offsets_by_hand() -> None:
    layout = WeightLayout(
        (TensorEntry("a", (3, 5), torch.float32), TensorEntry("b", (), torch.int64), TensorEntry("c", (33,), torch.bfloat16))
    )
    assert layout.offsets == (0, 64, 128)  # 60 and 8 bytes, each rounded up to a line of 64
    assert layout.nbytes == 256  # 66 bytes are two lines


def test_tied_weights_and_saved_buffers_appear_once(world: World) -> None:
    layout = engine_layout(Engine(SyncedPolicy(), EngineConfig(), 1, world))
    names = [entry.name for entry in layout.synced]
    assert len(names) == len(set(names))
    assert "writing.weight" in names and "reading.weight" not in names
    assert {"value_head.weight", "value_head.bias", "mean", "steps", "scale"} <= set(names)
    assert "grid" not in names
    assert layout.frozen == ()


def test_a_frozen_backbone_does_not_travel_and_buffers_do(world: World) -> None:
    layout = engine_layout(Engine(SyncedPolicy(), EngineConfig(trainable="expert"), 1, world))
    names = {entry.name for entry in layout.synced}
    assert names == {
        "expert.0.weight",
        "expert.0.bias",
        "expert.1.weight",
        "expert.1.bias",
        "value_head.weight",
        "value_head.bias",
        "mean",
        "steps",
    }
    assert {entry.name for entry in layout.frozen} == held_weights(SyncedPolicy()).keys() - names


@pytest.mark.parametrize("trainable", ["all", "expert", pytest.param("lora", marks=pytest.mark.slow)])  # peft takes seconds to import
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_plain_policy_agrees_with_the_engine(world: World, trainable: str, dtype: torch.dtype | None) -> None:
    config = EngineConfig(trainable=trainable, lora=LoraSettings(target_modules=("0", "2")))  # pyright: ignore[reportArgumentType]
    layout = engine_layout(Engine(SyncedPolicy(), config, 1, world), dtype)
    plain = SyncedPolicy().to(dtype)
    policy_layout(plain, layout).require_equal(layout, "worker", "trainer")
    assert [name for name, _ in synced_weights_of(world, config)] == [entry.name for entry in layout.synced]


def synced_weights_of(world: World, config: EngineConfig) -> list[tuple[str, torch.Tensor]]:
    return list(synced_weights(Engine(SyncedPolicy(), config, 1, world)))


def test_every_difference_is_listed(world: World) -> None:
    layout = engine_layout(Engine(SyncedPolicy(), EngineConfig(trainable="expert"), 1, world))
    other = SyncedPolicy(seed=1)  # another backbone: same shapes, other bits
    other.expert[0] = nn.Linear(24, 24, bias=False)
    other.value_head = nn.Linear(24, 2)
    other.extra = nn.Linear(1, 1, bias=False)
    other.expert[1].to(torch.float64)
    with pytest.raises(LayoutMismatch) as caught:
        policy_layout(other, layout).require_equal(layout, "the worker", "the trainer")
    text = str(caught.value)
    for line in (
        "expert.0.bias: torch.float32 [24] in the trainer, missing in the worker",
        "extra.weight: torch.float32 [1, 1] in the worker, missing in the trainer",
        "value_head.weight: torch.float32 [2, 24] in the worker, torch.float32 [1, 24] in the trainer",
        "expert.1.weight: torch.float64 [24] in the worker, torch.float32 [24] in the trainer",
    ):
        assert line in text
    frozen = [entry.name for entry in layout.frozen]
    assert all(f"\n  {name}: torch.float32" in text for name in frozen)
    # 9 synced or frozen parameters changed by name above (one missing, one extra, two of the norm, two of the value head), and all frozen
    assert f"differ in {1 + 1 + 2 + 2 + len(frozen)} places" in text


def test_another_order_is_a_difference() -> None:
    a, b = TensorEntry("a", (1,), torch.float32), TensorEntry("b", (1,), torch.float32)
    with pytest.raises(LayoutMismatch, match="in another order"):
        WeightLayout((a, b)).require_equal(WeightLayout((b, a)), "one", "two")


def test_weights_that_are_not_the_layouts_are_refused() -> None:
    layout = WeightLayout((TensorEntry("a", (2,), torch.float32), TensorEntry("b", (1,), torch.float32)))
    a, b = ("a", torch.zeros(2)), ("b", torch.zeros(1))
    assert [offset for _, offset, _ in layout.matched([a, b])] == [0, 64]
    with pytest.raises(LayoutMismatch, match=r"expects a \[2\], pushed was b \[1\]"):
        list(layout.matched([b, a]))
    with pytest.raises(LayoutMismatch, match="1 tensors of the layout were not pushed: b"):
        list(layout.matched([a]))
    with pytest.raises(LayoutMismatch, match=r"expects nothing more, pushed was a"):
        list(layout.matched([a, b, a]))


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 700))
def test_pieces_cover_a_tensor_once_and_stay_inside_buckets(offset: int, length: int, bucket_bytes: int) -> None:
    flat = [
        bucket * bucket_bytes + at for bucket, inside, _ in pieces(offset, length, bucket_bytes) for at in range(inside.start, inside.stop)
    ]
    parts = [at for _, _, part in pieces(offset, length, bucket_bytes) for at in range(part.start, part.stop)]
    assert flat == list(range(offset, offset + length))
    assert parts == list(range(length))
    assert all(0 <= inside.start < inside.stop <= bucket_bytes for _, inside, _ in pieces(offset, length, bucket_bytes))


def test_a_digest_sees_a_bit_a_name_a_dtype_and_a_shape() -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.tensor(1.0)}
    base = weights_digest(weights)
    assert weights_digest(dict(reversed(weights.items()))) == base
    negative = torch.zeros(2, 3)
    negative[1, 1] = -0.0  # equal as a number, another bit
    for other in (
        weights | {"a": negative},
        weights | {"a": torch.zeros(3, 2)},
        weights | {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"c": weights["a"], "b": weights["b"]},
    ):
        assert weights_digest(other) != base
