"""Checkpoints of a training run: written whole or not at all, and resumed bit for bit.

    checkpoints/step_N/
        policy/         the policy in LeRobot's folder layout (averaged weights where an average is kept)
        state/          torch.distributed.checkpoint: weights, optimizer moments, average, RNG of every rank
        trainer.json    counters, version, and what the caller adds (data cursor ...)
        manifest.json   size of every file, written last
    checkpoints/last -> step_N

A folder is filled under a temporary name, fsynced and renamed; `last` moves after that. A crash at any moment leaves
the previous checkpoint as it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from vla_rl.engine.engine import Engine
from vla_rl.engine.state import restore_state, training_state
from vla_rl.errors import UserError
from vla_rl.telemetry.files import fsync, write_json

STEP_FOLDER = re.compile(r"step_(\d+)")
FORMAT = 1
"""Version of the layout; a reader refuses others."""
SavePolicy = Callable[[Path, Mapping[str, Any]], None]
"""Writes the policy with the given full weights into a folder; called on rank 0 only."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read; the text names the folder and what is still valid."""


def save_checkpoint(
    engine: Engine,
    checkpoints: Path,
    extra: Mapping[str, Any],
    save_policy: SavePolicy | None = None,
    keep_last: int | None = None,
    number: int | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> Path:
    """Write `checkpoints/step_N` and point `last` to it; every rank calls it. N is `number`, or the engine's updates where none is given.

    `write_more` may put further files into the folder (on rank 0), such as episodes that no update has seen yet.
    `extra` is a JSON value that comes back from `load_checkpoint` (data cursor, counters of the caller). `save_policy`
    adds the folder `policy/`. With `keep_last`, older checkpoints beyond that many are removed afterwards.
    Raises CheckpointError on every rank, naming the folder and the checkpoint that stays valid, where the disk is full or not writable.
    """
    target = checkpoints / f"step_{engine.updates if number is None else number}"
    temporary = checkpoints / f".{target.name}.tmp"
    state = training_state(engine)
    weights = _full_weights(engine) if save_policy is not None else {}
    _on_leader(engine, temporary, lambda: _fresh_folder(temporary, target))
    _on_every_rank(engine, temporary, lambda: save(state, checkpoint_id=temporary / "state"))

    def finish() -> None:
        if save_policy is not None:
            save_policy(temporary / "policy", weights)
        if write_more is not None:
            write_more(temporary)
        write_json(temporary / "trainer.json", _trainer(engine, extra))
        _seal(temporary)
        _publish(temporary, target)
        _retain(checkpoints, keep_last)

    _on_leader(engine, temporary, finish)
    return target


def load_checkpoint(engine: Engine, folder: Path) -> dict[str, Any]:
    """Restore an engine in place from `checkpoints/step_N` or `checkpoints/last`, on any number of ranks; returns `extra`.

    Raises CheckpointError for a missing, truncated or foreign checkpoint, before anything is changed.
    """
    folder = folder.resolve()
    trainer = verify_checkpoint(folder)
    state = training_state(engine)
    try:
        load(state, checkpoint_id=folder / "state")
    except (CheckpointException, OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"checkpoint {folder} does not fit this policy and engine: {_reason(error)}; {_others(folder)}") from error
    restore_state(engine, state)
    for name in ("updates", "version", "skipped"):
        setattr(engine, name, trainer[name])
    return trainer["extra"]


def last_checkpoint(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint: where `last` points, or the highest step if the run died between rename and pointer."""
    steps = _steps(checkpoints)
    return checkpoints / f"step_{steps[-1]}" if steps else None


def resume_last(engine: Engine, checkpoints: Path) -> tuple[Path, dict[str, Any]] | None:
    """Restore an engine from the newest checkpoint of its own run; returns its folder and `extra`, None where there is none.

    Rank 0 then points `last` to it: a kill between rename and pointer left it behind, and so does removing a damaged step, but what is
    evaluated, and what the next phase takes, is where `last` points. Raises CheckpointError, see `load_checkpoint`.
    """
    folder = last_checkpoint(checkpoints)
    if folder is None:
        return None
    extra = load_checkpoint(engine, folder)
    if engine.world.leads and (checkpoints / "last").resolve() != folder.resolve():
        _point_to(folder)
    return folder, extra


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Check that every file is there with the size it was written with; returns the content of `trainer.json`.

    Raises CheckpointError naming the folder, the file, both sizes and the checkpoints that are left.
    """
    manifest = _read(folder, "manifest.json")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {manifest['format']}; this version reads format {FORMAT}")
    for name, size in manifest["files"].items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} {state}, {size} were written; {_others(folder)}")
    return _read(folder, "trainer.json")


def _full_weights(engine: Engine) -> dict[str, Any]:
    """Weights to act with, in host memory of rank 0 (other ranks walk the generator and keep nothing)."""
    kept: dict[str, Any] = {}
    for name, tensor in engine.named_weights(averaged=engine.average is not None):
        if engine.world.leads:
            kept[name] = tensor.cpu()
    return kept


def _trainer(engine: Engine, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "updates": engine.updates,
        "version": engine.version,
        "skipped": engine.skipped,
        "total_updates": engine.total_updates,
        "ranks": engine.world.size,
        "extra": dict(extra),
    }


def _fresh_folder(temporary: Path, target: Path) -> None:
    if target.exists():  # replacing a folder is two steps, and a kill between them would lose both
        raise FileExistsError(f"{target} exists, and a step is saved once; remove it if it is not wanted")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for leftover in temporary.parent.glob(".step_*.tmp"):
        shutil.rmtree(leftover)
    temporary.mkdir()


def _seal(folder: Path) -> None:
    """fsync every file and folder, then write the manifest."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    for path in [*folder.rglob("*"), folder]:
        fsync(path)
    write_json(folder / "manifest.json", {"format": FORMAT, "files": files})


def _publish(temporary: Path, target: Path) -> None:
    """Rename the folder into place, then the pointer."""
    os.replace(temporary, target)
    _point_to(target)


def _point_to(target: Path) -> None:
    """Move the pointer `last`."""
    pointer = target.parent / ".last.tmp"
    pointer.unlink(missing_ok=True)
    pointer.symlink_to(target.name)
    os.replace(pointer, target.parent / "last")
    fsync(target.parent)


def _retain(checkpoints: Path, keep_last: int | None) -> None:
    if keep_last is not None:
        for step in _steps(checkpoints)[:-keep_last]:
            shutil.rmtree(checkpoints / f"step_{step}")


def _steps(checkpoints: Path) -> list[int]:
    if not checkpoints.is_dir():
        return []
    matches = [STEP_FOLDER.fullmatch(path.name) for path in checkpoints.iterdir()]
    return sorted(int(match[1]) for match in matches if match)


def _on_leader(engine: Engine, temporary: Path, work: Callable[[], None]) -> None:
    """Run `work` on rank 0; what goes wrong there is raised on every rank."""
    _on_every_rank(engine, temporary, work if engine.world.leads else lambda: None)


def _on_every_rank(engine: Engine, temporary: Path, work: Callable[[], Any]) -> None:
    error: Exception | CheckpointException | None = None
    try:
        work()
    except (OSError, RuntimeError, CheckpointException) as caught:
        error = caught
    reasons = [reason for reason in engine.world.gather(_reason(error) if error else None) if reason]
    if reasons:
        if engine.world.leads:
            shutil.rmtree(temporary, ignore_errors=True)
        previous = last_checkpoint(temporary.parent)
        left = f"{previous} is whole and stays the last checkpoint" if previous else "there is no earlier checkpoint"
        raise CheckpointError(
            f"cannot write checkpoint {temporary}: {reasons[0]}; {left}. Free space or change run_dir, and start again."
        ) from error


def _reason(error: BaseException) -> str:
    """The deepest message: `CheckpointException` wraps what happened on each rank in its traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        return _reason(next(iter(error.failures.values()))[0])
    return f"{type(error).__name__}: {error}"


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if not path.exists():
        raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {name}; {_others(folder)}")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: {name} is not JSON ({error}); {_others(folder)}") from error


def _others(folder: Path) -> str:
    others = [f"step_{step}" for step in _steps(folder.parent) if f"step_{step}" != folder.name]
    return (
        f"other checkpoints there: {', '.join(others)} (remove {folder.name} to resume from the newest)"
        if others
        else "no other checkpoint is there"
    )
