"""The exact fast path against stock LIBERO, bit for bit, on a matrix of tasks.

Per task, in one fresh process: a worker plays 19 episodes, then an episode of random actions in chunks of 8 and
episodes of the scripted expert (or, for goals that no expert reaches, random actions on a sampled scene). Each is compared with a *fresh*
stock environment, seeded right before its reset: initial state, fixture poses, simulator and robot states before every
action, rewards, success, and every picture that is looked at (both views at chunk ends and before every fifth action).

`ratio` is 1.0 if no bit differs anywhere, else 0.0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_rl.bench.common import benchmark_parser, finish, run_fresh
from vla_rl.bench.libero import CHUNK, play_others, travelling_actions
from vla_rl.conventions import Orientation
from vla_rl.episode import VIEWS, EpisodeSpec, Observation, StepProtocol
from vla_rl.sim.base import ChunkReply, EnvConfig, Look, ResetReply
from vla_rl.sim.experts.expert import make_expert, supports
from vla_rl.sim.libero import tasks
from vla_rl.sim.libero.env import LiberoEnv
from vla_rl.sim.libero.reference import StockEnv, compare_frame

MODULE = "vla_rl.bench.exactness"
CASES = (
    ("libero_object", 0, 3),
    ("libero_object", 4, 17),
    ("libero_spatial", 0, 7),
    ("libero_spatial", 5, 21),
    ("libero_goal", 7, 2),
    ("libero_goal", 0, 30),
    ("libero_10", 2, 11),
    ("libero_90", 40, 5),
)
"""Suite, task, published state: floors, tables, kitchens; drawers, stoves, racks, reflective boxes. The first six have an expert."""
EARLIER_EPISODES = 19
RANDOM_STEPS = 200
EXPERT_STEPS = 100
"""At least, over as many episodes as it takes: an expert that succeeds ends its episode."""
EXPERT_PATIENCE = 160
"""Steps after which an expert that has not succeeded gives up."""
RECORD_EVERY = 5
LOOK = Look(views=VIEWS, privileged=True, record_every=RECORD_EVERY, record_states=True)


def main(arguments: Sequence[str]) -> int:
    """Run the matrix, print a line per episode and the closing JSON line; 0 if nothing differs."""
    parser = benchmark_parser("exactness", __doc__)
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases to run")
    options = parser.parse_args(arguments)
    if not 1 <= options.cases <= len(CASES):
        parser.error(f"--cases must be 1 to {len(CASES)}, got {options.cases}")
    rows: list[dict[str, Any]] = []
    for suite, task, number in CASES[: options.cases]:
        for row in run_fresh(MODULE, "case", suite, str(task), str(number), timeout_s=3600)["rows"]:
            verdict = "equal" if not row["differences"] else f"DIFFERS: {row['differences'][:3]}"
            print(f"{suite} {task} {row['init']} {row['actor']}: {row['steps']} steps, {row['pictures']} pictures, {verdict}", flush=True)
            rows.append(row)
    equal = all(not row["differences"] for row in rows)
    return finish("exactness", float(equal), 1.0, None, rows, options)


@dataclass
class Played:
    """What our env answered in one episode."""

    reset: ResetReply
    actions: list[np.ndarray] = field(default_factory=list)
    chunks: list[ChunkReply] = field(default_factory=list)


def play(env: LiberoEnv, spec: EpisodeSpec, act: Callable[[int, Observation], np.ndarray]) -> Played:
    """One episode; `act` answers a step and an observation with a chunk of actions, an empty one at its end."""
    played = Played(env.reset(spec, LOOK))
    observation = played.reset.observation
    while len(chunk := act(len(played.actions), observation)):
        reply = env.step_chunk(chunk)
        played.chunks.append(reply)
        played.actions.extend(reply.executed_EA)
        observation = reply.observation
        if reply.terminated or reply.truncated:
            break
    return played


def compare_with_stock(spec: EpisodeSpec, played: Played) -> dict[str, Any]:
    """A row: how much was compared, and everything that differs from a fresh stock env."""
    stock = StockEnv(spec.suite, spec.task, spec.init_kind)
    different = [] if np.array_equal(stock.reset(spec), played.reset.provenance["initial_state"]) else ["initial state"]
    if stock.fixture_poses() != played.reset.provenance["fixture_poses"]:
        different.append("fixture poses")
    pictures, step, success = 0, 0, False
    for chunk in played.chunks:
        assert chunk.sim_states_ED is not None and chunk.robot_states_ER is not None
        for offset, action in enumerate(chunk.executed_EA):
            images = chunk.frames[step].images if step in chunk.frames else {}
            unlike = compare_frame(stock.frame(), images, chunk.robot_states_ER[offset], chunk.sim_states_ED[offset])
            different.extend(f"{name} before step {step}" for name in unlike)
            reward, success = stock.step(action)
            if reward != chunk.reward_E[offset]:
                different.append(f"reward of step {step}")
            pictures, step = pictures + len(images), step + 1
        unlike = compare_frame(stock.frame(), chunk.observation.images, None, None)
        different.extend(f"{name} after step {step - 1}" for name in unlike)
        pictures += len(chunk.observation.images)
        if success != chunk.success:
            different.append(f"success after step {step - 1}")
    stock.close()
    return {"steps": step, "pictures": pictures, "success": success, "differences": different}


def run_case(suite: str, task: int, number: int) -> list[dict[str, Any]]:
    """One random episode and as many of the expert as it takes, after the worker's earlier ones."""
    env = LiberoEnv(EnvConfig(orientation=Orientation.RAW))
    play_others(env, suite, task, EARLIER_EPISODES, steps=CHUNK)
    limit = StepProtocol(max_steps=10_000)
    published = EpisodeSpec(suite, task, f"benchmark:{number}", "test", protocol=limit)
    played = [("random", published, play(env, published, random_actor(number)))]
    seed, expert_steps = 1_000_500 + number, 0
    while expert_steps < EXPERT_STEPS:
        spec = EpisodeSpec(suite, task, f"sampled:{seed}", "train", protocol=limit)
        actor = "expert" if supports(tasks.goal_of(spec)) else "random"
        episode = play(env, spec, expert_actor(spec) if actor == "expert" else random_actor(seed))
        played.append((actor, spec, episode))
        seed, expert_steps = seed + 1, expert_steps + len(episode.actions)
    env.close()
    rows = []
    for order, (actor, spec, episode) in enumerate(played):
        common = {"suite": suite, "task": task, "init": spec.init, "seed": spec.scene_seed, "actor": actor}
        rows.append(common | {"episode_of_worker": EARLIER_EPISODES + 1 + order} | compare_with_stock(spec, episode))
    return rows


def random_actor(seed: int) -> Callable[[int, Observation], np.ndarray]:
    """Chunks of travelling random actions, `RANDOM_STEPS` in all."""
    actions = travelling_actions(seed, RANDOM_STEPS)
    return lambda step, observation: actions[step : step + CHUNK]


def expert_actor(spec: EpisodeSpec) -> Callable[[int, Observation], np.ndarray]:
    """The scripted expert, one action at a time, for at most `EXPERT_PATIENCE`."""
    expert = make_expert(spec, tasks.goal_of(spec), noise=0.0, seed=0)
    return lambda step, observation: expert.act(observation)[0][None] if step < EXPERT_PATIENCE else np.zeros((0, 7))


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        print(json.dumps({"rows": run_case(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))}))
    else:
        raise SystemExit(main(sys.argv[1:]))
