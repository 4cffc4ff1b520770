"""What a checkpoint folder holds and where each tensor would go, without loading it: the dry run of `vla-rl data inspect CHECKPOINT`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from vla_rl.errors import UserError
from vla_rl.policies.base import PolicySpec
from vla_rl.policies.checkpoint import meta_policy
from vla_rl.policies.lerobot_foreign import foreign_spec
from vla_rl.policies.module import PolicyModule
from vla_rl.policies.pi0.imported import PI0_TYPES
from vla_rl.policies.published import CONFIG_FILE, Layout, detect_layout, read_json, resolve_folder
from vla_rl.policies.strict_load import destination_names
from vla_rl.policies.tensor_files import CheckpointError, TensorFiles

NOT_READ = "(not read: a copy of another tensor)"
NOWHERE = "(no place for it)"


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of a file and its destination."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    destination: str
    """Our name, `NOT_READ`, `NOWHERE`, or LeRobot's own network."""


@dataclass(frozen=True)
class CheckpointReport:
    """What `inspect_checkpoint` found."""

    folder: Path
    layout: Layout
    family: str
    spec: PolicySpec | None
    """None where no policy here can act from the folder."""
    tensors: tuple[TensorPlan, ...]
    problems: tuple[str, ...]
    """Why it would not load; empty if it would."""

    def text(self) -> str:
        """For people: a heading, the spec, every tensor, the problems."""
        count = sum(torch.Size(plan.shape).numel() for plan in self.tensors)
        lines = [
            f"{self.folder}: {self.family}, {self.layout.value} layout, {len(self.tensors)} tensors, {count / 1e6:.1f} million numbers"
        ]
        if self.spec is not None:
            lines += [f"  {name}: {_plain(value)}" for name, value in self.spec.to_dict().items()]
        width = max((len(plan.name) for plan in self.tensors), default=0)
        lines += [f"  {plan.name:<{width}}  {plan.dtype:<5} {list(plan.shape)} -> {plan.destination}" for plan in self.tensors]
        return "\n".join([*lines, *(f"problem: {problem}" for problem in self.problems)])


def is_checkpoint(path: str | Path) -> bool:
    """Whether a path is a folder that looks like a checkpoint, so that `vla-rl data inspect` knows what it was given."""
    try:
        return Path(path).is_dir() and detect_layout(Path(path)) is not None
    except CheckpointError:
        return False


def inspect_checkpoint(folder: str | Path) -> CheckpointReport:
    """Read a folder's headers and list every tensor with its destination; nothing of the weights' size is loaded.

    What would stop it from loading is listed in `problems`. Raises CheckpointError if the folder or its weights cannot be read at all.
    """
    folder = resolve_folder(folder)
    layout = detect_layout(folder)
    files = TensorFiles.open(folder)
    family = _family(folder, layout)
    if layout is Layout.LEROBOT and family not in PI0_TYPES:
        return _foreign(folder, layout, family, files)
    try:
        policy = meta_policy(folder)
    except UserError as error:
        plans = tuple(TensorPlan(name, info.shape, info.dtype, NOWHERE) for name, info in files.infos.items())
        return CheckpointReport(folder, layout, family, None, plans, (str(error),))
    plans, problems = _plans(policy, files)
    return CheckpointReport(folder, layout, policy.config.family, policy.spec, plans, problems)


def _plans(policy: PolicyModule, files: TensorFiles) -> tuple[tuple[TensorPlan, ...], tuple[str, ...]]:
    shapes = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
    plans: list[TensorPlan] = []
    problems: list[str] = []
    for name, own in destination_names(policy, files).items():
        info = files.infos[name]
        place = NOT_READ if own is None else own if own in shapes else NOWHERE
        plans.append(TensorPlan(name, info.shape, info.dtype, place))
        if place == NOWHERE:
            problems.append(f"{name} has no place in a {policy.config.family} of these sizes")
        elif own is not None and shapes[own] != info.shape:
            problems.append(f"{name} has shape {list(info.shape)}, {own} has {list(shapes[own])}")
    filled = {plan.destination for plan in plans}
    problems += [f"nothing fills {policy.published_name(name)}" for name in shapes if name not in filled]
    return tuple(plans), tuple(problems)


def _foreign(folder: Path, layout: Layout, family: str, files: TensorFiles) -> CheckpointReport:
    """A LeRobot policy that only acts, in LeRobot's own network."""
    fields = read_json(folder / CONFIG_FILE)
    plans = tuple(TensorPlan(name, info.shape, info.dtype, f"LeRobot's {family}") for name, info in files.infos.items())
    try:
        spec = foreign_spec(folder, fields)
    except UserError as error:
        return CheckpointReport(folder, layout, family, None, plans, (str(error),))
    return CheckpointReport(folder, layout, family, spec, plans, ())


def _family(folder: Path, layout: Layout) -> str:
    """What the folder calls itself."""
    if layout is Layout.OPENPI:
        return "openpi"
    config = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    return str(config.get("type") or config.get("model_type") or layout.value)


def _plain(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
