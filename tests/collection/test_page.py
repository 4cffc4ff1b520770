"""A person's session in headless Chromium, with real key events: from the first look to a dataset, with a reload in the middle."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import INSTALL, Tab, browser, chromium_path
from person import first_look, hold
from session_process import PATIENCE_S, recipe, session

from vla_rl.datasets.hdf5 import read_episode
from vla_rl.datasets.loader import DataConfig, open_datasets
from vla_rl.episode import EpisodeSpec, Outcome, StepProtocol
from vla_rl.sim.reach import STEP_LENGTH
from vla_rl.sim.reach_layout import sample_layout, top_of

if chromium_path() is None and "CI" not in os.environ:
    pytest.skip(f"no Chromium on this machine; to run these tests: {INSTALL}", allow_module_level=True)

GAIN = 0.2
"""`translation_gain` of the recipe: a held key moves the tip by 3 mm a control step; the target is 30 mm wide, and the page hears of
every second step, later on a busy machine."""
KEYS = (("KeyS", "KeyW"), ("KeyD", "KeyA"), ("KeyE", "KeyQ"))
"""For +x and -x, +y and -y, +z and -z of the robot's base: towards the person is +x, to the right +y."""


def presses(spec: EpisodeSpec, tip: np.ndarray) -> list[tuple[str, int]]:
    """Which keys to hold for how many control steps to bring the tip to the target; down at last."""
    layout = sample_layout(spec)
    steps = (top_of(layout.blocks[layout.target]) - tip) / (GAIN * STEP_LENGTH)
    return [(KEYS[axis][0 if steps[axis] > 0 else 1], round(abs(steps[axis]))) for axis in range(3)]


async def take_over(tab: Tab) -> None:
    await tab.until("state.envs[0].running && state.envs[0].driver === 'waiting' && !state.envs[0].ending")
    await tab.press("Enter")
    await tab.until("state.envs[0].driver === 'operator'")


async def play(run: Path, folder: Path) -> dict[str, Any]:
    """The session; what the page had to say at the end."""
    spec = EpisodeSpec("reach", 0, "sampled:0", "demonstrations", StepProtocol(max_steps=300))
    async with session(recipe(run, operator={"shaping": {"translation_gain": GAIN}}), folder) as (link, process), browser() as chromium:
        tab = await chromium.open(link)
        await first_look(tab)
        await take_over(tab)
        for key, steps in presses(spec, tip_of(spec)):
            await hold(tab, key, steps)
        await tab.until("state.progress[0].recorded === 1")
        await tab.until("document.querySelector('#episodes img')?.naturalWidth > 0")
        assert await tab.run("state.episodes[0].reason") == "predicate"

        await take_over(tab)
        await hold(tab, "KeyD", 5)
        await tab.load("Page.reload")
        await tab.until("state && state.envs[0].holder === 'ada' && state.envs[0].driver === 'waiting' && state.envs[0].step >= 4")
        await tab.press("KeyH")
        assert await tab.run("document.querySelector('#help').open && document.activeElement.textContent") == "Close"
        await tab.press("KeyH")
        assert not await tab.run("document.querySelector('#help').open"), "the key that opens the help closes it"
        await take_over(tab)
        await tab.press("Space")
        await hold(tab, "KeyE", 5)
        await tab.until("state.envs[0].gripper === 'closed'")
        await tab.press("Digit2")
        await tab.until("state.envs[0].running && state.envs[0].step === 0 && state.envs[0].last")
        await tab.press("KeyZ")
        await tab.until("state.envs[0].driver === 'waiting' && state.envs[0].step >= 8")
        await tab.press("Digit1")
        await tab.until("state.progress[0].recorded === 2")

        await gamepad_take(tab)
        await tab.press("KeyR")
        await tab.until("document.querySelector('#film').open")
        await tab.run("document.querySelector('#film').close()")
        second = await chromium.open(link)
        await second.until("document.querySelector('#gone').open")
        seen = {"second tab": await second.run("document.querySelector('#gonetext').textContent")}
        await tab.run("document.querySelector('#finish').click()")
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        return seen


def tip_of(spec: EpisodeSpec) -> np.ndarray:
    """float64[3]: where the tip stands before the first action (m)."""
    from vla_rl.sim.base import EnvConfig, Look
    from vla_rl.sim.factory import make_env

    env = make_env(EnvConfig("reach", resolution=32))
    try:
        return np.asarray(env.reset(spec, Look(privileged=True)).observation.privileged["robot0_eef_pos"])
    finally:
        env.close()


async def gamepad_take(tab: Tab) -> None:
    """A standard gamepad, put where the browser would show one: B takes over, the left stick moves, Y says success."""
    await tab.run(
        "window.pad = { connected: true, axes: [0, 0, 0, 0], buttons: [...Array(16)].map(() => ({ value: 0 })) };"
        "navigator.getGamepads = () => [window.pad]; true"
    )
    await tab.until("state.envs[0].running && state.envs[0].driver === 'waiting' && !state.envs[0].ending")
    await tab.run("pad.buttons[1].value = 1; true")
    await tab.until("state.envs[0].driver === 'operator'")
    await tab.run("pad.buttons[1].value = 0; pad.axes[0] = 0.8; true")
    await tab.until("state.envs[0].step >= 5")
    await tab.run("pad.axes[0] = 0; pad.buttons[3].value = 1; true")
    await tab.until("state.complete")


def test_a_persons_session_from_start_to_a_dataset(tmp_path: Path) -> None:
    run = tmp_path / "run"
    seen = asyncio.run(play(run, tmp_path))
    assert "open in another tab" in seen["second tab"]
    episodes = [read_episode(run / "episodes" / f"episode_{number:06d}.hdf5") for number in range(3)]
    assert [(e.outcome, e.reason) for e in episodes] == [(Outcome.SUCCESS, "predicate")] + [(Outcome.SUCCESS, "operator")] * 2
    for episode in episodes:
        assert all(step.intervention_E.all() for step in episode.steps)
        seen_steps = np.array(episode.provenance["seen_step"])
        assert (seen_steps <= np.arange(episode.num_steps)).all() and seen_steps.max() > 0, "nobody sees the future"
    assert episodes[1].actions_NA()[-1, 6] == 1 and episodes[1].actions_NA()[0, 6] == -1, "the gripper closed with a key"
    assert episodes[1].provenance["operators"] == ["ada", "ada"], "once before the reload, once after it"
    pushed_N = np.isclose(episodes[2].actions_NA()[:, 1], GAIN * (0.8 - 0.08) / 0.92, atol=1e-6)  # float32; the stick past its deadzone
    assert pushed_N.sum() >= 4, "the gamepad's stick moved the arm"
    latencies = [value for episode in episodes for value in episode.provenance["latency_s"]]
    assert len(latencies) >= 6 and 0 < np.median(latencies) < 0.5
    assert min(latencies) > -0.05, "timed on the server's clock, as the page knows it"
    dataset, _ = open_datasets(DataConfig((str(run),), validation_fraction=0.0, human_weight=2.0))
    assert len(dataset.infos) == 3 and (dataset.weight_R == 2).all()
