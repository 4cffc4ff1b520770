"""What the benchmarks share: fresh processes, interleaved pairs, medians, and the closing JSON line."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vla_rl.telemetry.environment import machine


def median_iqr(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the 25 % and 75 % quantiles as the spread; all equal to the value for fewer than two."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


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


def finish(name: str, ratio: float, bar: float, fraction_of_limit: float | None, rows: Sequence[Mapping[str, Any]]) -> int:
    """Print the closing JSON line of a benchmark; exit status 0 if the bar is reached, else 1.

    `ratio` is the smallest over the measured cases, so that it can be held against the bar.
    """
    result = {
        "name": name,
        "ratio": round(ratio, 4),
        "bar": bar,
        "fraction_of_limit": None if fraction_of_limit is None else round(fraction_of_limit, 4),
        "rows": list(rows),
        "machine": machine(),
    }
    print(json.dumps(result), flush=True)
    return 0 if ratio >= bar else 1
