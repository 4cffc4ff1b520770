"""The sections of the report, each a piece of HTML from the phases; an empty one is left out."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

import yaml

from vla_rl.eval.report_charts import duration, interval_row, interval_scale, line_chart, stacked_bar
from vla_rl.eval.report_data import Curve, Phase, curves, main_evaluation, reported_evaluations, time_shares
from vla_rl.eval.results import EpisodeRow, SuiteResult

EMBED_BYTES = 600_000
"""A larger video is linked instead of embedded."""
EMBED_TOTAL_BYTES = 16_000_000
"""Once this much video is inside the page, the rest is linked."""
TIMES = ("time/", "busy_s/")
"""Beginnings of the names of series that say where time went."""
PAUSE = "this.paused?this.play():this.pause()"
"""The page's only script: a click stops and starts a video."""
LISTED_EPISODES = 200
"""Rows of the list of failures."""
BIG_SHARE = 0.02
"""Outermost spans with less than this share of a phase's time are left out of the breakdown."""


def success(phases: Sequence[Phase]) -> str:
    """Every evaluation as an interval, then task by task."""
    evaluations = [(phase, result) for phase in reported_evaluations(phases) for result in phase.results]
    if not evaluations:
        return ""
    overall = "".join(interval_row(_label(phase, result), result.pooled, muted=not phase.is_policy) for phase, result in evaluations)
    parts = [f'<div class="card"><h3>All episodes</h3>{overall}{interval_scale()}</div>']
    for suite in dict.fromkeys(result.suite for _, result in evaluations):
        here = [(phase, result) for phase, result in evaluations if result.suite == suite]
        if len({task for _, result in here for task in result.tasks}) > 1:
            parts.append(f'<div class="card"><h3>{escape(suite)} by task</h3>{_by_task(here)}{interval_scale()}</div>')
    return "".join(parts)


def _by_task(evaluations: Sequence[tuple[Phase, SuiteResult]]) -> str:
    lines = []
    for task in sorted({task for _, result in evaluations for task in result.tasks}):
        instruction = next(filter(None, (_instruction(phase.rows, task) for phase, _ in evaluations)), "")
        lines.append(f'<p class="task"><b>{task}</b> {escape(instruction)}</p>')
        here = [(phase, result) for phase, result in evaluations if task in result.tasks]
        lines += [interval_row(_label(phase, result), result.tasks[task], muted=not phase.is_policy) for phase, result in here]
    return "".join(lines)


def _label(phase: Phase, result: SuiteResult) -> str:
    return result.condition if phase.name in (".", result.condition) else f"{result.condition} ({phase.name})"


def _heading(phase: Phase) -> str:
    """A phase by its condition and folder."""
    return _label(phase, phase.results[0]) if phase.results else phase.name


def _instruction(rows: Iterable[EpisodeRow], task: int) -> str:
    return next((row.instruction.strip() for row in rows if row.task == task and row.instruction.strip()), "")


def demonstrations(phases: Sequence[Phase]) -> str:
    """What every collection recorded."""
    return "".join(_demonstrations(phase) for phase in phases if phase.is_collection)


def _demonstrations(phase: Phase) -> str:
    summary = phase.summary
    fields = {
        "episodes": f"{summary['episodes']} recorded, {summary['steps']:,} control steps, {summary['bytes'] / 2**20:.1f} MiB",
        "expert": f"{summary['successes']} of {summary['finished']} episodes succeeded",
        "by task": summary["tasks"],
    }
    missing = summary["planned"] - summary["finished"]
    if missing:
        fields["incomplete"] = f"{missing} of {summary['planned']} episodes have no outcome"
    return f'<div class="card"><h3>{escape(phase.name)}</h3>{_definitions(fields)}</div>'


def training(phases: Sequence[Phase]) -> str:
    """The curves of every phase that has some."""
    drawn = [(phase, _charts(curves(phase.metrics))) for phase in phases]
    parts = [f'<h3>{escape(phase.name)}</h3><div class="charts">{charts}</div>' for phase, charts in drawn if charts]
    return "".join(parts)


def _charts(found: Mapping[str, Curve]) -> str:
    """Losses together, their parts together, success rates together, every other series that moves on its own. Time has its own section."""
    groups: dict[str, dict[str, Curve]] = {"success rate": {}, "success by task": {}, "loss": {}, "parts of the loss": {}}
    for name, curve in found.items():
        if name.startswith(TIMES):
            continue
        if name == "loss" or name.endswith("_loss"):
            groups["loss"][name] = curve
        elif name.startswith("loss_"):
            groups["parts of the loss"][name.removeprefix("loss_")] = curve
        elif name.endswith("success_rate") or name == "success":
            groups["success rate"][name] = curve
        elif name.startswith("first_picture_loss/"):
            groups.setdefault("loss of first pictures", {})[name.partition("/")[2].replace("_", " ")] = curve
        elif name.startswith("success/"):
            groups["success by task"][name.removeprefix("success/")] = curve
        elif len({value for _, value in curve}) > 1:
            groups[name.replace("_", " ")] = {name: curve}
    if len(groups["success by task"]) == 1:
        del groups["success by task"]  # the same curve again
    bounds: dict[str, tuple[float, float]] = {"success rate": (0.0, 1.0), "success by task": (0.0, 1.0)}
    return "".join(line_chart(title, series, bounds.get(title)) for title, series in groups.items() if series)


def time(phases: Sequence[Phase]) -> str:
    """Where the wall time of every phase went."""
    parts = []
    for phase in phases:
        shares = time_shares(phase.spans)
        total = sum(share.seconds for share in shares)
        for share in shares:
            if share.seconds >= BIG_SHARE * total:
                name = share.root if phase.name == "." else phase.name if len(shares) == 1 else f"{phase.name}: {share.root}"
                head = f'<h3>{escape(name)} <span class="quiet">{duration(share.seconds)}</span></h3>'
                parts.append(f'<div class="card">{head}{stacked_bar(share)}</div>')
    return "".join(parts)


def videos(phases: Sequence[Phase], root: Path) -> str:
    """Every video, policies first; embedded while they are small and few, else linked relative to `root`."""
    budget, parts = EMBED_TOTAL_BYTES, []
    for phase in sorted(reported_evaluations(phases), key=lambda phase: not phase.is_policy):
        figures = []
        for row in sorted(phase.rows, key=lambda row: row.place):
            path = phase.path / row.video
            if row.video and path.is_file():
                size = path.stat().st_size
                embedded = size <= min(EMBED_BYTES, budget)
                budget -= size if embedded else 0
                figures.append(_figure(row, _source(path, root, embedded)))
        if figures:
            parts.append(f'<h3>{escape(_heading(phase))}</h3><div class="videos">{"".join(figures)}</div>')
    return "".join(parts)


def _source(path: Path, root: Path, embedded: bool) -> str:
    if embedded:
        return f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return quote(str(path.relative_to(root)))


def _figure(row: EpisodeRow, source: str) -> str:
    return (
        f'<figure><video autoplay muted loop playsinline title="click to pause" onclick="{PAUSE}" src="{source}"></video>'
        f"<figcaption>{_flag(row)} "
        f"{escape(row.instruction.strip() or 'no instruction')}<br>"
        f'<span class="quiet">task {row.task}, {escape(row.init)}, {row.steps} steps</span></figcaption></figure>'
    )


def _flag(row: EpisodeRow) -> str:
    kind = "good" if row.success else "warn" if row.crashed else "bad"
    return f'<span class="flag {kind}">{escape(row.outcome)}</span>'


def failures(phases: Sequence[Phase]) -> str:
    """Failed and crashed episodes of policies, and crashes of everybody."""
    parts = []
    for phase in reported_evaluations(phases):
        rows = sorted(phase.rows, key=lambda row: row.place)
        failed = [row for row in rows if row.crashed or (not row.success and phase.is_policy)]
        if failed:
            parts.append(f"<details open><summary>{escape(_heading(phase))}: {len(failed)}</summary>{_failure_table(failed)}</details>")
    return "".join(parts)


def _failure_table(failed: Sequence[EpisodeRow]) -> str:
    titles = "".join(f"<th>{title}</th>" for title in ("task", "init", "seed", "steps", "outcome", "reason"))
    lines = "".join(_failure(row) for row in failed[:LISTED_EPISODES])
    rest = len(failed) - LISTED_EPISODES
    more = f'<p class="quiet">and {rest} more in episodes.jsonl</p>' if rest > 0 else ""
    return f'<div class="table"><table><tr>{titles}</tr>{lines}</table></div>{more}'


def _failure(row: EpisodeRow) -> str:
    cells = (str(row.task), escape(row.init), str(row.seed), str(row.steps), _flag(row), escape(_short(row.reason)))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _short(reason: str) -> str:
    """One line of a reason: the error at the end of a traceback, else the first line."""
    lines = reason.strip().splitlines() or [""]
    return lines[-1] if "Traceback" in lines[0] else lines[0]


def protocols(phases: Sequence[Phase]) -> str:
    """What was evaluated how, with every departure from the published protocol."""
    return "".join(_protocol(phase) for phase in reported_evaluations(phases))


def _protocol(phase: Phase) -> str:
    protocol, actor = phase.summary["protocol"], phase.summary["actor"]
    named = ("name", "hash", "deviations", "max_steps")
    fields = {name: value for name, value in protocol.items() if name not in named and value is not None}
    limits = {row.suite: protocol["max_steps"].get(row.suite) for row in phase.rows}
    fields["max_steps"] = {suite: limit for suite, limit in limits.items() if limit is not None}
    fields |= {f"actor: {name}": value for name, value in actor.items() if value not in (None, "", [])}
    lines = "".join(f"<li>{escape(line)}</li>" for line in protocol["deviations"])
    declared = f"<p>It departs from the published protocol in</p><ul>{lines}</ul>" if lines else "<p>As published.</p>"
    head = f'{escape(_heading(phase))}: {escape(protocol["name"])} <code class="quiet">{escape(protocol["hash"])}</code>'
    return f'<div class="card"><h3>{head}</h3>{declared}<details><summary>Every field</summary>{_definitions(fields)}</details></div>'


def environment(phases: Sequence[Phase]) -> str:
    """Machine and versions of the last phase, and the simulator of the main evaluation."""
    described = [phase.environment for phase in phases if phase.environment]
    if not described:
        return ""
    main, last = main_evaluation(phases), described[-1]
    commits = [start.get("commit", "unknown") for start in (last, *last.get("resumed", []))]
    blocks = {
        "Machine": last.get("machine", {}),
        "Packages": last.get("packages", {}) | {"commit of vla-rl": ", then ".join(dict.fromkeys(commits))},
        "Simulator": main.summary["env"] if main is not None else {},
    }
    cards = (f'<div class="card"><h3>{name}</h3>{_definitions(fields)}</div>' for name, fields in blocks.items() if fields)
    return f'<div class="blocks">{"".join(cards)}</div>'


def _definitions(fields: Mapping[str, object]) -> str:
    pairs = (f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_text(value))}</dd>" for name, value in fields.items())
    return f"<dl>{''.join(pairs)}</dl>"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return "not installed" if value is None else str(value)


def recipes(phases: Sequence[Phase]) -> str:
    """The resolved recipe of every phase."""
    return "".join(_recipe(phase) for phase in phases)


def _recipe(phase: Phase) -> str:
    name = "pipeline" if phase.name == "." and "phases" in phase.config else phase.name
    return f"<details><summary>{escape(name)}</summary><pre>{escape(yaml.safe_dump(dict(phase.config), sort_keys=False))}</pre></details>"
