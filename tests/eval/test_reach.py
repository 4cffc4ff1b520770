"""The whole of an evaluation on a real simulator: the small Reach scene, with videos, controls and a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import pytest

from vla_rl.eval.compare import run_compare
from vla_rl.eval.config import EvalConfig
from vla_rl.eval.results import read_rows
from vla_rl.eval.runner import evaluate, run_eval
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig


def config_of(run_dir: Path, actor: str, **more: Any) -> EvalConfig:
    values: dict[str, Any] = {
        "suite": "reach",
        "protocol": "sampled",
        "episodes_per_task": 3,
        "videos": 0,
        "env": EnvConfig(kind="reach", resolution=64),
        "pool": PoolConfig(backend="serial", workers=2),
        "show_progress": False,
    }
    return EvalConfig(str(run_dir), actor=actor, **(values | more))


def test_expert_and_no_op_controls_and_their_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expert = evaluate(config_of(tmp_path / "expert", "expert", videos=1))
    noop = evaluate(config_of(tmp_path / "noop", "noop"))
    assert (expert.rate, noop.rate) == (1.0, 0.0)
    rows = read_rows(tmp_path / "expert" / "episodes.jsonl")
    assert len(rows) == 12 and all(len(row.init_hash) == 64 for row in rows)
    assert {row.init for row in rows} == {"sampled:3000000", "sampled:3000001", "sampled:3000002"}
    assert expert.protocol["hash"] == noop.protocol["hash"]
    assert run_compare(tmp_path / "noop", tmp_path / "expert") == 0
    assert "12 wins, 0 losses" in capsys.readouterr().out
    filmed = [row for row in rows if row.video]
    assert len(filmed) == 4, "one of each task"
    with av.open(str(tmp_path / "expert" / filmed[0].video)) as container:
        frames = sum(1 for _ in container.decode(video=0))
    assert frames >= filmed[0].steps // 2


def test_processes_and_serial_pool_give_the_same_rows(tmp_path: Path) -> None:
    evaluate(config_of(tmp_path / "serial", "random", tasks=(0,)))
    evaluate(config_of(tmp_path / "process", "random", tasks=(0,), pool=PoolConfig(workers=3)))

    def told(name: str) -> list[tuple[Any, ...]]:
        rows = read_rows(tmp_path / name / "episodes.jsonl")
        return sorted((row.key, row.outcome, row.steps, row.init_hash, row.scene_seed) for row in rows)

    assert told("serial") == told("process")


def test_a_swapped_prompt_names_the_other_block_of_the_same_scene(tmp_path: Path) -> None:
    """The expert follows the goal: it reaches the named block under one goal, and the scene's own under the other."""
    summary = evaluate(config_of(tmp_path, "expert", prompt="swap", tasks=(1,)))
    assert [result.pooled.successes for result in summary.results] == [3, 3]
    named = [row for row in read_rows(tmp_path / "episodes.jsonl") if row.goal]
    assert all(row.instruction == f"reach the {row.goal.removeprefix('(Reach ').removesuffix('_block)')} block" for row in named)
    assert "green" not in {row.instruction.split()[2] for row in named}


def test_spans_explain_the_time(tmp_path: Path) -> None:
    assert run_eval(config_of(tmp_path, "noop", tasks=(0,))) == 0
    names = {json.loads(line)["name"] for line in (tmp_path / "spans.jsonl").read_text().splitlines()}
    assert {"eval", "load_actor", "start_envs", "write_rows"} <= names
