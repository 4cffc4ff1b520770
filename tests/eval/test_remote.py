"""`vla-rl eval --policy.remote`: a policy behind a server acts as it does in the same process."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.conventions import ConventionMismatch, Orientation
from vla_rl.episode import ACTION_DIM, STATE_DIM, Episode
from vla_rl.eval import runner
from vla_rl.eval.config import EvalConfig, EvaluatedPolicy
from vla_rl.eval.results import read_rows
from vla_rl.eval.runner import evaluate
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.pi0.config import PI0_PRESETS
from vla_rl.policies.remote.served import RemoteError, ServedPolicy
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics
from vla_rl.rollout import ConnectError
from vla_rl.serving import ServeConfig, served_in_background
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import folder_digest

WORKERS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pi0 with random weights that move the arm, on disk."""
    generator = np.random.default_rng(0)
    features = {STATE: generator.normal(size=(100, STATE_DIM)), ACTION: generator.uniform(-1, 1, size=(100, ACTION_DIM))}
    statistics = Statistics({name: FeatureStats.from_values(values) for name, values in features.items()})
    config = replace(PI0_PRESETS["tiny"], denoise_steps=2)
    policy = make_policy(config, statistics, policy_spec(config, resolution=64))
    policy.model.action_out_proj.weight.data.normal_(std=0.1)  # pyright: ignore
    folder = tmp_path_factory.mktemp("remote") / "policy"
    save_policy(policy, folder)
    return folder


def config_of(run_dir: Path, policy: EvaluatedPolicy, **more: Any) -> EvalConfig:
    values: dict[str, Any] = {
        "suite": "reach",
        "protocol": "sampled",
        "tasks": (0,),
        "episodes_per_task": 3,
        "videos": 0,
        "env": EnvConfig(kind="reach", resolution=64),
        "pool": PoolConfig(backend="serial", workers=WORKERS),
        "show_progress": False,
    }
    return EvalConfig(str(run_dir), policy=policy, **(values | more))


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch) -> list[Episode]:
    """What the evaluations of a test ran, in spec order per evaluation."""
    seen: list[Episode] = []
    run_episodes = runner.run_episodes

    def run(*arguments: Any) -> Any:
        for episode in run_episodes(*arguments):
            seen.append(episode)
            yield episode

    monkeypatch.setattr(runner, "run_episodes", run)
    return seen


def serve(checkpoint: Path, protocol: str, port: int = 0) -> Any:
    policy = load_policy(checkpoint)
    config = ServeConfig(str(checkpoint), protocol=protocol, port=port, max_batch=WORKERS)  # pyright: ignore[reportArgumentType]
    return served_in_background(config, policy, ServedPolicy("policy", folder_digest(checkpoint), policy.spec))


def actions_of(episodes: list[Episode]) -> dict[str, np.ndarray]:
    return {episode.spec.key: episode.actions_NA() for episode in episodes}


@pytest.mark.parametrize("protocol", ["openpi", "groot"])
def test_remote_episodes_are_the_local_ones(protocol: str, checkpoint: Path, tmp_path: Path, episodes: list[Episode]) -> None:
    """Every action bit for bit over openpi's protocol; over GR00T's the gripper crosses as (1 - g) / 2, which rounds once."""
    local = evaluate(config_of(tmp_path / "local", EvaluatedPolicy(str(checkpoint))))
    wanted = actions_of(episodes)
    episodes.clear()
    with serve(checkpoint, protocol) as url:
        remote = evaluate(config_of(tmp_path / "remote", EvaluatedPolicy(remote=url)))
    got = actions_of(episodes)
    assert got.keys() == wanted.keys() and max(np.abs(actions).max() for actions in wanted.values()) > 0.1
    for key, actions in wanted.items():
        if protocol == "openpi":
            np.testing.assert_array_equal(got[key], actions)
        else:
            np.testing.assert_array_equal(got[key][:, :6], actions[:, :6])
            np.testing.assert_allclose(got[key][:, 6], actions[:, 6], rtol=0, atol=1.2e-7)  # float32 spacing at 1
    rows = {name: read_rows(tmp_path / name / "episodes.jsonl") for name in ("local", "remote")}
    assert {row.weights for row in rows["remote"]} == {folder_digest(checkpoint)}
    assert remote.protocol["hash"] == local.protocol["hash"]
    told = {name: sorted((row.key, row.outcome, row.steps) for row in rows[name]) for name in rows}
    assert told["local"] == told["remote"]


def test_an_env_that_the_remote_policy_was_not_made_for_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with serve(checkpoint, "openpi") as url:
        remote = EvaluatedPolicy(remote=url)
        with pytest.raises(ConnectError, match=r"pictures of 64 px; env reach renders 32 px"):
            evaluate(config_of(tmp_path / "a", remote, env=EnvConfig(kind="reach", resolution=32)))
        with pytest.raises(ConventionMismatch, match="orientation"):
            evaluate(config_of(tmp_path / "b", remote, env=EnvConfig(kind="reach", resolution=64, orientation=Orientation.RAW)))


def test_a_server_that_goes_away_ends_the_evaluation_which_goes_on_with_the_next_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends after the first episode: the row stays; once a server with the same weights is back, the rest runs."""
    run_episodes = runner.run_episodes
    with ExitStack() as stack:
        url = stack.enter_context(serve(checkpoint, "openpi"))
        config = config_of(tmp_path / "run", EvaluatedPolicy(remote=url), pool=PoolConfig(backend="serial", workers=1))

        def run(*arguments: Any) -> Any:
            for episode in run_episodes(*arguments):
                yield episode
                stack.close()

        monkeypatch.setattr(runner, "run_episodes", run)
        with pytest.raises(RemoteError, match=r"closed the connection|no openpi policy server"):
            evaluate(config)
    assert len(read_rows(tmp_path / "run" / "episodes.jsonl")) == 1
    monkeypatch.setattr(runner, "run_episodes", run_episodes)
    with serve(checkpoint, "openpi", port=int(url.rpartition(":")[2])):
        assert evaluate(config).complete
    assert len(read_rows(tmp_path / "run" / "episodes.jsonl")) == 3


def test_contradictions_are_named() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        EvaluatedPolicy("folder", remote="ws://x")
    with pytest.raises(ValueError, match=r"timeout_s is 0\.0"):
        EvaluatedPolicy(remote="ws://x", timeout_s=0.0)
