"""The measure of progress of pick-and-place, against hand-computed numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_rl.episode import EpisodeSpec
from vla_rl.sim.libero.progress import pick_and_place

SPEC = EpisodeSpec("libero_object", 0, "sampled:1000003", "train")
"""The alphabet soup goes into the basket."""
UPRIGHT = np.array([0.0, 0.0, 0.0, 1.0])
SITE = "site:basket_1_contain_region_pos"


def seen(hand: tuple[float, float, float], soup: tuple[float, float, float]) -> Any:
    """An observation whose soup has its centre at `soup`, with the basket at x = 0.4 (the centre is 3.5 mm below the body's origin)."""
    truth = {
        "robot0_eef_pos": np.array(hand),
        "alphabet_soup_1_pos": np.add(soup, (0.0, 0.0005, 0.0035)),
        "alphabet_soup_1_quat": UPRIGHT,
        "basket_1_pos": np.array([0.4, 0.0, 0.0]),
        "basket_1_quat": UPRIGHT,
        SITE: np.array([0.4, 0.0005, 0.05]),
    }
    return SimpleNamespace(privileged=truth)


def episode(*observations: Any, spec: EpisodeSpec = SPEC) -> Any:
    steps = [SimpleNamespace(observation=observation) for observation in observations[:-1]]
    return SimpleNamespace(spec=spec, steps=steps, final_observation=observations[-1] if observations else None)


def test_reaching_lifting_carrying_and_letting_go() -> None:
    measured = pick_and_place(
        episode(
            seen((0.0, 0.3, 0.04), (0.0, 0.0, 0.04)),  # 30 cm to the soup, 40 cm to the basket
            seen((0.0, 0.03, 0.04), (0.0, 0.0, 0.04)),  # 3 cm beside it: half above
            seen((0.0, 0.0, 0.04), (0.0, 0.0, 0.04)),  # at the soup
            seen((0.0, 0.0, 0.065), (0.0, 0.0, 0.065)),  # half of the lift
            seen((0.2, 0.0, 0.20), (0.2, 0.0, 0.20)),  # lifted more than counts, half of the way
            seen((0.4, 0.0, 0.20), (0.4, 0.0, 0.20)),  # over the basket
            seen((0.4, 0.0, 0.20), (0.4, 0.0, 0.04)),  # let go: only the hand's distance counts
            seen((0.2, 0.0, 0.10), (0.2, 0.0, 0.04)),  # or dropped on the way
        )
    )
    above = np.array([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    expected = above + np.array([-1.5 - 2.0, -0.15 - 2.0, -2.0, 0.5 - 2.0, 1.0 - 1.0, 1.0, 1.0 - 0.8, -0.3 - 1.0])
    np.testing.assert_allclose(measured, expected, atol=1e-12)  # float64 sums of a few terms


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="never started"):
        pick_and_place(episode())
    with pytest.raises(ValueError, match=r"holds no simulator truth; set reward\.privileged: true"):
        pick_and_place(episode(SimpleNamespace(privileged={})))
    drawer = EpisodeSpec("libero_goal", 0, "sampled:1000003", "train")
    with pytest.raises(ValueError, match=r"libero_goal/0/.*the goal \[\['open', 'wooden_cabinet_1_middle_region'\]\]"):
        pick_and_place(episode(seen((0, 0, 0), (0, 0, 0)), spec=drawer))
