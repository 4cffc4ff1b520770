"""`kill -9` while a checkpoint is being written, again and again: what is there is whole, and training goes on bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_jobs import state
from toy_policy import TinyPolicy, train

from vla_rl.engine.checkpoint import last_checkpoint, load_checkpoint, verify_checkpoint
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import World

UPDATES = 4
KILLED_AT = ("state/.metadata", "trainer.json", "manifest.json")
"""A file of the second checkpoint at whose sight the child is killed: early, in the middle, just before the rename."""


@pytest.mark.faults
@pytest.mark.parametrize("seen", KILLED_AT)
def test_killed_in_the_middle_of_a_save(world: World, tmp_path: Path, seen: str) -> None:
    child = _child(tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "first checkpoint"
    target = tmp_path / ".step_2.tmp" / seen
    while not target.exists() and not (tmp_path / "step_2").exists():
        assert child.poll() is None, "the child ended before it was killed"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    folder = last_checkpoint(tmp_path)
    assert folder is not None
    verify_checkpoint(folder)
    straight, resumed = (Engine(TinyPolicy(seed=seed), EngineConfig(), 8, world) for seed in (0, 5))
    train(straight, UPDATES)
    load_checkpoint(resumed, folder)
    train(resumed, UPDATES - resumed.updates)
    ours, theirs = state(resumed), state(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _child(checkpoints: Path) -> subprocess.Popen[str]:
    """A process that trains and saves after updates 1 and 2; the second save carries a payload, which gives time to be killed."""
    paths = json.dumps([str(Path(__file__).parent)])
    code = f"""
import sys; sys.path[:0] = {paths}
from pathlib import Path
from toy_policy import TinyPolicy, train
from vla_rl.engine.checkpoint import save_checkpoint
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
engine = Engine(TinyPolicy(), EngineConfig(), 8)
checkpoints = Path({str(checkpoints)!r})
train(engine, 1)
save_checkpoint(engine, checkpoints, {{}})
print("first checkpoint", flush=True)
train(engine, 1)
save_checkpoint(engine, checkpoints, {{}}, lambda folder, weights: (folder.mkdir(), (folder / "payload").write_bytes(bytes(1 << 26))))
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
