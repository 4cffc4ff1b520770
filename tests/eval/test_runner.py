"""Every spec exactly once, whatever finishes first; crashes apart from failures; truncation is no success; resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.actors import no_op_actor
from vla_rl.config import ConfigError
from vla_rl.conventions import Conventions, Orientation
from vla_rl.eval import contestants, runner
from vla_rl.eval.compare import load_run
from vla_rl.eval.config import EvalConfig, EvaluatedPolicy
from vla_rl.eval.contestants import Contestant
from vla_rl.eval.plan import plan_episodes
from vla_rl.eval.protocol import get_protocol
from vla_rl.eval.results import read_rows
from vla_rl.eval.runner import evaluate, run_eval
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry import run_directory


def config_of(run_dir: Path, **more: Any) -> EvalConfig:
    values: dict[str, Any] = {"tasks": (0, 1), "episodes_per_task": 10, "actor": "noop", "videos": 0, "show_progress": False} | more
    return EvalConfig(str(run_dir), **values)


@pytest.fixture
def pools(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes `evaluate` run on fake pools; the list collects them. `crashes` and `stop_after` can be set on the list."""

    class Pools(list[Any]):
        def __init__(self) -> None:
            self.crashes: dict[str, int] = {}
            self.spec = None

    made = Pools()

    def make_pool(pool: PoolConfig, env: EnvConfig, make_env: Any) -> Any:
        spec = replace(fakes.Pool.spec, resolution=env.resolution)
        made.append(fakes.Pool(pool.workers, seed=len(made), crashes=made.crashes, spec=made.spec or spec))
        return made[-1]

    monkeypatch.setattr(runner, "make_pool", make_pool)
    return made


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_every_spec_exactly_once_and_the_same_for_any_number_of_envs(tmp_path: Path, pools: list[Any], workers: int) -> None:
    """20 episodes, 7 envs that finish at different times (LeRobot #4152, #2832, #4315)."""
    summary = evaluate(config_of(tmp_path / "run", pool=PoolConfig(workers=workers)))
    rows = read_rows(tmp_path / "run" / "episodes.jsonl")
    assert sorted((row.task, row.init) for row in rows) == sorted((task, f"benchmark:{k}") for task in (0, 1) for k in range(10))
    assert pools[0].started == [entry.spec.key for entry in plan_episodes(config_of(tmp_path), get_protocol("openvla-oft"))]
    outcomes = {row.key: (row.outcome, row.steps, row.init_hash) for row in rows}
    alone = evaluate(config_of(tmp_path / "alone", pool=PoolConfig(workers=1)))
    assert outcomes == {row.key: (row.outcome, row.steps, row.init_hash) for row in read_rows(tmp_path / "alone" / "episodes.jsonl")}
    assert summary.results == alone.results
    assert summary.complete and summary.planned == 20 and pools[0].closed == 1


def test_the_time_limit_is_a_failure_that_truncates(tmp_path: Path, pools: list[Any]) -> None:
    evaluate(config_of(tmp_path))
    failures = [row for row in read_rows(tmp_path / "episodes.jsonl") if row.outcome == "failure"]
    assert failures
    for row in failures:
        assert (row.steps, row.success, row.terminated, row.truncated, row.reason) == (280, False, False, True, "time limit")


def test_a_spec_that_crashes_once_runs_again(tmp_path: Path, pools: Any) -> None:
    pools.crashes = {"libero_object/0/benchmark:3/s0": 1}
    summary = evaluate(config_of(tmp_path))
    assert summary.complete and summary.crashes == 0
    assert summary.results[0].pooled.trials == 20
    assert pools[0].started.count("libero_object/0/benchmark:3/s0") == 2


def test_a_spec_that_crashes_twice_leaves_an_incomplete_result(tmp_path: Path, pools: Any, capsys: pytest.CaptureFixture[str]) -> None:
    key = "libero_object/0/benchmark:3/s0"
    pools.crashes = {key: 2}
    assert run_eval(config_of(tmp_path)) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["missing"] == [f"noop | {key}"] and summary["crashes"] == 1
    assert summary["results"][0]["trials"] == 19, "a crash is no failure: it has no place in the rate"
    [row] = [row for row in read_rows(tmp_path / "episodes.jsonl") if row.key == key]
    assert row.crashed and "GLError: no context left" in row.reason
    assert "INCOMPLETE: 1 of 20" in capsys.readouterr().out
    assert run_eval(config_of(tmp_path)) == 0, "starting again runs what is missing"
    assert pools[1].started == [key]
    assert json.loads((tmp_path / "summary.json").read_text())["results"][0]["trials"] == 20


def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path: Path, pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate(config_of(tmp_path / "whole"))
    record = runner._Recorder.record

    def interrupted(self: Any, episode: Any) -> Any:
        if len(read_rows(tmp_path / "cut" / "episodes.jsonl")) == 7:
            raise KeyboardInterrupt
        return record(self, episode)

    monkeypatch.setattr(runner._Recorder, "record", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config_of(tmp_path / "cut"))
    assert pools[1].closed == 1, "the pool is closed on the way out"
    with open(tmp_path / "cut" / "episodes.jsonl", "a") as file:
        file.write('{"key": "libero_object/1/bench')  # what a power cut leaves of the eighth row
    monkeypatch.setattr(runner._Recorder, "record", record)
    summary = evaluate(config_of(tmp_path / "cut"))
    assert len(pools[2].started) == 13 and len(pools) == 3
    assert summary.results == evaluate(config_of(tmp_path / "whole")).results
    assert len(pools) == 3, "a finished evaluation starts no simulator"


def test_a_finished_evaluation_keeps_where_it_was_measured(tmp_path: Path, pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records and reports take the commit from there; starting again elsewhere measures nothing."""
    first = evaluate(config_of(tmp_path))
    monkeypatch.setattr(run_directory, "environment", lambda: {"commit": "a newer one"})
    assert evaluate(config_of(tmp_path)).results == first.results
    assert json.loads((tmp_path / "environment.json").read_text())["commit"] != "a newer one"


def test_other_weights_or_another_recipe_in_the_same_directory_are_refused(
    tmp_path: Path, pools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(config_of(tmp_path))
    with pytest.raises(ConfigError, match="episodes_per_task: 10 -> 5"):
        evaluate(config_of(tmp_path, episodes_per_task=5))
    monkeypatch.setattr(runner, "make_contestant", lambda config, recorded: Contestant(no_op_actor(), "abc", None))
    monkeypatch.setattr(runner, "known_weights", lambda config: "abc")
    with pytest.raises(ConfigError, match="other weights"):
        evaluate(config_of(tmp_path))


def test_an_env_that_does_not_fit_is_refused_before_anything_runs(tmp_path: Path, pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = no_op_actor()
    actor.needs = replace(actor.needs, name="pi0", conventions=Conventions())
    monkeypatch.setattr(runner, "make_contestant", lambda config, recorded: Contestant(actor, "", 8))
    pools.spec = replace(pools_spec(), conventions=Conventions(orientation=Orientation.RAW))
    with pytest.raises(ValueError, match="orientation: actor pi0 has 'rotated_180', env libero has 'raw'"):
        evaluate(config_of(tmp_path / "orientation"))
    pools.spec = replace(pools_spec(), conventions=Conventions(control_rate_hz=10))
    with pytest.raises(ValueError, match="control_rate_hz: actor pi0 has 20, env libero has 10"):
        evaluate(config_of(tmp_path / "rate"))
    pools.spec = None
    actor.needs = replace(actor.needs, resolution=256)
    with pytest.raises(ValueError, match=r"pictures of 256 px; env libero renders 128 px"):
        evaluate(config_of(tmp_path / "resolution"))
    assert not any(pool.started for pool in pools)
    left = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert left == {"config.yaml", "environment.json", ".lock"}, "no result: a corrected recipe may use the same directory"


def pools_spec() -> Any:
    from vla_rl.episode import VIEWS
    from vla_rl.sim.base import EnvSpec

    return EnvSpec("libero", Conventions(), VIEWS, 128, {})


def test_summary_declares_protocol_deviations_and_actor(tmp_path: Path, pools: Any) -> None:
    evaluate(config_of(tmp_path))
    run = load_run(tmp_path)
    protocol = run.summary["protocol"]
    assert protocol["deviations"] == ["resolution: 128 in place of 256", "inits_per_task: 10 in place of 50"]
    assert protocol["hash"] != protocol["published_hash"] == get_protocol("openvla-oft").to_dict()["hash"]
    assert run.summary["actor"]["kind"] == "noop" and run.summary["env"]["mujoco"] == "3.3.2"
    assert run.summary["environment"]["packages"]["mujoco"]


def test_videos_are_those_of_the_first_episodes_of_each_task(tmp_path: Path, pools: Any) -> None:
    evaluate(config_of(tmp_path, videos=2, pool=PoolConfig(workers=7)))
    filmed = {row.key: row.video for row in read_rows(tmp_path / "episodes.jsonl") if row.video}
    assert sorted(filmed) == sorted(f"libero_object/{task}/benchmark:{k}/s0" for task in (0, 1) for k in (0, 1))
    for key, video in filmed.items():
        outcome = next(row.outcome for row in read_rows(tmp_path / "episodes.jsonl") if row.key == key)
        assert video.endswith(f"_{outcome}.mp4") and (tmp_path / video).stat().st_size > 0


def test_an_actor_with_an_error_ends_the_run_with_that_error(tmp_path: Path, pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(observation: Any) -> Any:
        raise FloatingPointError("velocity is NaN")

    monkeypatch.setattr(contestants, "no_op_actor", lambda: runner_actor(broken))
    with pytest.raises(FloatingPointError, match="velocity is NaN"):
        evaluate(config_of(tmp_path))
    assert pools[0].closed == 1


def runner_actor(decide: Any) -> Any:
    from vla_rl.actors import ActorNeeds, SynchronousActor

    return SynchronousActor(ActorNeeds("broken"), lambda spec: decide)


def test_swapped_prompts_ask_for_both_goals_once_per_init(tmp_path: Path, pools: Any) -> None:
    summary = evaluate(config_of(tmp_path, prompt="swap", tasks=(0,), episodes_per_task=5))
    assert [(result.condition, result.pooled.trials) for result in summary.results] == [
        ("noop, swap prompt: named object", 5),
        ("noop, swap prompt: original object", 5),
    ]
    rows = read_rows(tmp_path / "episodes.jsonl")
    named = {row.init: row for row in rows if row.goal}
    original = {row.init: row for row in rows if not row.goal}
    assert named["benchmark:0"].goal == "(And (In cream_cheese_1 basket_1_contain_region))"
    assert named["benchmark:0"].instruction == "pick up the cream cheese and place it in the basket"
    assert {init: row.instruction for init, row in named.items()} == {init: row.instruction for init, row in original.items()}
    assert len({row.instruction for row in named.values()}) == 5, "which object is named goes round"


def test_a_blank_prompt_is_blank(tmp_path: Path, pools: Any) -> None:
    evaluate(config_of(tmp_path, prompt="blank", tasks=(0,), episodes_per_task=2))
    assert {row.instruction.strip() for row in read_rows(tmp_path / "episodes.jsonl")} == {""}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": EvaluatedPolicy("x")}, "actor 'noop' takes no policy.checkpoint"),
        ({"actor": "replay"}, "actor 'replay' needs dataset"),
        ({"episodes_per_task": 0}, "episodes_per_task is 0; it must be at least 1"),
        ({"policy": EvaluatedPolicy(executed_horizon=4)}, "actor 'noop' is no policy"),
        ({"suite": "reach"}, "suite 'reach' does not run in env.kind 'libero'"),
    ],
)
def test_contradictions_in_a_recipe(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, **values)


def test_a_policy_must_be_named_by_the_recipe_or_the_command_line(tmp_path: Path) -> None:
    config = config_of(tmp_path, actor="policy")
    with pytest.raises(ConfigError, match=r"give --policy\.checkpoint DIR or --policy\.remote URL"):
        evaluate(config)
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suite": "libero_objects"}, "did you mean 'libero_object'"),
        ({"tasks": (10,)}, "tasks 0 to 9"),
        ({"protocol": "openpy"}, "did you mean 'openpi'"),
        ({"split": "validation"}, "needs the protocol 'sampled'"),
    ],
)
def test_unknown_names_come_with_the_nearest_and_leave_no_run_directory(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(config_of(tmp_path / "run", **values))
    assert not (tmp_path / "run").exists()


def test_noise_depends_on_the_seed_and_scenes_do_not(tmp_path: Path) -> None:
    first = plan_episodes(config_of(tmp_path), get_protocol("openvla-oft"))
    second = plan_episodes(config_of(tmp_path, seed=1), get_protocol("openvla-oft"))
    assert [entry.spec.scene_seed for entry in first] == [entry.spec.scene_seed for entry in second]
    assert not {entry.spec.key for entry in first} & {entry.spec.key for entry in second}
    assert np.array_equal([entry.spec.task for entry in first], [entry.spec.task for entry in second])
