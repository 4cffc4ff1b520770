"""Stock LIBERO as the definition of *exact*: what the fast path is compared with in tests and benchmarks.

Nothing here is fast, and nothing of the fast path is used: LIBERO's own `OffScreenRenderEnv`, its own hard reset, its own
`step` with both cameras. One deviation, which changes no result: only `RandomizationError` is retried, where LIBERO's
wrapper swallows every exception for ever.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.episode import VIEW_AGENT, VIEW_WRIST, EpisodeSpec
from vla_rl.sim.libero import egl, packaging, tasks

IMAGE_KEYS = {VIEW_AGENT: "agentview_image", VIEW_WRIST: "robot0_eye_in_hand_image"}
"""View -> stock observation key."""


@dataclass(frozen=True)
class StockFrame:
    """What stock LIBERO shows before an action, and the state the simulator is in."""

    images: Mapping[str, np.ndarray]
    """View -> uint8[H, W, 3], as LIBERO returns them (rows bottom-up)."""
    robot_state: np.ndarray
    """float64[16]: gripper qpos, eef position, eef quaternion xyzw, joint positions."""
    sim_state: np.ndarray
    """float64[D]."""


class StockEnv:
    """A stock environment of one task. Fresh for its first reset only; later resets are what stock scripts do."""

    def __init__(self, suite: str, task: int, init_kind: str = "benchmark", resolution: int = 128) -> None:
        packaging.check_mujoco()
        egl.configure()
        with contextlib.redirect_stdout(io.StringIO()):
            from libero.libero.envs import OffScreenRenderEnv  # pyright: ignore[reportMissingImports]

        self.task = tasks.load_task(suite, task)
        noise = "default" if init_kind == "sampled" else None
        size = {"camera_heights": resolution, "camera_widths": resolution}
        self.env: Any = OffScreenRenderEnv(bddl_file_name=str(self.task.bddl_path), initialization_noise=noise, **size)
        self.robot = self.env.env.robots[0]
        self.observation: Any = None

    def reset(self, spec: EpisodeSpec) -> np.ndarray:
        """Seed, hard reset, initial state, settle. Returns the flattened initial state (float64[D]).

        A `sampled` scene is put through `set_init_state` like a published one, so that both have the same observation phase.
        """
        from robosuite.utils.errors import RandomizationError  # pyright: ignore[reportMissingImports]

        np.random.seed(spec.scene_seed)  # noqa: NPY002  LIBERO draws from the global generator
        placed = False
        while not placed:
            with contextlib.suppress(RandomizationError):
                self.env.env.reset()
                placed = True
        sampled = spec.init_kind == "sampled"
        state = self.env.get_sim_state() if sampled else self.task.init_states()[spec.init_number]
        self.observation = self.env.set_init_state(state)
        for _ in range(spec.protocol.settle_steps):
            self.step(np.asarray(spec.protocol.settle_action))
        return state

    def step(self, action_A: np.ndarray) -> tuple[float, bool]:
        """One stock step. Returns reward and success."""
        self.observation, reward, done, _ = self.env.step(np.asarray(action_A, np.float64))
        return float(reward), bool(done)

    def frame(self) -> StockFrame:
        """The observation before the next action."""
        observation = self.observation
        parts = [observation[f"robot0_{name}"] for name in ("gripper_qpos", "eef_pos", "eef_quat")]
        joints = self.env.env._observables["robot0_joint_pos"].obs
        images = {view: observation[key].copy() for view, key in IMAGE_KEYS.items()}
        return StockFrame(images, np.concatenate([*parts, joints]), self.env.get_sim_state())

    def fixture_poses(self) -> dict[str, list[float]]:
        """As `Scene.fixture_poses`."""
        env = self.env.env
        ids = {name: env.obj_body_id[name] for name in env.fixtures_dict}
        model = env.sim.model
        return {name: [*model.body_pos[body].tolist(), *model.body_quat[body].tolist()] for name, body in ids.items()}

    def close(self) -> None:
        """Free the environment."""
        self.env.close()


def compare_frame(
    stock: StockFrame, images: Mapping[str, np.ndarray], robot_state: np.ndarray | None, sim_state: np.ndarray | None
) -> list[str]:
    """Names of what differs from the stock frame in any bit (pictures in raw orientation; None: not compared)."""
    unlike = [view for view, picture in images.items() if not np.array_equal(picture, stock.images[view])]
    if robot_state is not None and not np.array_equal(robot_state, stock.robot_state):
        unlike.append("robot_state")
    if sim_state is not None and not np.array_equal(sim_state, stock.sim_state):
        unlike.append("sim_state")
    return unlike
