"""Charts of the report: SVG for curves, HTML and CSS for everything that must stay readable on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import floor, log10

from vla_rl.eval.report_data import Curve, TimeShare
from vla_rl.eval.results import Rate

WIDTH, HEIGHT = 460, 240
"""Size of a curve's drawing; it scales with the page. Small, so that its text is still text on a phone."""
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 10, 40
"""Margins for the axes' labels."""
MAX_POINTS = 300
"""Longer curves are drawn as means of as many equal stretches."""
LOG_RATIO = 12
"""A curve of positive values that spans more than this factor gets a logarithmic axis."""
SMALLEST_SHARE = 0.001
"""A smaller share of time is not shown."""
SERIES = 6
"""Number of colours (`.s0` to `.s5` in the style sheet)."""


def thinned(curve: Curve) -> Curve:
    """At most `MAX_POINTS` points: means of equal stretches of the curve."""
    if len(curve) <= MAX_POINTS:
        return curve
    edges = [round(i * len(curve) / MAX_POINTS) for i in range(MAX_POINTS + 1)]
    parts = [curve[start:end] for start, end in pairwise(edges)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) between two bounds, about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    unit = 10 ** floor(log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    first = -floor(-low / step)
    ticks = []
    while first * step <= high + step * 1e-9:
        ticks.append(first * step)
        first += 1
    return ticks


def short(value: float) -> str:
    """A number for an axis: `1.5k`, `0.02`, `3e-05`."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e3:
        return f"{value / 1e3:.4g}k"
    return f"{value:.3g}"


class _Scale:
    """Maps values to pixels, linearly or logarithmically."""

    def __init__(self, values: Sequence[float], start: float, end: float, logarithmic: bool) -> None:
        self.logarithmic = logarithmic
        self._low, self._high = (log10(min(values)), log10(max(values))) if logarithmic else (min(values), max(values))
        if self._high == self._low:
            margin = abs(self._low) * 0.1 or 0.5
            self._low, self._high = self._low - margin, self._high + margin
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        position = log10(value) if self.logarithmic else value
        return self._start + (position - self._low) / (self._high - self._low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Values that get a label."""
        if not self.logarithmic:
            return nice_ticks(self._low, self._high)
        decades = range(floor(self._low), floor(self._high) + 1)
        factors = (1, 2, 5) if self._high - self._low < 2.5 else (1,)
        values = [factor * 10.0**power for power in decades for factor in factors]
        return [value for value in values if self._low - 1e-9 <= log10(value) <= self._high + 1e-9]


def line_chart(title: str, series: Mapping[str, Curve], bounds: tuple[float, float] | None = None, x_name: str = "update") -> str:
    """A figure with one line per series and a legend that gives each one's last value.

    `bounds` are values that the axis has to show, 0 and 1 for a rate.
    """
    drawn = {name: thinned(curve) for name, curve in series.items()}
    xs = [x for curve in drawn.values() for x, _ in curve]
    ys = [y for curve in drawn.values() for _, y in curve] + list(bounds or ())
    x_scale = _Scale(xs, LEFT, WIDTH - RIGHT, logarithmic=False)
    y_scale = _Scale(ys, HEIGHT - BOTTOM, TOP, logarithmic=min(ys) > 0 and max(ys) / min(ys) > LOG_RATIO)
    lines = [_line(number, name, curve, x_scale, y_scale) for number, (name, curve) in enumerate(drawn.items())]
    names = [name.replace("_", " ") for name in series] if len(series) > 1 else ["last"]
    legend = "".join(_legend_entry(number, name, curve) for number, (name, curve) in enumerate(zip(names, series.values())))
    kind = ", logarithmic" if y_scale.logarithmic else ""
    return (
        f'<figure class="chart"><figcaption>{escape(title)}<span class="quiet">{kind}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{_axes(x_scale, y_scale, x_name)}{''.join(lines)}</svg>"
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _axes(x_scale: _Scale, y_scale: _Scale, x_name: str) -> str:
    floor_y = HEIGHT - BOTTOM
    parts = []
    for value in y_scale.ticks():
        y = y_scale(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for value in x_scale.ticks():
        x = x_scale(value)
        parts.append(f'<text x="{x:.1f}" y="{floor_y + 16}" text-anchor="middle">{short(value)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor_y}" y2="{floor_y}"/>')
    parts.append(f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_name)}</text>')
    return "".join(parts)


def _line(number: int, name: str, curve: Curve, x_scale: _Scale, y_scale: _Scale) -> str:
    drawn = curve if len(curve) > 1 else [*curve, *curve]  # a line without length is a dot, because its ends are round
    points = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in drawn)
    return f'<polyline class="line s{number % SERIES}" points="{points}"><title>{escape(name)}</title></polyline>'


def _legend_entry(number: int, name: str, curve: Curve) -> str:
    return f'<li><i class="dot s{number % SERIES}"></i>{escape(name)} <b>{short(curve[-1][1])}</b></li>'


def interval_row(label: str, rate: Rate, muted: bool = False) -> str:
    """A success rate as a dot with its interval on a track from 0 to 100 %, with k/n in words."""
    low, high = (100 * end for end in rate.interval)
    value = 100 * rate.value
    return (
        f'<div class="rate{" muted" if muted else ""}"><span class="who">{escape(label)}</span>'
        f'<span class="track" role="img" aria-label="{value:.1f} %, interval {low:.1f} to {high:.1f} %">'
        f'<i class="span" style="left:{low:.2f}%;width:{high - low:.2f}%"></i><i class="at" style="left:{value:.2f}%"></i></span>'
        f'<span class="count"><b>{rate.successes}/{rate.trials}</b> {value:.1f} %'
        f"<small>{low:.1f} – {high:.1f}</small></span></div>"
    )


def interval_scale() -> str:
    """The axis below interval rows."""
    marks = "".join(f'<i style="left:{tick}%">{tick}</i>' for tick in (0, 25, 50, 75, 100))
    return f'<div class="rate scale" aria-hidden="true"><span></span><span class="track">{marks}</span><span class="count">%</span></div>'


def stacked_bar(share: TimeShare) -> str:
    """Where the time of a phase went: one bar, and a legend with shares and seconds."""
    segments, entries = [], []
    for number, (name, part) in enumerate(share.shares.items()):
        kind = "rest" if name == "unaccounted" else f"s{number % SERIES}"
        if part >= SMALLEST_SHARE:
            segments.append(f'<i class="{kind}" style="flex-grow:{part:.5f}" title="{escape(name)} {100 * part:.1f} %"></i>')
            entries.append(
                f'<li><i class="dot {kind}"></i>{escape(name.replace("_", " "))} <b>{100 * part:.1f} %</b>'
                f" <small>{duration(part * share.seconds)}</small></li>"
            )
    return f'<div class="stack">{"".join(segments)}</div><ul class="legend">{"".join(entries)}</ul>'


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
