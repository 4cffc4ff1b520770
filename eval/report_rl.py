"""What only reinforcement learning has in the report: success before and after on the same scenes, and one step as a Gantt chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from vla_rl.eval.compare import CompareError, Comparison, compare_rows
from vla_rl.eval.report_charts import SERIES, duration
from vla_rl.eval.report_data import Phase, reported_evaluations

STEP = "rl_step"
"""Name of the span of one RL step."""
BASE = "before"
"""Condition of the evaluation that the others are held against."""
SHORTEST = 0.002
"""A span of less than this share of the step is not drawn."""


def before_after(phases: Sequence[Phase]) -> str:
    """Every policy evaluated on the scenes of the one with condition `before`, paired with it."""
    evaluations = [phase for phase in reported_evaluations(phases) if phase.is_policy]
    base = next((phase for phase in evaluations if _condition(phase) == BASE), None)
    if base is None:
        return ""
    lines = "".join(_compared(base, phase) for phase in evaluations if phase is not base)
    titles = "".join(f"<th>{title}</th>" for title in ("", "before", "after", "difference", "won, lost", "exact McNemar p"))
    table = f'<div class="table"><table><tr>{titles}</tr>{lines}</table></div>'
    return f'<div class="card"><h3>On the same scenes</h3>{table}</div>' if lines else ""


def _condition(phase: Phase) -> str:
    return phase.results[0].condition


def _compared(base: Phase, phase: Phase) -> str:
    try:
        paired = compare_rows({row.key: row for row in base.finished}, {row.key: row for row in phase.finished})
    except CompareError:
        return ""  # other scenes: nothing to pair
    cells = (escape(_condition(phase)), _rate(paired, first=True), _rate(paired, first=False), *_difference(paired))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _rate(paired: Comparison, first: bool) -> str:
    rate = paired.first if first else paired.second
    low, high = (100 * end for end in rate.interval)
    return f"<b>{rate.successes}/{rate.trials}</b> {100 * rate.value:.1f} % <small>{low:.1f} – {high:.1f}</small>"


def _difference(paired: Comparison) -> tuple[str, str, str]:
    low, high = (100 * end for end in paired.interval)
    change = f"{100 * paired.difference:+.1f} points <small>{low:+.1f} – {high:+.1f}</small>"
    return change, f"{len(paired.wins)}, {len(paired.losses)}", f"{paired.p_value:.2g}"


@dataclass(frozen=True)
class Bar:
    """A stretch of time in a lane of the chart."""

    name: str
    start: float
    """Share of the step at which it begins."""
    width: float
    """Share of the step."""


def step_lanes(spans: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, list[Bar]]]:
    """(seconds, lane -> bars) of the RL step of median length; no lanes where there is none.

    A lane is a thread of a role: of the driver's own thread the parts of the step, of every other one its outermost spans.
    """
    steps = sorted((row for row in spans if row["name"] == STEP), key=lambda row: row["s"])
    if not steps:
        return 0.0, {}
    step = steps[len(steps) // 2]
    lanes: dict[str, list[Bar]] = {step["role"]: []}
    for row in spans:
        own = (row["pid"], row["thread"]) == (step["pid"], step["thread"])
        start, width = (row["start"] - step["start"]) / step["s"], row["s"] / step["s"]
        if row["depth"] == int(own) and start > -SHORTEST and start + width < 1 + SHORTEST and width >= SHORTEST:
            lane = row["role"] if own else f"{row['role']}: {row['thread']}"
            lanes.setdefault(lane, []).append(Bar(row["name"], max(start, 0.0), width))
    return step["s"], lanes


def gantt(phases: Sequence[Phase]) -> str:
    """One step of every RL run, a lane per thread."""
    charts = [(phase, *step_lanes(phase.spans)) for phase in phases]
    return "".join(_chart(phase, seconds, lanes) for phase, seconds, lanes in charts if lanes)


def _chart(phase: Phase, seconds: float, lanes: Mapping[str, Sequence[Bar]]) -> str:
    names = list(dict.fromkeys(bar.name for bars in lanes.values() for bar in bars))
    colours = {name: f"s{number % SERIES}" for number, name in enumerate(names)}
    rows = "".join(_lane(lane, bars, colours, seconds) for lane, bars in lanes.items())
    legend = "".join(f'<li><i class="dot {colours[name]}"></i>{escape(name.replace("_", " "))}</li>' for name in names)
    head = f'<h3>{escape(phase.name)} <span class="quiet">one step, {duration(seconds)}</span></h3>'
    return f'<div class="card">{head}{rows}<ul class="legend">{legend}</ul></div>'


def _lane(lane: str, bars: Sequence[Bar], colours: Mapping[str, str], seconds: float) -> str:
    drawn = "".join(
        f'<i class="{colours[bar.name]}" style="left:{100 * bar.start:.2f}%;width:{100 * bar.width:.2f}%" '
        f'title="{escape(bar.name)} {duration(bar.width * seconds)}"></i>'
        for bar in bars
    )
    return f'<div class="lane"><span class="who">{escape(lane)}</span><span class="bars">{drawn}</span></div>'
