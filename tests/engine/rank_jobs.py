"""What ranks do in their own processes, and how a test starts them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from toy_policy import Rows, TinyPolicy, count, loss, rows, train

from vla_rl.engine.checkpoint import load_checkpoint, save_checkpoint
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine, EngineError
from vla_rl.engine.tensors import full_tensor
from vla_rl.engine.world import World, close_world, open_world
from vla_rl.process import end_process

DEADLINE_S = 540


def run_ranks(job: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """`job(world, *arguments)` in `size` processes over gloo; their results by rank."""
    context = multiprocessing.get_context("spawn")
    folder.mkdir(parents=True, exist_ok=True)
    processes = [context.Process(target=_rank, args=(rank, size, folder, job, arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, folder: Path, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    world = open_world("cpu", rank, size, folder / "rendezvous")
    result = job(world, *arguments)
    torch.save(result, folder / f"result_{rank}.pt")
    close_world()
    end_process(0)


def share(batch: Rows, world: World, micro_batches: int) -> list[Rows]:
    """This rank's part of a global batch, cut into equal micro-batches."""
    ours = len(batch) // world.size
    start, size = world.rank * ours, ours // micro_batches
    return [batch.cut(start + size * index, start + size * (index + 1)) for index in range(micro_batches)]


def gradients(world: World, config: EngineConfig, micro_batches: int) -> dict[str, Any]:
    """Loss, metrics and full gradients of one global batch of 16 rows."""
    engine = Engine(TinyPolicy(), config, 8, world)
    result = engine.forward_backward(share(rows(16), world, micro_batches), loss, count)
    grads = {name: full_tensor(p.grad).clone() for name, p in engine.trainable().items() if p.grad is not None}
    return {"loss": result.loss, "metrics": result.metrics, "gradients": grads}


def state(engine: Engine) -> dict[str, torch.Tensor]:
    """Weights, averages and moments as full tensors."""
    tensors = {f"weight {name}": tensor.clone() for name, tensor in engine.named_weights()}
    if engine.average is not None:
        tensors |= {f"average {name}": full_tensor(tensor).clone() for name, tensor in engine.average.values.items()}
    for name, parameter in engine.trainable().items():
        moments = engine.optimizer.state[parameter]
        tensors |= {f"{key} {name}": full_tensor(value).clone() for key, value in moments.items()}
    return tensors


def two_ranks(world: World, folder: Path) -> dict[str, Any]:
    """Everything that the tests of two ranks look at, in one start."""
    report: dict[str, Any] = {"gradients": {n: gradients(world, EngineConfig(), n) for n in (1, 2, 4)}}
    report["seeds"] = _different_seeds(world)
    report["unequal"] = _unequal(world)
    engine = Engine(TinyPolicy(), EngineConfig(ema_decay=0.9), 8, world)
    train(engine, 2)
    save_checkpoint(engine, folder / "checkpoints", {"cursor": [1, 2]})
    report["saved"] = state(engine)
    report["rng"] = torch.get_rng_state()
    train(engine, 2)
    report["trained"] = state(engine)
    return report


def resumed(world: World, checkpoint: Path, updates: int) -> dict[str, Any]:
    """State right after a resume, and after some more updates."""
    engine = Engine(TinyPolicy(seed=9), EngineConfig(ema_decay=0.9), 8, world)
    extra = load_checkpoint(engine, checkpoint)
    report = {"extra": extra, "loaded": state(engine), "rng": torch.get_rng_state(), "updates": engine.updates}
    train(engine, updates)
    return report | {"trained": state(engine)}


def _different_seeds(world: World) -> torch.Tensor:
    """Each rank brings other weights; rank 0's must count."""
    engine = Engine(TinyPolicy(seed=world.rank), EngineConfig(), 8, world)
    return dict(engine.named_weights())["expert.weight"].clone()


def _unequal(world: World) -> str:
    engine = Engine(TinyPolicy(), EngineConfig(), 8, world)
    try:
        engine.forward_backward(share(rows(16), world, 1 + world.rank), loss, count)
    except EngineError as error:
        return str(error)
    return "no error"
