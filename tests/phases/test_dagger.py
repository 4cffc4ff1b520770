"""DAgger: rounds as recipes, corrections with weights in the loss, and no policy gradient for what an operator did."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rl_recipe import RESOLUTION, save_random_policy

from vla_rl.cli import main
from vla_rl.collection.collect import collect
from vla_rl.collection.config import CollectConfig
from vla_rl.collection.control import Control
from vla_rl.collection.devices.scripted import ScriptedOperator, Switching
from vla_rl.collection.operated_actor import SCRIPT, OperatedActor
from vla_rl.collection.operators import ScriptedOperatorConfig
from vla_rl.collection.watched_pool import WatchedPool
from vla_rl.config import ConfigError
from vla_rl.datasets.loader import DataConfig, open_datasets
from vla_rl.datasets.store import list_episodes
from vla_rl.episode import VIEWS, Episode, EpisodeSpec, StepProtocol
from vla_rl.eval.config import EvalConfig, EvaluatedPolicy
from vla_rl.phases.dagger import DaggerConfig, dagger_recipes
from vla_rl.phases.rl_batches import TrainingRows, rank_of_rows, row_scalars, training_rows
from vla_rl.phases.sft import SftConfig
from vla_rl.phases.sft_batches import noise_seeds, target_count, training_batch
from vla_rl.policies.checkpoint import load_policy
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policy_actor import PolicyActor
from vla_rl.rollout import ListSource, look_of, run_episodes
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig, make_pool
from vla_rl.sim.reach_expert import ReachExpert
from vla_rl.telemetry.files import read_jsonl

ENV = EnvConfig("reach", resolution=RESOLUTION)
POOL = PoolConfig("serial", 2)
FLOAT32 = 1e-5
"""Relative: float32 sums of a few hundred squares in another order."""


def recipe(run: Path, policy: Path, **changes: object) -> DaggerConfig:
    collect = CollectConfig(
        run_dir=str(run),
        suite="reach",
        tasks=(0,),
        episodes_per_task=3,
        first_seed=500,
        frame_every=1,
        operator=ScriptedOperatorConfig("scripted", Switching((1, 4))),
        checkpoint=str(policy),
        env=ENV,
        pool=POOL,
        show_progress=False,
    )
    data = DataConfig(paths=("demonstrations",), validation_fraction=0.0, human_weight=2.0)
    sft = SftConfig(str(run), data, updates=2, global_batch_size=4, micro_batch_size_per_rank=4, show_progress=False)
    evaluation = EvalConfig(
        str(run), "reach", (0,), "sampled", 2, policy=EvaluatedPolicy(str(policy)), videos=0, env=ENV, pool=POOL, show_progress=False
    )
    return DaggerConfig(**({"run_dir": str(run), "collect": collect, "sft": sft, "evaluation": evaluation} | changes))  # type: ignore[arg-type]


def test_rounds_are_plain_recipes() -> None:
    """Each round corrects the policy of the round before, in scenes of its own, and trains on all corrections so far."""
    before, *rounds = dagger_recipes(recipe(Path("run"), Path("given")))
    assert isinstance(before, EvalConfig) and (before.run_dir, before.policy.checkpoint) == ("run/before", "given")
    for number, (gather, sft, evaluation) in enumerate(zip(rounds[::3], rounds[1::3], rounds[2::3], strict=True), start=1):
        assert isinstance(gather, CollectConfig) and isinstance(sft, SftConfig) and isinstance(evaluation, EvalConfig)
        previous = "given" if number == 1 else "run/round_1/sft/checkpoints/last/policy"
        assert (gather.checkpoint, gather.first_seed, sft.initial_policy) == (previous, 500 + 3 * (number - 1), previous)
        assert sft.data.paths == ("demonstrations", "run/round_1/collect", "run/round_2/collect")[: number + 1]
        assert evaluation.policy.checkpoint == f"run/round_{number}/sft/checkpoints/last/policy"
        assert evaluation.label == f"round {number}"
    fresh = dagger_recipes(recipe(Path("run"), Path("given"), start_from="scratch"))[2]
    assert isinstance(fresh, SftConfig) and fresh.initial_policy is None


def test_what_cannot_be_corrected_is_refused() -> None:
    good = recipe(Path("run"), Path("given"))
    with pytest.raises(ConfigError, match="rounds is 0"):
        replace(good, rounds=0)
    with pytest.raises(ConfigError, match="it needs both: a policy, and"):
        replace(good, collect=replace(good.collect, operator=None, checkpoint=None))
    with pytest.raises(ValueError, match="no checkpoint is there to correct"):
        replace(good.collect, checkpoint=None)
    with pytest.raises(ValueError, match="without an operator to correct it"):
        replace(good.collect, operator=None)


def test_a_pipeline_with_a_round_and_what_its_corrections_teach(tmp_path: Path) -> None:
    """Through the command line: the policy acts first, the operator to the end, and only the operator's steps are taught."""
    policy, run = tmp_path / "policy", tmp_path / "run"
    save_random_policy(policy)
    shared = {"suite": "reach", "tasks": [0], "env": {"kind": "reach", "resolution": RESOLUTION}, "show_progress": False}
    serial = {"backend": "serial", "workers": 2}
    script = {"kind": "scripted", "switching": {"policy_steps": [1, 4]}}
    gather = shared | {"run_dir": "x", "episodes_per_task": 3, "frame_every": 1, "pool": serial, "noise_std": [0.0, 0.1]}
    sft = {
        "run_dir": "x",
        "updates": 2,
        "global_batch_size": 4,
        "micro_batch_size_per_rank": 4,
        "show_progress": False,
        "validate_every": 0,
    }
    sft["data"] = {"paths": ["{run_dir}/demonstrations"], "validation_fraction": 0.0, "human_weight": 2.0}
    evaluation = shared | {"run_dir": "x", "protocol": "sampled", "episodes_per_task": 2, "videos": 0, "pool": serial}
    dagger = {"run_dir": "{run_dir}/dagger", "rounds": 1, "sft": sft, "evaluation": evaluation | {"policy": {"checkpoint": str(policy)}}}
    dagger["collect"] = gather | {"operator": script, "checkpoint": str(policy), "first_seed": 100}
    demonstrations = {"command": "collect", "recipe": gather | {"run_dir": "{run_dir}/demonstrations"}}
    path = tmp_path / "pipeline.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(run), "phases": [demonstrations, {"command": "dagger", "recipe": dagger}]}))
    assert main(["run", str(path)]) == 0
    rows = read_jsonl(run / "dagger" / "round_1" / "eval" / "episodes.jsonl")
    assert len(rows) == 2 and {row["condition"] for row in rows} == {"round 1"}
    corrected = run / "dagger" / "round_1" / "collect"
    dataset, _ = open_datasets(DataConfig((str(corrected),), validation_fraction=0.0, human_weight=2.0))
    assert 0 < len(dataset) == dataset.target_R.sum() < len(dataset.target_R) and set(dataset.weight_R.tolist()) == {1.0, 2.0}
    starts = dataset.row_starts[:-1]
    assert not dataset.target_R[starts].any(), "the policy acts first"
    require_weighted_mean(str(corrected), str(run / "demonstrations"), policy)


def require_weighted_mean(corrected: str, demonstrations: str, policy_folder: Path) -> None:
    """The loss of a batch of both kinds is the mean of its samples' losses, each with its weight and number of actions."""
    dataset, _ = open_datasets(DataConfig((corrected, demonstrations), validation_fraction=0.0, human_weight=2.0))
    policy = load_policy(policy_folder).eval()
    rows = np.array([0, 1, len(dataset) - 2, len(dataset) - 1])
    samples = dataset.batch(dataset.columns(rows, policy.spec.chunk_length))
    assert samples.weight_B.tolist() == [2.0, 2.0, 1.0, 1.0]
    seeds = noise_seeds(0, "test", range(4))
    with torch.no_grad():
        together = policy.sft_loss(training_batch(policy, samples, slice(None)), seeds)
        alone = [policy.sft_loss(training_batch(policy, samples, slice(row, row + 1)), seeds[row : row + 1]) for row in range(4)]
    counts = samples.action_mask_BC.sum(1) * samples.weight_B * 7
    means = np.array([float(sums.loss_sum) / float(sums.count) for sums in alone])
    assert float(together.count) == counts.sum() == target_count((training_batch(policy, samples, slice(None)), seeds))
    assert float(together.loss_sum) / counts.sum() == pytest.approx((means * counts).sum() / counts.sum(), rel=FLOAT32)


def corrected_rollout(policy_folder: Path) -> list[Episode]:
    """A policy that explores, as RL rolls it out, corrected by the scripted operator."""
    policy = PolicyActor(load_policy(policy_folder), batch_size=2, exploration=Exploration(noise_level=0.3))
    script = ScriptedOperator(Switching((2, 6), (2, 3)), lambda spec: ReachExpert(spec, noise=0.0, seed=0))
    pool = WatchedPool(make_pool(POOL, ENV), None, (), lambda picture: None)
    control = Control(2, has_policy=True)
    control.join(SCRIPT)
    actor = OperatedActor(control, policy, {SCRIPT: script}, None, pool.meters, pool.preempt, operator_views=VIEWS)
    specs = [EpisodeSpec("reach", 0, f"sampled:{1_000_000 + seed}", "train", StepProtocol(max_steps=16)) for seed in range(2)]
    look = look_of(actor.needs)
    with closing(pool), closing(actor):
        return sorted(run_episodes(pool, actor, ListSource(specs), lambda spec: look), key=lambda episode: episode.spec.key)


def rows_of(episodes: list[Episode]) -> TrainingRows:
    scalars = row_scalars(episodes, [], 4)
    return training_rows(scalars, rank_of_rows(scalars, 1), dict(enumerate(episodes)), 4)


def test_no_policy_gradient_for_what_an_operator_did(tmp_path: Path) -> None:
    """From a corrected rollout to the rows of an update: masks, and a surrogate whose gradient does not see the operator's actions."""
    save_random_policy(tmp_path)
    episodes = corrected_rollout(tmp_path)
    steps = [step for episode in episodes for step in episode.steps]
    assert {bool(step.intervention_E.all()) for step in steps} == {True, False} and any(0 < len(s.executed_EA) < 4 for s in steps)
    rows = rows_of(episodes)
    for mask_C, step in zip(rows.mask_BC, steps):
        acted = np.zeros(4, bool) if step.intervention_E.any() else np.arange(4) < len(step.executed_EA)
        assert mask_C.tolist() == acted.tolist()
    for step in steps:
        if step.intervention_E.all():
            step.executed_EA = -step.executed_EA
            step.proposed = replace(step.proposed, actions_CA=-step.proposed.actions_CA)
    again = rows_of(episodes)
    policy = load_policy(tmp_path)
    gradients = []
    for some in (rows, again):
        policy.zero_grad()
        scored = policy.log_prob(policy.preprocess(list(some.observations.values())), some.record, Exploration(noise_level=0.3))
        torch.where(some.mask_BC, scored.log_prob_BC, 0.0).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None])
    assert gradients[0] and all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))
    assert float(rows.behaviour_BC[rows.mask_BC].abs().sum()) > 0


def test_corrections_are_found_by_both_formats(tmp_path: Path) -> None:
    """What a corrected collection wrote as HDF5 and as LeRobot teaches the same samples."""
    save_random_policy(tmp_path / "policy")
    good = recipe(tmp_path, tmp_path / "policy").collect

    collect(replace(good, run_dir=str(tmp_path / "run"), format="both", noise_std=(0.0, 0.0)))
    folders = (tmp_path / "run" / "episodes", tmp_path / "run" / "lerobot")
    sets = [open_datasets(DataConfig((str(folder),), validation_fraction=0.0))[0] for folder in folders]
    assert len(list_episodes([folders[0]])) == 3 and len(sets[0]) == len(sets[1]) < len(sets[0].target_R)
    np.testing.assert_array_equal(sets[0].target_R, sets[1].target_R)
    np.testing.assert_array_equal(sets[0].sample_rows_X, sets[1].sample_rows_X)
