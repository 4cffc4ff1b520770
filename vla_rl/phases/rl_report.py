"""What a step's time went into, for people and for `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vla_rl.telemetry.spans import as_leaf, leaf_shares
from vla_rl.telemetry.verdict import bottleneck


def step_report(
    rows: Sequence[Mapping[str, Any]], seconds: Mapping[str, float], envs: int, batch_fill: float
) -> tuple[str, dict[str, float]]:
    """(lines to print, numbers to log) from the spans of one step and the busy seconds of its rollout."""
    shares = leaf_shares(as_leaf(rows, "evaluation"), "rl_step")  # its envs and its policy are not those of the rollout
    step_s = sum(row["s"] for row in rows if row["name"] == "rl_step")
    parts = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    verdict = bottleneck(shares, seconds, envs, batch_fill)
    numbers = {f"time/{name}": share for name, share in shares.items()} | {"step_s": step_s}
    numbers |= {f"busy_s/{name}": value for name, value in seconds.items()}
    return f"rl: {step_s:.1f} s: {parts}\nrl: bottleneck: {verdict.name}: {verdict.reason}; {verdict.remedy}", numbers
