"""The command line: one command is one phase, and nothing else happens here.

vla-rl doctor | collect | sft | rl | eval | serve | run | compare | report | record | bench
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from vla_rl.config import ConfigError, load_recipe, nearest_name
from vla_rl.errors import UserError
from vla_rl.process import INTERRUPTED, ctrl_c_leaves_a_mark, end_process

USAGE = """usage: vla-rl COMMAND ...

  doctor [--json]                  what this machine can do, and what is missing
  collect RECIPE [--key value]     demonstrations as HDF5 or LeRobot datasets: scripted, by a person, of a corrected policy
  sft RECIPE [--key value]         supervised fine-tuning
  rl RECIPE [--key value]          reinforcement learning of a saved policy; --dry-run prints placement, batches and memory
  eval RECIPE [--key value]        LIBERO evaluation
  serve CHECKPOINT [--key value]   a policy for others to ask: openpi's websocket or GR00T's ZMQ protocol
  compare RUN_A RUN_B              paired statistics of two evaluations; --allow-unlike: although their protocols differ
  run RECIPE [--key value]         a pipeline: collect, SFT, evaluation ... in order, each resumable
  data inspect|check|convert|stats|filter|merge DATASET ...
                                   look at datasets, find faults, change their format (`data --help`)
  replay DATASET                   execute recorded actions again and compare every state
  report RUN                       an HTML page: success, curves, time breakdown, videos
  record NAME --command ... --run CONDITION=RUN_DIR ...
                                   docs/results/NAME from finished evaluations, with bars; --help lists all options
  bench NAME                       a benchmark; its last line is one JSON document

'vla-rl COMMAND RECIPE --help' lists every field of the recipe with its meaning.
Starting a command again with the same run_dir resumes it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 a result that falls short, 2 bad input, 130 Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in HELP:
        print(USAGE)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"vla-rl: no command {name!r}{nearest_name(name, list(COMMANDS))}", file=sys.stderr)
        return 2
    if rest and rest[0] in HELP and name not in OWN_HELP:
        print(command_help(name))
        return 0
    obeys = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a process in the background may have to ignore it
    with ctrl_c_leaves_a_mark() if obeys else nullcontext([]) as pressed:
        try:
            return COMMANDS[name](rest)
        except (UserError, OSError) as error:
            print(f"vla-rl {name}: {error}{_remedy(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"vla-rl {name}: interrupted; start the same command again to go on", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            if not pressed:  # only what Ctrl-C has caused ends here
                raise
            print(f"vla-rl {name}: interrupted ({error}); start the same command again to go on", file=sys.stderr)
            return INTERRUPTED


REMEDIES = {
    errno.EADDRINUSE: "choose another port",
    errno.ENOSPC: "free some room and start the same command again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose a place on another file system",
    errno.EDQUOT: "free some room and start the same command again",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file is where a folder should be; choose another folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a place where you may read and write"),
}
"""What to do about an error of the operating system."""


def _remedy(error: Exception) -> str:
    """The tail of an error message."""
    return f"; {REMEDIES[error.errno]}" if isinstance(error, OSError) and error.errno in REMEDIES else ""


HELP = ("-h", "--help")
OWN_HELP = ("data", "replay", "record")
"""Commands that explain themselves; of the others the first argument is a file, which `--help` may follow."""


def command_help(name: str) -> str:
    """What a command is called with, from the usage text, and where its fields are listed."""
    lines = USAGE.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"  {name} "))
    length = next(n for n, line in enumerate(lines[start + 1 :], 1) if not line.startswith("    "))
    more = {"bench": f"NAME is one of {', '.join(BENCHMARKS)}."}
    if name in RECIPES or name == "serve":
        what = "RECIPE" if name in RECIPES else "CHECKPOINT"
        more[name] = f"'vla-rl {name} {what} --help' lists every field with its meaning; each is an option, --key value."
    usage = ["usage: vla-rl " + lines[start].strip(), *lines[start + 1 : start + length]]
    return "\n".join([*usage, *([more[name]] if name in more else [])])


RECIPES = {
    "collect": ("vla_rl.collection.collect", "CollectConfig", "run_collect"),
    "sft": ("vla_rl.phases.sft", "SftConfig", "run_sft"),
    "rl": ("vla_rl.phases.rl", "RlConfig", "run_rl"),
    "eval": ("vla_rl.eval.runner", "EvalConfig", "run_eval"),
    "run": ("vla_rl.phases.pipeline", "PipelineConfig", "run_pipeline"),
}
"""Command -> module, recipe dataclass and function of its phase; imported only when the command runs."""


DRY_RUN = "--dry-run"
DRY_RUNS = {"rl": ("vla_rl.phases.rl_dry_run", "dry_run_rl")}
"""Command -> module and function that check a recipe and print its plan instead of running it."""


def recipe_class(command: str) -> type[Any]:
    """The dataclass that the recipe of a command fills."""
    module, config_class, _ = RECIPES[command]
    return getattr(importlib.import_module(module), config_class)


def _recipe_command(name: str) -> Callable[[Sequence[str]], int]:
    """A command `NAME RECIPE [overrides]` that loads a recipe and hands it to a phase."""

    def command(arguments: Sequence[str]) -> int:
        if not arguments or arguments[0].startswith("-"):
            raise ConfigError("the first argument is a recipe file, for example configs/demo.yaml")
        module, _, run = RECIPES[name]
        overrides = list(arguments[1:])
        if DRY_RUN in overrides:
            overrides.remove(DRY_RUN)
            if name not in DRY_RUNS:
                raise ConfigError(f"{DRY_RUN} belongs to {', '.join(DRY_RUNS)}, not to {name}")
            module, run = DRY_RUNS[name]
        config = load_recipe(recipe_class(name), Path(arguments[0]), overrides, f"vla-rl {name}")
        return getattr(importlib.import_module(module), run)(config)

    return command


def _serve(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("the first argument is a policy's folder, for example runs/demo/sft/checkpoints/last/policy")
    from vla_rl.config import override
    from vla_rl.serving import ServeConfig, run_serve

    return run_serve(override(ServeConfig(arguments[0]), arguments[1:], f"vla-rl serve {arguments[0]}"))


def _doctor(arguments: Sequence[str]) -> int:
    from vla_rl.doctor import run_doctor

    unknown = [argument for argument in arguments if argument != "--json"]
    if unknown:
        raise ConfigError(f"doctor takes only --json, not {' '.join(unknown)}")
    return run_doctor(as_json="--json" in arguments)


def _compare(arguments: Sequence[str]) -> int:
    from vla_rl.eval.compare import run_compare

    runs = [argument for argument in arguments if not argument.startswith("--")]
    unknown = [a for a in arguments if a.startswith("--") and a != "--allow-unlike"]
    if len(runs) != 2 or unknown:
        raise ConfigError("compare takes two run directories and, if their protocols may differ, --allow-unlike")
    return run_compare(Path(runs[0]), Path(runs[1]), allow_unlike="--allow-unlike" in arguments)


def _data(arguments: Sequence[str]) -> int:
    from vla_rl.data_commands import main as data

    return data(arguments)


def _replay(arguments: Sequence[str]) -> int:
    from vla_rl.replay import main as replay

    return replay(arguments)


def _report(arguments: Sequence[str]) -> int:
    from vla_rl.eval.report import write_report

    if len(arguments) != 1:
        raise ConfigError("report takes one run directory")
    print(write_report(Path(arguments[0])))
    return 0


def _record(arguments: Sequence[str]) -> int:
    from vla_rl.eval.make_record import main as make_record

    return make_record(arguments)


BENCHMARKS = (
    "sim",
    "reach",
    "reset",
    "transport",
    "memory",
    "prefix",
    "weights",
    "overlap",
    "exactness",
    "serve",
    "policy",
    "loader",
    "crashes",
    "rl_crashes",
    "intervention",
)


def _bench(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] not in BENCHMARKS:
        name = arguments[0] if arguments else ""
        raise ConfigError(f"no benchmark {name!r}{nearest_name(name, BENCHMARKS)}")
    return importlib.import_module(f"vla_rl.bench.{arguments[0]}").main(list(arguments[1:]))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": _doctor,
    **{name: _recipe_command(name) for name in RECIPES},
    "serve": _serve,
    "compare": _compare,
    "data": _data,
    "replay": _replay,
    "report": _report,
    "record": _record,
    "bench": _bench,
}


def run_process() -> NoReturn:
    """The console script: run the command of the process's arguments and end the process with its status, at once after another Ctrl-C."""
    status = main()
    signal.signal(signal.SIGINT, lambda *_: os._exit(status))
    end_process(status)


if __name__ == "__main__":
    run_process()
