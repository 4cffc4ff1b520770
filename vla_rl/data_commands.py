"""`vla-rl data inspect | check | convert | stats | filter | merge`: the command line over `datasets/`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vla_rl.config import ConfigError, nearest_name
from vla_rl.datasets.edit import Edited, Filter, convert, filter_dataset, merge_datasets, new_folder

DATASET_HELP = "HDF5 files, folders of them, LeRobot folders (v2 or v3), or collect runs"


def main(arguments: Sequence[str]) -> int:
    """One action on datasets; 0 if all is well, 1 if a check found a fault."""
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(__doc__, *(f"\n  {action.__doc__.splitlines()[0]}" for action in ACTIONS.values() if action.__doc__), sep="")
        return 0
    if name not in ACTIONS:
        raise ConfigError(f"data needs an action, not {name!r}{nearest_name(name, list(ACTIONS))}")
    return ACTIONS[name](arguments[1:])


def _parser(name: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"vla-rl data {name}", description=description)
    parser.add_argument("dataset", nargs="+", help=DATASET_HELP)
    return parser


def _inspect(arguments: Sequence[str]) -> int:
    """inspect: a summary, and an HTML page with pictures, action histograms and episode lengths; of a checkpoint: its tensors."""
    parser = _parser("inspect", _inspect.__doc__)
    parser.add_argument("--page", type=Path, help="where the page goes (default: DATASET.html beside the dataset)")
    options = parser.parse_args(arguments)
    first = Path(options.dataset[0])
    from vla_rl.policies.inspect import inspect_checkpoint, is_checkpoint

    if is_checkpoint(first):
        if len(options.dataset) != 1 or options.page is not None:
            raise ConfigError(f"{first} is a checkpoint: inspect takes it alone, and writes no page")
        report = inspect_checkpoint(first)
        print(report.text())
        return 1 if report.problems else 0
    from vla_rl.datasets.inspect import overview, summary, write_page

    view = overview(options.dataset)
    print(summary(view))
    print(write_page(view, options.page or first.absolute().parent / f"{first.stem}.html"))
    return 0


def _check(arguments: Sequence[str]) -> int:
    """check: name what is wrong (order of actions, repeated pictures, gripper, orientation, rate, statistics, ...)."""
    parser = _parser("check", _check.__doc__)
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    options = parser.parse_args(arguments)
    from vla_rl.datasets.check import check

    report = check(options.dataset)
    print(json.dumps([vars(finding) for finding in report.findings], indent=1) if options.json else report.text())
    return 1 if report.faults else 0


def _convert(arguments: Sequence[str]) -> int:
    """convert: HDF5 to LeRobot v3.0 or back, LeRobot v2 to v3.0, and LIBERO's published HDF5 with its alignment corrected."""
    parser = _parser("convert", _convert.__doc__)
    parser.add_argument("--to", choices=("hdf5", "lerobot"), required=True, help="format")
    parser.add_argument("--into", type=Path, required=True, help="a new folder")
    parser.add_argument("--pictures", choices=("png", "av1", "h264"), help="in LeRobot's format (default: as they are, else png)")
    parser.add_argument("--suite", help="for LIBERO's published HDF5: the suite it belongs to, such as libero_object")
    parser.add_argument("--task", type=int, help="for LIBERO's published HDF5: the task's number in the suite")
    options = parser.parse_args(arguments)
    if options.suite is not None or options.task is not None:
        return _import(options)
    _print(convert(options.dataset, options.into, options.to, options.pictures))
    return 0


def _import(options: argparse.Namespace) -> int:
    from vla_rl.datasets.published import import_published
    from vla_rl.datasets.store import EpisodeStore

    if options.suite is None or options.task is None or options.to != "hdf5" or len(options.dataset) != 1:
        raise ConfigError("a published file is one dataset with --suite, --task and --to hdf5 (then convert on to lerobot)")
    with new_folder(options.into):
        done = import_published(options.dataset[0], EpisodeStore(options.into), options.suite, options.task)
    print(f"{done.episodes} episodes in {options.into}; observations were {done.late_by} step(s) late, now they precede their actions")
    return 0


def _stats(arguments: Sequence[str]) -> int:
    """stats: true quantiles and moments over all rows, in one pass."""
    parser = _parser("stats", _stats.__doc__)
    parser.add_argument("--pictures", action="store_true", help="of pictures too (decodes them all)")
    parser.add_argument("--write", action="store_true", help="into meta/stats.json of the LeRobot folder")
    options = parser.parse_args(arguments)
    from vla_rl.datasets.lerobot_catalog import lerobot_folder
    from vla_rl.datasets.stats import dataset_statistics, write_statistics
    from vla_rl.datasets.store import list_episodes

    folder = lerobot_folder(Path(options.dataset[0]))
    if options.write and (folder is None or len(options.dataset) != 1):
        raise ConfigError("--write needs one LeRobot folder: HDF5 files hold no statistics, training computes them")
    statistics = dataset_statistics(list_episodes(options.dataset), options.pictures)
    print(json.dumps(statistics, indent=1))
    if options.write and folder is not None:
        print(write_statistics(folder, statistics), file=sys.stderr)
    return 0


def _filter(arguments: Sequence[str]) -> int:
    """filter: a copy without no-ops, failures, other tasks or single episodes; provenance says what is gone."""
    parser = _parser("filter", _filter.__doc__)
    parser.add_argument("--into", type=Path, required=True, help="a new folder")
    parser.add_argument("--no-ops", action="store_true", help="drop steps that move nothing (OpenVLA's rule)")
    parser.add_argument("--failures", action="store_true", help="drop episodes that did not reach their goal")
    parser.add_argument("--task", nargs="+", default=[], help="keep only these: SUITE:TASK, or an instruction")
    parser.add_argument("--without-numbers", type=int, nargs="+", default=[], help="drop these episodes (positions in the dataset)")
    options = parser.parse_args(arguments)
    rule = Filter(options.no_ops, options.failures, tuple(options.task), tuple(options.without_numbers))
    if rule == Filter():
        raise ConfigError("nothing to filter: give --no-ops, --failures, --task or --without-numbers")
    _print(filter_dataset(options.dataset, options.into, rule))
    return 0


def _merge(arguments: Sequence[str]) -> int:
    """merge: several datasets as one: LIBERO's file per task from HDF5, one folder with large files from LeRobot."""
    parser = _parser("merge", _merge.__doc__)
    parser.add_argument("--into", type=Path, required=True, help="a new folder")
    options = parser.parse_args(arguments)
    _print(merge_datasets(options.dataset, options.into))
    return 0


def _print(edited: Edited) -> None:
    dropped = f"; left out: {edited.dropped_episodes} episodes" if edited.dropped_episodes else ""
    dropped += f", {edited.dropped_steps} steps" if edited.dropped_steps else ""
    print(f"{edited.episodes} episodes, {edited.steps} control steps in {edited.folder}{dropped}")
    for note in edited.notes:
        print(f"note: {note}")


ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "inspect": _inspect,
    "check": _check,
    "convert": _convert,
    "stats": _stats,
    "filter": _filter,
    "merge": _merge,
}
