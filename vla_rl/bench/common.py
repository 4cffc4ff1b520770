"""What the benchmarks share: their options, fresh processes, interleaved pairs, medians, the closing JSON line and the record."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vla_rl.eval.record import write_record
from vla_rl.telemetry.environment import machine


def benchmark_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options of `vla-rl bench NAME`; `--record` is every benchmark's."""
    parser = argparse.ArgumentParser(prog=f"vla-rl bench {name}", description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", metavar="RECORD", help="also write the result to docs/results/RECORD")
    return parser


def median_iqr(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the 25 % and 75 % quantiles as the spread; all equal to the value for fewer than two."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles as a row keeps them."""
    middle, low, high = median_iqr(values)
    return {"median": round(middle, 4), "q25": round(low, 4), "q75": round(high, 4)}


def measure_in_turns(module: str, systems: Sequence[str], rounds: int, *arguments: str) -> dict[str, list[dict[str, float]]]:
    """`rounds` measurements of each system, `python -m module measure SYSTEM arguments` in fresh processes that take turns."""
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for _ in range(rounds):
        for system, measured in runs.items():
            measured.append(run_fresh(module, "measure", system, *arguments))
    return runs


def run_fresh(module: str, *arguments: str, threads: int = 1, timeout_s: float = 900.0) -> dict[str, Any]:
    """Run `python -m module arguments` in a fresh process and parse its last output line as JSON.

    Numeric libraries get `threads` threads. Raises RuntimeError with the child's output if it fails or prints no JSON.
    """
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **limits}, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def _option(name: str, value: Any) -> str:
    """An option as it is typed; nothing for one that was not given."""
    values = value if isinstance(value, list) else [value]
    return "" if value is None else f"--{name.replace('_', '-')} {' '.join(map(str, values))}"


def finish(
    name: str, ratio: float, bar: float, fraction_of_limit: float | None, rows: Sequence[Mapping[str, Any]], options: argparse.Namespace
) -> int:
    """Print the closing JSON line of a benchmark, write its record if asked to; exit status 0 if the bar is reached, else 1.

    `ratio` is the smallest over the measured cases, so that it can be held against the bar. A record keeps a bar that was missed.
    """
    measured = {
        "ratio": round(ratio, 4),
        "fraction_of_limit": None if fraction_of_limit is None else round(fraction_of_limit, 4),
        "rows": list(rows),
    }
    if options.record is not None:
        given = {option: value for option, value in vars(options).items() if option != "record"}
        command = " ".join([f"vla-rl bench {name} --record {options.record}", *filter(None, (_option(*pair) for pair in given.items()))])
        print(write_record(options.record, command, given, measured, {"ratio": bar}), file=sys.stderr)
    print(json.dumps({"name": name, "bar": bar, **measured, "machine": machine()}), flush=True)
    return 0 if ratio >= bar else 1
