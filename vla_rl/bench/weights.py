"""How long new weights take from the end of `optim_step` to another process that acts with them.

The trainer is the engine at world size 1 (its gather is timed apart, and once more with two ranks over gloo); the worker is another
process with a plain policy. Ours: shared memory, mapped (the worker's parameters are views) and copied. Peers: `torch.save` to a file
and `torch.load`, and `ray.put` and `ray.get` of the same tensors, each followed by `load_state_dict`. Each measurement is a fresh
pair of processes; the systems take turns. The worker's digest is compared with the trainer's in every measurement.

Limit: one memory copy of the same tensors, into memory that is mapped already, timed between the syncs of ours.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.bench.common import benchmark_parser, finish, measure_in_turns, spread
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.tensors import local_tensor
from vla_rl.engine.world import close_world, open_world
from vla_rl.weights.block import Copiers
from vla_rl.weights.digest import weights_digest
from vla_rl.weights.layout import engine_layout, held_weights, synced_weights
from vla_rl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender, SharedWeights

BAR_FILE = 10.0
"""Times faster than `torch.save` and `torch.load`."""
BAR_LIMIT = 0.8
"""Of one memory copy, for the transport."""
SYSTEMS = ("mapped", "copied", "file", "ray")
SYNCS = 5
"""Timed syncs of one measurement, after one that warms up."""
TENSOR_BYTES = 8 << 20
DEADLINE_S = 300.0
_PROCESSES = multiprocessing.get_context("spawn")


class Blocks(nn.Module):
    """`mebibytes` of float32 weights in matrices of 8 MiB, each with a small bias, as in a transformer."""

    def __init__(self, mebibytes: int) -> None:
        super().__init__()
        count, width = max(1, (mebibytes << 20) // TENSOR_BYTES), 1024
        self.matrices = nn.ParameterList(nn.Parameter(torch.full((TENSOR_BYTES // 4 // width, width), 1.0)) for _ in range(count))
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(count))

    def act(self) -> float:
        """The start of a forward: something of the last weights."""
        return float(self.matrices[-1].detach()[0, 0])


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, print its table and closing JSON line; 0 if both bars are reached."""
    parser = benchmark_parser("weights", __doc__)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[256, 1024], help="sizes of the model")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each system and size")
    options = parser.parse_args(arguments)
    rows = [_row(mebibytes, options.rounds) for mebibytes in options.mebibytes]
    ratio = min(row["ratio"]["file"]["median"] for row in rows)
    fraction = min(row["fraction_of_limit"]["median"] for row in rows)
    print(f"smallest ratio to torch.save and load: {ratio:.1f} (bar {BAR_FILE:g})", flush=True)
    print(f"smallest fraction of one memory copy: {fraction:.2f} (bar {BAR_LIMIT:g})", flush=True)
    status = finish("weights", ratio, BAR_FILE, fraction, [*rows, {"fraction_of_limit": fraction, "bar": BAR_LIMIT}], options)
    return status if fraction >= BAR_LIMIT else 1


def _row(mebibytes: int, rounds: int) -> dict[str, Any]:
    """All systems at one size, in turns."""
    runs = measure_in_turns("vla_rl.bench.weights", (*SYSTEMS, "gather"), rounds, str(mebibytes))
    seconds = {system: [run["seconds"] for run in measured] for system, measured in runs.items()}
    row = {
        "mebibytes": mebibytes,
        "seconds": {system: spread(values) for system, values in seconds.items()},
        "ratio": {peer: spread([p / o for o, p in zip(seconds["mapped"], seconds[peer])]) for peer in SYSTEMS if peer != "mapped"},
        "fraction_of_limit": spread([run["fraction_of_limit"] for run in runs["mapped"]]),
        "gather_s": spread([run["gather_s"] for run in runs["mapped"]]),
        "memory_copy_gb_per_s": statistics.median(run["copy_gb_per_s"] for run in runs["mapped"]),
        "load_average": os.getloadavg()[0],
    }
    print(_line(row), flush=True)
    return row


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{system} {1e3 * spread['median']:,.1f} ms" for system, spread in row["seconds"].items())
    ratios = ", ".join(f"{spread['median']:.1f} x {peer}" for peer, spread in row["ratio"].items())
    return f"{row['mebibytes']} MiB: {times}\n  mapped: {ratios}; {row['fraction_of_limit']['median']:.0%} of one memory copy"


def measure(system: str, mebibytes: int) -> dict[str, float]:
    """One measurement. Keys: `seconds` per sync (median), and for ours `gather_s`, `fraction_of_limit` and `copy_gb_per_s`."""
    if system == "gather":
        return _measure_gather(mebibytes)
    with ExitStack() as stack:
        stack.callback(close_world)
        engine = Engine(Blocks(mebibytes), EngineConfig(), 1, open_world("cpu"))
        if system == "file":
            return _measure_file(engine, mebibytes, stack)
        if system == "ray":
            return _measure_ray(engine, mebibytes, stack)
        return _measure_shared(engine, mebibytes, system == "mapped", stack)


def _measure_shared(engine: Engine, mebibytes: int, mapped: bool, stack: ExitStack) -> dict[str, float]:
    sender = SharedMemorySender(engine_layout(engine))
    stack.callback(sender.close)
    worker = stack.enter_context(_worker(_shared_worker, mebibytes, sender.address, mapped))
    targets = {name: torch.ones_like(tensor) for name, tensor in engine.named_weights()}
    gathers, copies, copiers = [], [], Copiers()
    stack.callback(copiers.close)

    def sync(version: int) -> float:
        sender.push(synced_weights(engine), version)
        arrived = worker.forward(version)
        gathers.append(sender.times.gather_s)
        copies.append(_copy_seconds(engine, targets, copiers))
        return arrived

    seconds = _seconds(engine, sync)
    worker.require_equal(engine)
    fractions = [copied / (total - gathered) for copied, total, gathered in zip(copies[1:], seconds[1:], gathers[1:])]
    return {
        "seconds": statistics.median(seconds[1:]),
        "gather_s": statistics.median(gathers[1:]),
        "fraction_of_limit": statistics.median(fractions),
        "copy_gb_per_s": sender.layout.nbytes / statistics.median(copies[1:]) / 1e9,
    }


def _measure_file(engine: Engine, mebibytes: int, stack: ExitStack) -> dict[str, float]:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "weights.pt"
    worker = stack.enter_context(_worker(_file_worker, mebibytes, path))

    def sync(version: int) -> float:
        torch.save(dict(engine.named_weights()), path)
        return worker.forward(version)

    seconds = _seconds(engine, sync)
    worker.require_equal(engine)
    return {"seconds": statistics.median(seconds[1:])}


def _measure_ray(engine: Engine, mebibytes: int, stack: ExitStack) -> dict[str, float]:
    import ray

    room = max(3 * (mebibytes << 20), 256 << 20)
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=room, log_to_driver=False)
    stack.callback(ray.shutdown)
    worker = ray.remote(_RayWorker).remote(mebibytes)

    def sync(version: int) -> float:
        reference = ray.put(dict(engine.named_weights()))
        return ray.get(worker.forward.remote([reference], version))

    seconds = _seconds(engine, sync)
    _require_digest(engine, ray.get(worker.digest.remote()))
    return {"seconds": statistics.median(seconds[1:])}


def _measure_gather(mebibytes: int) -> dict[str, float]:
    """Two trainer ranks over gloo: `seconds` to gather every weight on both."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_PROCESSES.Process(target=_gather_rank, args=(rank, mebibytes, Path(folder))) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(DEADLINE_S)
        return json.loads((Path(folder) / "gather.json").read_text())


def _gather_rank(rank: int, mebibytes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    world = open_world("cpu", rank, 2, folder / "rendezvous")
    engine = Engine(Blocks(mebibytes), EngineConfig(), 1, world)

    def sync(version: int) -> float:
        for _ in synced_weights(engine):
            pass
        return time.perf_counter()

    seconds = _seconds(engine, sync)
    if world.leads:
        (folder / "gather.json").write_text(json.dumps({"seconds": statistics.median(seconds[1:])}))
    world.barrier()
    close_world()


def _seconds(engine: Engine, sync: Callable[[int], float]) -> list[float]:
    """Seconds from each change of the weights to `sync(version)`, which returns the time at which the worker has them."""
    seconds: list[float] = []
    for version in range(1, SYNCS + 2):
        _change(engine, version)
        started = time.perf_counter()
        seconds.append(sync(version) - started)
    return seconds


def _change(engine: Engine, version: int) -> None:
    """What `optim_step` leaves behind: every weight changed in place (without the optimizer's memory)."""
    with torch.no_grad():
        for parameter in engine.trainable().values():
            local_tensor(parameter).fill_(version)


def _copy_seconds(engine: Engine, targets: dict[str, Tensor], copiers: Copiers) -> float:
    """One memory copy of all weights, by as many threads as a push has, into memory that is mapped already."""
    weights = [(targets[name], tensor) for name, tensor in engine.named_weights()]
    started = time.perf_counter()
    copiers.write_all(weights)
    return time.perf_counter() - started


def _require_digest(engine: Engine, digest: str) -> None:
    expected = weights_digest(dict(engine.named_weights()))
    if digest != expected:
        raise AssertionError(f"the worker holds weights {digest[:12]}, the trainer {expected[:12]}")


class _Worker:
    """The trainer's end of the pipe to a worker process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def forward(self, version: int) -> float:
        """Tell the worker to act with `version`; the time (shared clock) at which its forward began."""
        self._connection.send(version)
        arrived, acted_with = self._answer()
        if acted_with != version:
            raise AssertionError(f"the worker acted with version {acted_with}, pushed was {version}")
        return arrived

    def require_equal(self, engine: Engine) -> None:
        """Raise AssertionError unless the worker holds the engine's bits."""
        self._connection.send(None)
        _require_digest(engine, self._answer())

    def _answer(self) -> Any:
        if not self._connection.poll(DEADLINE_S):
            raise TimeoutError(f"the worker has not answered for {DEADLINE_S:g} s")
        return self._connection.recv()


@contextmanager
def _worker(job: Callable[..., None], mebibytes: int, *arguments: Any) -> Iterator[_Worker]:
    """`job(connection, mebibytes, *arguments)` in another process, ready to pull."""
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=job, args=(theirs, mebibytes, *arguments), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(DEADLINE_S):
        raise TimeoutError(f"the worker did not start within {DEADLINE_S:g} s")
    ours.recv()
    yield _Worker(ours)
    process.join(DEADLINE_S)


def _shared_worker(trainer: Connection, mebibytes: int, address: SharedWeights, mapped: bool) -> None:
    policy = Blocks(mebibytes)
    receiver = SharedMemoryReceiver(address, policy, mapped)
    _serve(trainer, policy, lambda: receiver.pull(policy))


def _file_worker(trainer: Connection, mebibytes: int, path: Path) -> None:
    policy = Blocks(mebibytes)
    _serve(trainer, policy, lambda: policy.load_state_dict(torch.load(path, weights_only=True)))


def _serve(trainer: Connection, policy: Blocks, pull: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    trainer.send("ready")
    while trainer.recv() is not None:
        pull()
        arrived = time.perf_counter()
        trainer.send((arrived, policy.act()))
    trainer.send(weights_digest(held_weights(policy)))


class _RayWorker:
    def __init__(self, mebibytes: int) -> None:
        torch.set_num_threads(1)
        self.policy = Blocks(mebibytes)

    def forward(self, references: list[Any], version: int) -> float:
        import ray

        self.policy.load_state_dict(ray.get(references[0]))
        arrived = time.perf_counter()
        if self.policy.act() != version:
            raise AssertionError(f"the worker acted with version {self.policy.act()}, pushed was {version}")
        return arrived

    def digest(self) -> str:
        return weights_digest(held_weights(self.policy))


if __name__ == "__main__":
    # Only `main` starts this, in fresh processes: measure SYSTEM MEBIBYTES.
    print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
