"""Moments that leave the device come back bit for bit, and the engine trains on as if nothing had been."""

from __future__ import annotations

import torch
from toy_policy import TinyPolicy, train

from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.offload import Offload
from vla_rl.engine.tensors import local_tensor
from vla_rl.engine.world import World


def moments(engine: Engine) -> list[torch.Tensor]:
    states = [engine.optimizer.state[parameter] for parameter in engine.trainable().values()]
    return [local_tensor(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq")]


def on_device(engine: Engine) -> int:
    """Bytes of the moments' storages, and of gradients."""
    gradients = [local_tensor(p.grad) for p in engine.trainable().values() if p.grad is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*moments(engine), *gradients))


def test_moments_leave_and_come_back(world: World) -> None:
    engine, twin = (Engine(TinyPolicy(), EngineConfig(ema_decay=0.9), 8, world) for _ in range(2))
    train(engine, 2)
    train(twin, 2)
    elements = sum(parameter.numel() for parameter in engine.trainable().values())
    assert on_device(engine) == 2 * 4 * elements
    offload = Offload(engine)
    assert offload.leave() == 3 * 4 * elements, "two moments and the average"
    assert on_device(engine) == 0
    assert offload.leave() == 0, "they are away already"
    offload.come_back()
    offload.come_back()
    assert on_device(engine) == 2 * 4 * elements
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(moments(engine), moments(twin), strict=True))
    train(engine, 2)
    train(twin, 2)
    weights = dict(twin.named_weights(averaged=True))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.named_weights(averaged=True))


def test_before_the_first_update_there_is_nothing_to_move(world: World) -> None:
    engine = Engine(TinyPolicy(), EngineConfig(), 8, world)
    offload = Offload(engine)
    assert offload.leave() == 0
    offload.come_back()
    train(engine, 1)
