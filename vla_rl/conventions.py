"""Conventions that a policy and an environment must share, as named values.

Each enum names one choice that the field makes in several ways. A policy and an
environment carry one `Conventions` each; `require_equal` compares them where the two meet,
because a silent mismatch (a mirrored picture, an inverted gripper) costs the whole success rate.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from vla_rl.errors import UserError


class Orientation(str, Enum):
    """How a picture lies in memory, relative to robosuite's bottom-up OpenGL frame."""

    RAW = "raw"
    """As `mjr_readPixels` returns it: rows bottom-up (LIBERO's own HDF5 files)."""
    VERTICAL_FLIP = "vertical_flip"
    """`image[::-1]`: the true picture."""
    ROTATED_180 = "rotated_180"
    """`image[::-1, ::-1]`: upright and mirrored, the form of OpenVLA, openpi and LeRobot data."""


class Rotation(str, Enum):
    """How the end effector's orientation is written in `Observation.state`."""

    AXIS_ANGLE_ROBOSUITE = "axis_angle_robosuite"
    """`quat2axisangle` of robosuite 1.4: angle in [0, 2 pi], the quaternion's sign kept."""


class Gripper(str, Enum):
    """What the sign of the last action dimension means."""

    CLOSE_POSITIVE = "close_positive"
    """-1 opens, +1 closes (the environment's own convention, and LeRobot's)."""
    OPEN_POSITIVE = "open_positive"
    """+1 opens, -1 closes (or 1 and 0), as in RLDS data and GR00T."""


class PromptSource(str, Enum):
    """Where the instruction comes from."""

    FILENAME = "filename"
    """LIBERO's `Task.language`, derived from the file name: what VLA checkpoints are trained on."""
    BDDL = "bddl"
    """The `(:language ...)` field, the only right one for LIBERO-PRO's `_lan` and `_task` suites."""
    SUITE = "suite"
    """BDDL for LIBERO-PRO's `_lan` and `_task` suites, the file name for every other suite."""


class ConventionMismatch(UserError):
    """A policy and an environment (or a dataset) disagree on a convention."""


@dataclass(frozen=True)
class Conventions:
    """The conventions of one side; two sides that meet must be equal field by field."""

    orientation: Orientation = Orientation.ROTATED_180
    """Orientation of every image in an `Observation`."""
    rotation: Rotation = Rotation.AXIS_ANGLE_ROBOSUITE
    """Form of the orientation part of `state` (rad)."""
    gripper: Gripper = Gripper.CLOSE_POSITIVE
    """Sign of the gripper action."""
    control_rate_hz: int = 20
    """Control steps per simulated second."""

    def to_dict(self) -> dict[str, str | int]:
        """Plain values for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, str | int]) -> Conventions:
        """Inverse of `to_dict`.

        Raises ValueError for an unknown value and KeyError for a missing field.
        """
        return cls(
            orientation=Orientation(values["orientation"]),
            rotation=Rotation(values["rotation"]),
            gripper=Gripper(values["gripper"]),
            control_rate_hz=int(values["control_rate_hz"]),
        )


def require_equal(first_name: str, first: Conventions, second_name: str, second: Conventions) -> None:
    """Raise `ConventionMismatch` naming both sides and every field in which they differ."""
    first_values, second_values = first.to_dict(), second.to_dict()
    unlike = [name for name in first_values if first_values[name] != second_values[name]]
    if unlike:
        lines = [f"  {name}: {first_name} has {first_values[name]!r}, {second_name} has {second_values[name]!r}" for name in unlike]
        raise ConventionMismatch(
            f"{first_name} and {second_name} do not share their conventions:\n"
            + "\n".join(lines)
            + "\nUse a policy and an environment (or dataset) made for the same conventions."
        )
