"""A person at the page corrects a live policy in one of two environments; what was pressed is what the dataset says, and it trains.

The policy's chunks are longer than the takes, so that every take-over falls into the middle of one, however slow the machine is.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chromium import INSTALL, Tab, browser, chromium_path
from person import first_look, hold
from session_process import PATIENCE_S, recipe, session

from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.loader import DataConfig, open_datasets
from vla_rl.datasets.store import list_episodes
from vla_rl.episode import ACTION_DIM, STATE_DIM, Episode, Float32, Outcome, noise_seed
from vla_rl.phases.sft import SftConfig, run_sft
from vla_rl.policies.blocks.config import TransformerConfig, VisionConfig
from vla_rl.policies.checkpoint import load_policy, save_policy
from vla_rl.policies.factory import make_policy, policy_spec
from vla_rl.policies.inference import answer
from vla_rl.policies.pi0.config import Pi0Config
from vla_rl.policies.pi0.policy import Pi0Policy
from vla_rl.policies.statistics import ACTION, STATE, FeatureStats, Statistics

if chromium_path() is None and "CI" not in os.environ:
    pytest.skip(f"no Chromium on this machine; to run these tests: {INSTALL}", allow_module_level=True)

RESOLUTION, ENVS, CHUNK, GAIN = 32, 2, 400, 0.2
IDLE, HOLD = 3, 7
"""After three control steps at rest time stands still: of the five that `hold` waits for, two at least are pushed, however late the key."""
FLOAT32 = 1e-5
"""Absolute, of actions of about 0.1: the session's torch may split its sums over another number of threads."""


def save_wandering_policy(folder: Path) -> None:
    """Random weights; small actions, so that nothing is reached by chance, which depend on what is seen."""
    small = TransformerConfig(width=16, depth=1, mlp_width=32, heads=2, kv_heads=2, head_width=8)
    vision = VisionConfig(image_size=RESOLUTION, conv_channels=(4, 4, 8, 8), width=16, mlp_width=32, heads=2)
    config = Pi0Config(chunk_length=CHUNK, executed_horizon=CHUNK, denoise_steps=2, vision=vision, language=small, expert=small)
    generator = np.random.default_rng(0)
    states, actions = generator.normal(size=(200, STATE_DIM)), generator.uniform(-0.1, 0.1, size=(200, ACTION_DIM))
    statistics = Statistics({STATE: FeatureStats.from_values(states), ACTION: FeatureStats.from_values(actions)})
    policy = make_policy(config, statistics, policy_spec(config, RESOLUTION))
    assert isinstance(policy, Pi0Policy)
    torch.nn.init.normal_(policy.model.action_out_proj.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    save_policy(policy, folder)


async def press_control(tab: Tab, driver: str) -> None:
    """Take over, hand back or go on, until `driver` drives."""
    await tab.press("Enter")
    await tab.until(f"state.envs[0].driver === '{driver}'")


async def play(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The session, and what was seen of the environment that nobody touched."""
    async with browser() as chromium, session(values, folder) as (link, process):
        tab = await chromium.open(link)
        await first_look(tab)
        await tab.until("state.envs[0].driver === 'policy' && state.envs[0].step >= 4 && state.envs[1].step >= 1")
        await press_control(tab, "operator")
        elsewhere = [await tab.run("state.envs[1].step")]
        await hold(tab, "KeyD", HOLD)
        await press_control(tab, "policy")
        handed_back = await tab.run("state.envs[0].step")
        await tab.until(f"state.envs[0].step >= {handed_back + 3}")
        await press_control(tab, "operator")
        await hold(tab, "KeyE", HOLD)
        elsewhere.append(await tab.run("state.envs[1].step"))

        await tab.load("Page.reload")
        await tab.until("state && state.envs[0].holder === 'ada' && state.envs[0].driver === 'waiting'")
        await press_control(tab, "operator")
        await tab.press("Space")
        await hold(tab, "KeyE", HOLD)
        await tab.press("Digit1")
        await tab.until("state.progress[0].recorded === 1")
        elsewhere.append(await tab.run("state.envs[1].step"))
        drivers = await tab.run("state.envs[1].driver")
        await tab.run('document.querySelector(\'.env[data-env="1"] [data-do="success"]\').click()')
        await tab.until("state.complete")
        await tab.run("document.querySelector('#finish').click()")
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        return {"steps": elsewhere, "driver": drivers}


def segments(intervention_N: np.ndarray) -> list[tuple[bool, slice]]:
    """Who acted from when to when: (operator, control steps)."""
    edges = [0, *(np.flatnonzero(np.diff(intervention_N)) + 1).tolist(), len(intervention_N)]
    return [(bool(intervention_N[start]), slice(start, stop)) for start, stop in itertools.pairwise(edges)]


def chunk(policy: Any, episode: Episode, at: int, number: int) -> Float32:
    """float32[CHUNK, 7]: the policy's chunk `number` of an episode, from the recorded observation before control step `at`."""
    _, actions_BCA = answer(policy, [episode.frames()[at]], [noise_seed(episode.spec, number)], ENVS, "cpu")[0:2]
    return np.clip(actions_BCA[0], -1, 1)


def require_what_was_pressed(episode: Episode, policy: Any) -> None:
    """Policy, right key, policy, up key with the gripper: every executed action is the one that was meant."""
    (first, a), (second, b), (third, c), (fourth, d) = segments(np.concatenate([step.intervention_E for step in episode.steps]))
    assert (first, second, third, fourth) == (False, True, False, True)
    actions = episode.actions_NA()
    np.testing.assert_allclose(actions[a], chunk(policy, episode, 0, 0)[: a.stop], atol=FLOAT32)
    np.testing.assert_allclose(actions[c], chunk(policy, episode, c.start, 1)[: c.stop - c.start], atol=FLOAT32)
    unlooked = chunk(policy, episode, 0, 1)[: c.stop - c.start]
    difference = np.abs(actions[c] - unlooked).max()  # 0.0003 after the two pushes that there are at least
    assert difference > 3 * FLOAT32, "handed back, the policy looked anew"
    for steps, axis, least in ((b, 1, 2), (d, 2, 4)):
        pushed = actions[steps, axis] == np.float32(GAIN)
        assert pushed.sum() >= least and (actions[steps, axis][~pushed] == 0).all(), "the key was held, then it was not"
        assert not np.delete(actions[steps, :6], axis, axis=1).any(), "and no other key was"
    assert len(set(actions[b, 6])) == 1 and np.count_nonzero(np.diff(actions[d, 6])) == 1, "Space was pressed once, in the second half"
    seen = np.array(episode.provenance["seen_step"])
    assert (seen[a] == -1).all() and (seen[c] == -1).all() and (seen[b] <= np.arange(b.start, b.stop)).all() and seen[d].max() > 0
    assert episode.provenance["operators"] == ["ada", "ada", "ada"], "the third time after the reload"


def test_a_person_corrects_a_policy_and_it_learns(tmp_path: Path) -> None:
    run, checkpoint = tmp_path / "run", tmp_path / "policy"
    save_wandering_policy(checkpoint)
    operator = {"shaping": {"translation_gain": GAIN}, "resolution": 64, "idle_steps": IDLE}
    values = recipe(run, episodes_per_task=2, max_steps=6000, frame_every=1, format="both", checkpoint=str(checkpoint), operator=operator)
    values |= {"env": {"kind": "reach", "resolution": RESOLUTION}, "pool": {"workers": ENVS}}
    seen = asyncio.run(play(values, tmp_path))
    assert seen["driver"] == "policy" and seen["steps"][0] < seen["steps"][1] < seen["steps"][2], "env 1 went on all the time"

    infos = list_episodes([run / "episodes"])
    policy = load_policy(checkpoint)
    episodes = {bool(np.concatenate([s.intervention_E for s in e.steps]).any()): e for e in map(load_episode, infos)}
    require_what_was_pressed(episodes[True], policy)
    untouched = episodes[False]
    np.testing.assert_allclose(untouched.actions_NA()[:CHUNK], chunk(policy, untouched, 0, 0)[: untouched.num_steps], atol=FLOAT32)
    assert {(e.outcome, e.reason) for e in episodes.values()} == {(Outcome.SUCCESS, "operator")}
    require_both_formats_agree(run)

    data = DataConfig((str(run),), validation_fraction=0.0, human_weight=2.0)
    dataset, _ = open_datasets(data)
    corrected = sum(len(step.intervention_E[step.intervention_E]) for step in episodes[True].steps)
    assert len(dataset) == corrected + untouched.num_steps and (dataset.weight_R == 2).sum() == corrected
    sft = SftConfig(str(tmp_path / "sft"), data, initial_policy=str(checkpoint), updates=1, global_batch_size=4)
    assert run_sft(sft) == 0 and load_policy(tmp_path / "sft" / "checkpoints" / "last" / "policy")


def require_both_formats_agree(run: Path) -> None:
    """Every column and picture of the LeRobot folder is that of the HDF5 files."""
    pairs = list(zip(list_episodes([run / "episodes"]), list_episodes([run / "lerobot"]), strict=True))
    assert len(pairs) == 2
    for one, other in ((load_episode(info), load_episode(twin)) for info, twin in pairs):
        assert one.spec == other.spec and (one.outcome, one.reason) == (other.outcome, other.reason)
        np.testing.assert_array_equal(one.actions_NA(), other.actions_NA())
        for mine, theirs in zip(one.steps, other.steps, strict=True):
            np.testing.assert_array_equal(mine.intervention_E, theirs.intervention_E)
        frames, twins = one.frames(), other.frames()
        assert list(frames) == list(twins) == list(range(one.num_steps))
        for t, frame in frames.items():
            for view, picture in frame.images.items():
                np.testing.assert_array_equal(picture, twins[t].images[view])
