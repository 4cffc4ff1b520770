"""`vla-rl report RUN`: one self-contained HTML page about a training, an evaluation or a whole pipeline.

The page loads nothing from anywhere: style, curves and small videos are inside; only videos that are too large for
that are linked relative to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from vla_rl.eval import report_rl
from vla_rl.eval import report_sections as sections
from vla_rl.eval.compare import CompareError, compare_rows
from vla_rl.eval.report_data import Phase, controls_of, curves, main_evaluation, read_phases
from vla_rl.eval.results import SuiteResult
from vla_rl.telemetry.files import read_jsonl, write_text

STYLE = Path(__file__).with_name("report.css")


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Works for one phase and for a directory that holds several (`demo/collect`, `demo/sft`, `demo/eval`, ...).
    Raises ReportError for a directory without a run.
    """
    run_dir = Path(run_dir)
    phases = read_phases(run_dir)
    path = run_dir / "report.html"
    write_text(path, page(run_dir.resolve().name, phases, run_dir))
    return path


def page(title: str, phases: Sequence[Phase], root: Path) -> str:
    """The HTML text of a report; videos are read from and linked relative to `root`."""
    bodies = {
        "Success": sections.success(phases) + report_rl.before_after(phases),
        "Videos": sections.videos(phases, root),
        "Demonstrations": sections.demonstrations(phases),
        "Training": sections.training(phases),
        "Time": sections.time(phases) + report_rl.gantt(phases),
        "Failures": sections.failures(phases),
        "Protocol": sections.protocols(phases),
        "Environment": sections.environment(phases),
        "Recipes": sections.recipes(phases),
    }
    filled = {name: body for name, body in bodies.items() if body}
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in filled)
    content = "".join(f'<section id="{name.lower()}"><h2>{name}</h2>{body}</section>' for name, body in filled.items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} · vla-rl report</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE.read_text()}</style></head><body><main>'
        f"{_header(title, phases)}<nav>{links}</nav>{content}{_footer()}</main></body></html>\n"
    )


def _header(title: str, phases: Sequence[Phase]) -> str:
    names = " → ".join(phase.name for phase in phases if phase.name != "." and "/" not in phase.name)
    about = f'<span class="quiet">{escape(names)}</span>' if names else ""
    name = f'<h1>{escape(title)} <span class="quiet">vla-rl report</span></h1>'
    return f'<header><div class="line1">{name}{about}</div>{_verdict(phases)}{_unfinished(phases)}</header>'


def _unfinished(phases: Sequence[Phase]) -> str:
    """A line for each evaluation that was stopped, or still runs, before it had a result."""
    lines = []
    for phase in (phase for phase in phases if phase.is_unfinished):
        recorded = len(read_jsonl(phase.path / "episodes.jsonl"))
        name = "evaluation" if phase.name == "." else phase.name
        text = f"{name}: {recorded} episodes are recorded and there is no result yet; start it again to go on"
        lines.append(f'<p><span class="flag bad">{escape(text)}</span></p>')
    return "".join(lines)


def _verdict(phases: Sequence[Phase]) -> str:
    """The number that matters most, and what it is worth."""
    main = main_evaluation(phases)
    if main is None:
        return _training_verdict(phases)
    result = main.results[0]
    rate, (low, high) = result.pooled, (100 * end for end in result.pooled.interval)
    who = main.summary["actor"]["checkpoint"] or f"the {main.summary['actor']['kind']} actor"
    lead = f"<b>{rate.successes} of {rate.trials}</b> episodes of {escape(_suite_name(result))} succeeded with <code>{escape(who)}</code>."
    lines = [
        _coverage(main),
        f'<p class="lead">{lead}</p>',
        f"<p>95 % interval {low:.1f} – {high:.1f} % (Wilson).{_bootstrap(result)}</p>",
        *(_against_control(main, control) for control in controls_of(phases, main)),
    ]
    return f'<div class="verdict"><div class="big">{100 * rate.value:.3g}<small>%</small></div><div>{"".join(lines)}</div></div>'


def _training_verdict(phases: Sequence[Phase]) -> str:
    """How the last training ended, where nothing was evaluated: the success of RL's rollouts, or the last loss."""
    for phase in reversed(phases):
        found = curves(phase.metrics)
        if "success" in found:
            step, rate = found["success"][-1]
            text = f"of the rollouts of step {step:,.0f} succeeded, on training scenes. Nothing was evaluated in simulation yet."
            return f'<div class="verdict"><div class="big">{100 * rate:.3g}<small>%</small></div><p class="lead">{text}</p></div>'
        for name in ("validation_loss", "loss"):
            if name in found:
                step, value = found[name][-1]
                text = f"is the {name.replace('_', ' ')} after {step:,.0f} updates. No evaluation in simulation has a result yet."
                return f'<div class="verdict"><div class="big">{value:.3g}</div><p class="lead">{escape(text)}</p></div>'
    return '<div class="verdict"><p class="lead">No training or evaluation here has a result yet.</p></div>'


def _coverage(phase: Phase) -> str:
    """Whether every planned episode has an outcome."""
    summary = phase.summary
    if not summary["complete"]:
        text = f"incomplete: {len(summary['missing'])} of {summary['planned']} episodes have no outcome"
        return f'<p><span class="flag bad">{text}</span></p>'
    crashes = f' <span class="flag warn">{summary["crashes"]} crashes, run again</span>' if summary["crashes"] else ""
    return f'<p><span class="flag good">complete: every episode ran exactly once</span>{crashes}</p>'


def _suite_name(result: SuiteResult) -> str:
    tasks = list(result.tasks)
    return f"{result.suite}, task {tasks[0]}" if len(tasks) == 1 else f"{result.suite}, {len(tasks)} tasks"


def _bootstrap(result: SuiteResult) -> str:
    if result.bootstrap is None:
        return ""
    low, high = (100 * end for end in result.bootstrap)
    return f" Over tasks of this kind the mean lies in {low:.1f} – {high:.1f} % (task-clustered bootstrap)."


def _against_control(main: Phase, control: Phase) -> str:
    """One sentence that holds the result against a control, paired where they share episodes."""
    rate = control.results[0].pooled
    text = f"The {escape(control.summary['actor']['kind'])} control: <b>{rate.successes}/{rate.trials}</b>."
    try:
        paired = compare_rows({row.key: row for row in control.finished}, {row.key: row for row in main.finished})
    except CompareError:
        return f"<p>{text} It ran on other episodes, so they cannot be paired.</p>"
    return (
        f"<p>{text} Over {paired.first.trials} shared episodes {100 * paired.difference:+.0f} points, "
        f"{len(paired.wins)} wins and {len(paired.losses)} losses, exact McNemar p = {paired.p_value:.2g}.</p>"
    )


def _footer() -> str:
    now = datetime.now(UTC).isoformat(timespec="minutes")
    return f"<footer>Written by vla-rl, {now}. Every rate is recomputed from episodes.jsonl.</footer>"
