"""Evaluation protocols as data: what an episode is, how many there are, and when it counts as a success.

Numbers of different protocols are not comparable (LIBERO-10 with 520 and with 600 steps differ by points), so that
every result carries its protocol with a hash, and `compare` refuses unlike ones.

What every protocol here shares, and where it deviates from the published scripts on purpose: those seed the simulator
once per environment, which makes fixture poses depend on which episodes ran before; here `EpisodeSpec.scene_seed`
derives the seed from suite, task and init, so that a scene is the same in any order and on any worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vla_rl.config import nearest_name
from vla_rl.conventions import Orientation
from vla_rl.episode import SPLITS, EpisodeSpec, StepProtocol
from vla_rl.errors import UserError

GRIPPER_OPEN = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""The settle action of OpenVLA, openpi and LeRobot: stand still with an open gripper."""
GRIPPER_HOLD = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""The settle action of LIBERO's own evaluation: all zero."""
PUBLISHED_INITS = 50
"""Initial states that LIBERO publishes for each task."""
OPENVLA_STEPS = (
    ("libero_spatial", 220),
    ("libero_object", 280),
    ("libero_goal", 300),
    ("libero_10", 520),
    ("libero_90", 400),
)
"""Longest human demonstration of each suite (193, 254, 270, 505, 373 steps) with some room."""
REACH_STEPS = 60
"""Step limit of the small Reach scene."""


class ProtocolError(UserError):
    """An evaluation that its protocol does not describe."""


@dataclass(frozen=True)
class EvalProtocol:
    """How a suite is evaluated. Frozen and hashed: two results are comparable if these fields are equal."""

    name: str
    """What `get_protocol` knows it by."""
    source: str
    """Where the numbers come from."""
    max_steps: tuple[tuple[str, int], ...]
    """(suite, control steps after settling until truncation); a LIBERO-PRO variant has its base suite's limit."""
    settle_steps: int
    """Control steps before the first observation."""
    settle_action: tuple[float, ...]
    """The action of each settle step, environment units."""
    published_seed: int | None
    """The seed of the published script (None: it reseeds on every reset). Recorded only: see the module's deviation."""
    resolution: int | None
    """Pixels at which both views are rendered; None: what the policy was trained on."""
    orientation: Orientation
    """Orientation of the pictures in memory."""
    executed_horizon: int | None
    """Actions executed before the policy looks again; None: the policy's own."""
    inits_per_task: int
    """Initial states of each task, the first ones in order."""
    init_source: Literal["benchmark", "sampled"]
    """`benchmark`: the published states. `sampled`: LIBERO's own placement samplers, seeds of the split's range."""
    success_rule: Literal["any_step"] = "any_step"
    """`any_step`: the goal held after any control step (it ends the episode there)."""
    scene_seed: Literal["derived"] = "derived"
    """`derived`: `EpisodeSpec.scene_seed`."""

    def steps_of(self, suite: str) -> int:
        """The step limit of a suite. Raises ProtocolError for a suite without one."""
        limits = dict(self.max_steps)
        matching = [name for name in limits if suite == name or suite.startswith(name + "_")]
        if not matching:
            raise ProtocolError(f"protocol {self.name!r} has no step limit for suite {suite!r}{nearest_name(suite, list(limits))}")
        return limits[max(matching, key=len)]

    def step_protocol(self, suite: str) -> StepProtocol:
        """The part of the protocol that belongs to each `EpisodeSpec`."""
        return StepProtocol(self.steps_of(suite), self.settle_steps, self.settle_action)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with `hash`."""
        plain = asdict(self) | {"orientation": self.orientation.value, "max_steps": dict(self.max_steps)}
        return plain | {"settle_action": list(self.settle_action), "hash": protocol_hash(self)}


_OPENVLA_OFT = EvalProtocol(
    name="openvla-oft",
    source="moojink/openvla-oft, experiments/robot/libero/run_libero_eval.py",
    max_steps=OPENVLA_STEPS,
    settle_steps=10,
    settle_action=GRIPPER_OPEN,
    published_seed=0,
    resolution=256,
    orientation=Orientation.ROTATED_180,
    executed_horizon=8,
    inits_per_task=PUBLISHED_INITS,
    init_source="benchmark",
)
_OPENPI = replace(
    _OPENVLA_OFT,
    name="openpi",
    source="Physical-Intelligence/openpi, examples/libero/main.py",
    published_seed=7,
    executed_horizon=5,
)
_LEROBOT = replace(
    _OPENVLA_OFT,
    name="lerobot",
    source="huggingface/lerobot 0.6, envs/libero.py and envs/configs.py; the number of episodes is the user's there",
    max_steps=(("libero_spatial", 280), *OPENVLA_STEPS[1:]),
    published_seed=None,
    resolution=360,
    executed_horizon=None,
)
_LIBERO = EvalProtocol(
    name="libero",
    source="Lifelong-Robot-Learning/LIBERO, libero/lifelong/metric.py and configs/eval/default.yaml",
    max_steps=tuple((suite, 600) for suite, _ in OPENVLA_STEPS),
    settle_steps=5,
    settle_action=GRIPPER_HOLD,
    published_seed=10000,
    resolution=128,
    orientation=Orientation.RAW,
    executed_horizon=1,
    inits_per_task=20,
    init_source="benchmark",
)
_SAMPLED = replace(
    _OPENVLA_OFT,
    name="sampled",
    source="vla-rl: held-out seeds of LIBERO's own placement samplers, with OpenVLA's step limits",
    max_steps=(*OPENVLA_STEPS, ("reach", REACH_STEPS)),
    published_seed=None,
    resolution=None,
    executed_horizon=None,
    init_source="sampled",
)
PROTOCOLS: dict[str, EvalProtocol] = {protocol.name: protocol for protocol in (_OPENVLA_OFT, _OPENPI, _LEROBOT, _LIBERO, _SAMPLED)}
"""All protocols by name."""


def get_protocol(name: str) -> EvalProtocol:
    """The protocol of that name. Raises ProtocolError with the nearest name for an unknown one."""
    if name not in PROTOCOLS:
        raise ProtocolError(f"protocol {name!r} is unknown{nearest_name(name, list(PROTOCOLS))}")
    return PROTOCOLS[name]


def protocol_hash(protocol: EvalProtocol) -> str:
    """The first 16 hex digits of the sha256 of every field that shapes a result (name and source do not)."""
    shaping = {name: value for name, value in asdict(protocol).items() if name not in ("name", "source", "published_seed")}
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]


def effective_protocol(
    protocol: EvalProtocol,
    *,
    resolution: int,
    orientation: Orientation,
    executed_horizon: int | None,
    inits_per_task: int | None = None,
) -> tuple[EvalProtocol, list[str]]:
    """What really runs when an env and an actor meet a protocol, and a line for each published value it departs from.

    A policy trained at 128 pixels is evaluated at 128 pixels; the result then says so and has another hash, instead of
    carrying the name of a protocol that did not run. `executed_horizon` is None for actors without one (controls).
    """
    wanted = {"resolution": resolution, "orientation": orientation, "executed_horizon": executed_horizon}
    if inits_per_task is not None:
        wanted["inits_per_task"] = inits_per_task
    deviations = []
    for name, value in wanted.items():
        published = getattr(protocol, name)
        if value is not None and published is not None and value != published:
            deviations.append(f"{name}: {_plain(value)} in place of {_plain(published)}")
    return replace(protocol, **wanted), deviations


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Orientation) else value


def protocol_differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """A line for each field in which two recorded protocols (`to_dict`) would give incomparable numbers.

    Names, sources and the number of inits do not count (a comparison pairs specs anyway); a horizon of None
    belongs to an actor that has none, and fits any. Of the deviations those count that are about no field.
    """
    lines = []
    uncounted = {"name", "source", "published_seed", "published_hash", "hash", "inits_per_task"}
    for name in sorted((first.keys() | second.keys()) - uncounted):
        one, other = (_beside_fields(protocol) if name == "deviations" else protocol.get(name) for protocol in (first, second))
        if one != other and not (name == "executed_horizon" and None in (one, other)):
            lines.append(f"{name}: {one} against {other}")
    return lines


def _beside_fields(protocol: dict[str, Any]) -> list[str]:
    """The deviations of a recorded protocol that no field of it shows, such as inits from a dataset."""
    return [line for line in protocol.get("deviations", ()) if line.partition(":")[0] not in protocol]


def init_names(protocol: EvalProtocol, count: int, split: str) -> list[str]:
    """The first `count` inits of the protocol's source: `benchmark:0`, ... or the first seeds of the split.

    Raises ProtocolError for more published states than there are, or published states in another split than test.
    """
    if protocol.init_source == "benchmark":
        if split != "test":
            raise ProtocolError(f"protocol {protocol.name!r} uses published test states; split {split!r} needs the protocol 'sampled'")
        if count > PUBLISHED_INITS:
            raise ProtocolError(f"{count} inits asked for, but each task has {PUBLISHED_INITS} published states; use 'sampled' for more")
        return [f"benchmark:{k}" for k in range(count)]
    seeds = SPLITS[split]
    return [f"sampled:{seed}" for seed in seeds[:count]]


def build_specs(
    protocol: EvalProtocol,
    suite: str,
    tasks: Sequence[int],
    inits: Sequence[str],
    *,
    split: str = "test",
    sample: int = 0,
) -> list[EpisodeSpec]:
    """Every (task, init) exactly once, tasks outermost. Raises ProtocolError for a task or init named twice."""
    for name, values in (("task", tasks), ("init", inits)):
        repeated = sorted({str(value) for value in values if list(values).count(value) > 1})
        if repeated:
            raise ProtocolError(f"{name} {', '.join(repeated)} is named twice; every (task, init) is evaluated exactly once")
    steps = protocol.step_protocol(suite)
    return [EpisodeSpec(suite, task, init, split, steps, sample) for task in tasks for init in inits]
