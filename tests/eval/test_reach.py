"""The whole of an evaluation on a real simulator: the small Reach scene, with videos, controls and a comparison."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from vla_rl.collection.collect import collect
from vla_rl.collection.config import CollectConfig
from vla_rl.config import ConfigError
from vla_rl.conventions import ConventionMismatch, Orientation
from vla_rl.episode import ACTION_DIM, STATE_DIM
from vla_rl.errors import UserError
from vla_rl.eval import make_record
from vla_rl.eval.compare import run_compare
from vla_rl.eval.config import EvalConfig, EvaluatedPolicy
from vla_rl.eval.record import RecordError, check_record
from vla_rl.eval.results import read_rows
from vla_rl.eval.runner import evaluate, run_eval
from vla_rl.eval.statistics import paired_difference_interval
from vla_rl.policies.checkpoint import save_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics
from vla_rl.rollout import ConnectError
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.environment import source_commit
from vla_rl.telemetry.files import folder_digest, read_jsonl


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


def test_recorded_actions_of_successful_episodes_succeed_again(tmp_path: Path) -> None:
    """The control that must be 100 %: noisy demonstrations, re-executed action by action in their own scenes."""
    serial = PoolConfig(backend="serial", workers=2)
    reach = EnvConfig(kind="reach", resolution=64)
    collect(CollectConfig(str(tmp_path / "demos"), suite="reach", tasks=(0, 2), episodes_per_task=4, env=reach, pool=serial))
    summary = evaluate(config_of(tmp_path / "replay", "replay", dataset=str(tmp_path / "demos" / "episodes"), episodes_per_task=None))
    recorded = {row.key: row for row in read_rows(tmp_path / "demos" / "episodes.jsonl") if row.success}
    replayed = {row.key: row for row in read_rows(tmp_path / "replay" / "episodes.jsonl")}
    assert summary.rate == 1.0 and recorded and replayed.keys() == recorded.keys()
    for key, row in replayed.items():
        assert (row.steps, row.init_hash) == (recorded[key].steps, recorded[key].init_hash)
    assert any("inits: those of" in line for line in summary.protocol["deviations"])


def test_a_dataset_with_a_scene_twice_is_not_replayed(tmp_path: Path) -> None:
    """One of the two would be replayed twice, and after all of them no rate would be right."""
    reach = EnvConfig(kind="reach", resolution=64)
    pool = PoolConfig(backend="serial", workers=1)
    collect(CollectConfig(str(tmp_path / "demos"), suite="reach", tasks=(0,), episodes_per_task=2, env=reach, pool=pool))
    episodes = tmp_path / "demos" / "episodes"
    shutil.copy(episodes / "episode_000000.hdf5", episodes / "episode_000009.hdf5")
    with pytest.raises(ConfigError, match=r"holds the scene reach/\d/sampled:\d+/s0 more than once \(1 such scenes\)"):
        evaluate(config_of(tmp_path / "replay", "replay", dataset=str(episodes), episodes_per_task=None))
    assert not (tmp_path / "replay").exists()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny policy with random weights, on disk."""
    generator = np.random.default_rng(0)
    features = {STATE: generator.normal(size=(100, STATE_DIM)), ACTION: generator.uniform(-1, 1, size=(100, ACTION_DIM))}
    statistics = Statistics({name: FeatureStats.from_values(values) for name, values in features.items()})
    config = PI0_PRESETS["tiny"]
    save_policy(make_policy(config, statistics, policy_spec(config, resolution=64)), tmp_path / "policy")
    return tmp_path / "policy"


def test_a_policy_from_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """Its weights are in every row, its horizon in the protocol, and another horizon is a note and another hash."""
    own = evaluate(config_of(tmp_path / "own", "policy", policy=EvaluatedPolicy(str(checkpoint)), tasks=(0,), episodes_per_task=1))
    made_for = PI0_PRESETS["tiny"].executed_horizon
    assert own.complete and own.protocol["executed_horizon"] == made_for and not own.actor["notes"]
    rows = read_rows(tmp_path / "own" / "episodes.jsonl")
    assert {row.weights for row in rows} == {folder_digest(checkpoint)}
    two = EvaluatedPolicy(str(checkpoint), executed_horizon=2)
    short = evaluate(config_of(tmp_path / "short", "policy", policy=two, tasks=(0,), episodes_per_task=1))
    assert short.protocol["executed_horizon"] == 2 and short.protocol["hash"] != own.protocol["hash"]
    assert f"executed_horizon is 2, but the policy was made for {made_for}" in short.actor["notes"][0]
    beyond = EvaluatedPolicy(str(checkpoint), executed_horizon=9)
    with pytest.raises(ConfigError, match=rf"policy\.executed_horizon is 9; a chunk of {checkpoint} has 8 actions, ask for at most that"):
        evaluate(config_of(tmp_path / "beyond", "policy", policy=beyond, tasks=(0,), episodes_per_task=1))


def test_an_env_that_a_policy_was_not_made_for_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    small = EnvConfig(kind="reach", resolution=32)
    with pytest.raises(ConnectError, match=r"pictures of 64 px; env reach renders 32 px"):
        evaluate(config_of(tmp_path / "small", "policy", policy=EvaluatedPolicy(str(checkpoint)), env=small))
    upside_down = EnvConfig(kind="reach", resolution=64, orientation=Orientation.RAW)
    with pytest.raises(ConventionMismatch, match="orientation"):
        evaluate(config_of(tmp_path / "raw", "policy", policy=EvaluatedPolicy(str(checkpoint)), env=upside_down))


def test_a_missing_checkpoint_is_named_and_a_changed_one_changes_the_digest(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        evaluate(config_of(tmp_path / "run", "policy", policy=EvaluatedPolicy(str(tmp_path / "nowhere"))))
    before = folder_digest(checkpoint)
    with open(checkpoint / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert folder_digest(checkpoint) != before


def test_a_record_of_finished_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows under the record's conditions, rates that check out, and a missed bar that is said aloud."""
    evaluate(config_of(tmp_path / "swap", "expert", prompt="swap", tasks=(1,)))
    evaluate(config_of(tmp_path / "noop", "noop", tasks=(1,), videos=1))
    command = ["reach", "--command", "vla-rl eval x.yaml", "--run", f"swap={tmp_path / 'swap'}", "--run", f"noop={tmp_path / 'noop'}"]
    bars = ["--bar", "swap_named_object_success_rate=0.5", "--bar-at-most", "swap_original_object_success_rate=0.2"]
    assert make_record.main([*command, *bars, "--root", str(tmp_path)]) == 0
    assert "swap_original_object_success_rate is 1.0, above its bar of at most 0.2" in capsys.readouterr().out
    record = json.loads((tmp_path / "reach" / "record.json").read_text())
    rates = {name: value for name, value in record["metrics"].items() if name.endswith("success_rate")}
    assert rates == {
        "success_rate": 1.0,
        "swap_named_object_success_rate": 1.0,
        "swap_original_object_success_rate": 1.0,
        "noop_success_rate": 0.0,
    }
    assert record["metrics"]["protocols"]["noop"]["name"] == "sampled" and record["recipe"]["noop"]["actor"] == "noop"
    assert check_record(tmp_path / "reach") == []


def test_a_condition_of_a_record_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(config_of(tmp_path / "noop", "noop", tasks=(1,)))
    evaluate(config_of(tmp_path / "expert", "expert", tasks=(1,)))
    common = ["reach", "--command", "vla-rl eval x.yaml", "--root", str(tmp_path)]
    assert make_record.main([*common, "--run", f"noop={tmp_path / 'noop'}"]) == 0
    alone = json.loads((tmp_path / "reach" / "record.json").read_text())
    assert make_record.main([*common, "--keep", "noop", "--run", f"expert={tmp_path / 'expert'}"]) == 0
    both = json.loads((tmp_path / "reach" / "record.json").read_text())
    assert check_record(tmp_path / "reach") == []
    assert (both["metrics"]["noop_success_rate"], both["metrics"]["expert_success_rate"]) == (0.0, 1.0)
    assert both["metrics"]["commits"]["noop"] == alone["metrics"]["commits"]["noop"]
    assert both["recipe"]["noop"] == alone["recipe"]["noop"] and list(both["metrics"]["protocols"]) == ["noop", "expert"]
    with pytest.raises(RecordError, match=r"--keep nop: .* has no such condition; did you mean 'noop'"):
        make_record.main([*common, "--keep", "nop", "--run", f"expert={tmp_path / 'expert'}"])


def test_a_record_says_at_which_commits_its_episodes_ran(tmp_path: Path) -> None:
    """Not at which one the run directory was opened last."""
    evaluate(config_of(tmp_path / "noop", "noop", tasks=(1,)))
    rows = read_jsonl(tmp_path / "noop" / "episodes.jsonl")
    assert {row["commit"] for row in rows} == {source_commit()} and len(rows) == 3
    for row, commit in zip(rows, ("aaaa", "aaaa", "bbbb")):
        row["commit"] = commit
    (tmp_path / "noop" / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert make_record.main(["reach", "--command", "x", "--run", f"noop={tmp_path / 'noop'}", "--root", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "reach" / "record.json").read_text())["metrics"]["commits"] == {"noop": "aaaa, bbbb"}


def test_compare_pairs_what_two_evaluations_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many inits each had does not count: what only one ran is left out, and said."""
    evaluate(config_of(tmp_path / "noop", "noop", tasks=(1,)))
    evaluate(config_of(tmp_path / "expert", "expert", tasks=(1,), episodes_per_task=2))
    assert run_compare(tmp_path / "noop", tmp_path / "expert") == 0
    shown = capsys.readouterr().out
    assert "B - A over 2 pairs: +100.0 points" in shown
    assert "left out, only in A: 1 specs, for example reach/1/" in shown


def test_the_gain_between_two_conditions_is_paired(tmp_path: Path) -> None:
    """Three scenes lost by no-op and won by the expert: +100 points, and p is twice the half of a half of a half."""
    evaluate(config_of(tmp_path / "noop", "noop", tasks=(1,)))
    evaluate(config_of(tmp_path / "expert", "expert", tasks=(1,)))
    runs = [f"--run={name}={tmp_path / name}" for name in ("noop", "expert")]
    common = ["reach", "--command", "vla-rl eval x.yaml", "--root", str(tmp_path), *runs, "--bar=points_gained=30"]
    assert make_record.main([*common, "--gain", "noop=expert"]) == 0
    metrics = json.loads((tmp_path / "reach" / "record.json").read_text())["metrics"]
    assert (metrics["points_gained"], metrics["mcnemar_p"]) == (100.0, 0.25)
    assert metrics["points_gained_95"] == [round(100 * end, 2) for end in paired_difference_interval(3, 0, 3)]
    with pytest.raises(RecordError, match=r"--gain noop=export: no row has condition 'export'; did you mean 'expert'"):
        make_record.main([*common, "--gain", "noop=export"])


def test_a_gain_over_evaluations_that_compare_would_refuse_is_refused(tmp_path: Path) -> None:
    """Also one with a kept condition, whose rows say in which state each spec began."""
    raw = EnvConfig(kind="reach", resolution=64, orientation=Orientation.RAW)
    evaluate(config_of(tmp_path / "noop", "noop", tasks=(1,), env=raw))
    evaluate(config_of(tmp_path / "expert", "expert", tasks=(1,)))
    common = ["reach", "--command", "vla-rl eval x.yaml", "--root", str(tmp_path)]
    noop, expert = (f"--run={name}={tmp_path / name}" for name in ("noop", "expert"))
    with pytest.raises(RecordError, match=r"they were not evaluated alike:\n  protocol orientation: raw against rotated_180\n"):
        make_record.main([*common, noop, expert, "--gain", "noop=expert"])
    assert make_record.main([*common, noop]) == 0
    rows = tmp_path / "expert" / "episodes.jsonl"
    rows.write_text(re.sub(r'"init_hash": "\w+"', '"init_hash": "another"', rows.read_text()))
    with pytest.raises(RecordError, match="--gain noop=expert: initial states differ in 3 specs, for example reach/1/"):
        make_record.main([*common, expert, "--keep", "noop", "--gain", "noop=expert"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run=a=one", "--run=a=two"], "--run a is given twice, as one and two; give each its own name"),
        (["--run=a=one", "--recipe=b=one", "--recipe=b=two"], "--recipe b is given twice"),
        (["--run=a=one", "--metric=x=1", "--metric=x=2"], "--metric x is given twice"),
        (["--run=a=one", "--bar=x=1", "--bar-at-most=x=2"], "--bar and --bar-at-most are both given for x; give one"),
    ],
)
def test_a_name_that_is_given_twice_loses_nothing(options: list[str], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        make_record.main(["reach", "--command", "vla-rl eval x.yaml", *options])


def test_spans_explain_the_time(tmp_path: Path) -> None:
    assert run_eval(config_of(tmp_path, "noop", tasks=(0,))) == 0
    names = {json.loads(line)["name"] for line in (tmp_path / "spans.jsonl").read_text().splitlines()}
    assert {"eval", "load_actor", "start_envs", "write_rows"} <= names
