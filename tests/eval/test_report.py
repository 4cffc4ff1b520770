"""The report: self-contained, recomputed from rows, for a training, an evaluation or a whole pipeline."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from vla_rl.conventions import Orientation
from vla_rl.episode import Outcome
from vla_rl.eval import report_sections
from vla_rl.eval.protocol import effective_protocol, get_protocol
from vla_rl.eval.report import write_report
from vla_rl.eval.report_charts import duration, line_chart, nice_ticks, short, thinned
from vla_rl.eval.report_data import ReportError, curves, main_evaluation, read_phases, time_shares
from vla_rl.eval.results import row_of
from vla_rl.eval.video import video_frames, write_video
from vla_rl.telemetry.files import append_jsonl, write_json


def write_evaluation(fakes: Any, folder: Path, letters: str, kind: str, split: str = "test", films: int = 0) -> None:
    """A finished evaluation whose k-th episode succeeds where the k-th letter is `s`."""
    protocol, deviations = effective_protocol(
        get_protocol("openvla-oft"), resolution=128, orientation=Orientation.ROTATED_180, executed_horizon=None
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"actor": kind, "suite": "libero_object"}))
    for k, letter in enumerate(letters):
        episode = fakes.episode(fakes.spec(k // 2, k % 2), {"s": Outcome.SUCCESS, "f": Outcome.FAILURE, "c": Outcome.CRASH}[letter])
        video = f"videos/{k}.mp4" if k < films else ""
        if video:
            write_video(folder / video, video_frames(episode, Orientation.ROTATED_180), 10)
        append_jsonl(folder / "episodes.jsonl", asdict(row_of(episode, kind, video=video)))
    summary: Mapping[str, Any] = {
        "complete": "c" not in letters,
        "planned": len(letters),
        "missing": ["x"] * letters.count("c"),
        "crashes": letters.count("c"),
        "protocol": protocol.to_dict() | {"deviations": deviations, "split": split},
        "env": {"mujoco": "3.3.2"},
        "actor": {"kind": kind, "checkpoint": "runs/<x>/policy" if kind == "policy" else None},
    }
    write_json(folder / "summary.json", summary)


def write_training(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("updates: 40\n")
    for update in range(1, 41):
        append_jsonl(folder / "metrics.jsonl", {"update": update, "loss": 1 / update, "learning_rate": 1e-3, "version": update})
    append_jsonl(folder / "metrics.jsonl", {"update": 20, "validation_loss": 0.5})
    append_jsonl(folder / "metrics.jsonl", {"update": 40, "validation_loss": 0.25})
    lane = {"thread": "MainThread", "pid": 1, "role": "train"}
    append_jsonl(folder / "spans.jsonl", {"name": "forward", "start": 10.0, "s": 0.75, "depth": 1, "leaf": True, **lane})
    append_jsonl(folder / "spans.jsonl", {"name": "update", "start": 10.0, "s": 1.0, "depth": 0, "leaf": False, **lane})


@pytest.fixture
def demo(fakes: Any, tmp_path: Path) -> Path:
    """What a pipeline leaves: training with a periodic evaluation, the evaluation, a control."""
    write_training(tmp_path / "demo" / "sft")
    write_evaluation(fakes, tmp_path / "demo" / "sft" / "evaluations" / "step_20", "s" * 12, "policy", split="validation")
    write_evaluation(fakes, tmp_path / "demo" / "eval", "ssssfsssss", "policy", films=2)
    write_evaluation(fakes, tmp_path / "demo" / "eval_noop", "f" * 10, "noop")
    return tmp_path / "demo"


def text_of(page: str) -> str:
    """What a reader sees, with single spaces."""
    words: list[str] = []

    class Reader(HTMLParser):
        hidden = False

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.hidden = tag == "style"

        def handle_endtag(self, tag: str) -> None:
            self.hidden = False

        def handle_data(self, data: str) -> None:
            if not self.hidden:
                words.append(data)

    Reader().feed(page)
    return re.sub(r"\s+", " ", " ".join(words))


def test_the_verdict_is_the_tested_policy_beside_its_control(demo: Path) -> None:
    text = text_of(write_report(demo).read_text())
    assert "90 %" in text and "9 of 10 episodes of libero_object, 2 tasks succeeded" in text
    assert "59.6 – 98.2 % (Wilson)" in text, "Wilson interval of 9/10"
    assert "The noop control: 0/10 . Over 10 shared episodes +90 points, 9 wins and 0 losses, exact McNemar p = 0.0039" in text
    assert "complete: every episode ran exactly once" in text
    assert "forward 75.0 %" in text and "unaccounted 25.0 %" in text
    assert "resolution: 128 in place of 256" in text
    assert "policy (eval): 1" in text, "one failure is listed"


def test_the_page_needs_nothing_from_outside(demo: Path) -> None:
    page = write_report(demo).read_text()
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page), "videos are embedded, links stay inside"
    assert "<script" not in page and "@import" not in page and "url(" not in page
    assert page.count("data:video/mp4;base64,") == 2


def test_videos_that_are_too_large_are_linked_relative_to_the_page(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_sections, "EMBED_BYTES", 10)
    page = write_report(demo).read_text()
    sources = re.findall(r'src="([^"]+)"', page)
    assert sources == ["eval/videos/0.mp4", "eval/videos/1.mp4"]
    assert all((demo / source).is_file() for source in sources)


def test_names_from_files_are_escaped(demo: Path) -> None:
    page = write_report(demo).read_text()
    assert "runs/&lt;x&gt;/policy" in page and "runs/<x>/policy" not in page


def test_validation_runs_are_not_the_result(demo: Path) -> None:
    main = main_evaluation(read_phases(demo))
    assert main is not None and main.name == "eval", "the larger evaluation on validation seeds is not reported as a test"


def test_a_training_alone_and_an_evaluation_alone(demo: Path) -> None:
    trained = text_of(write_report(demo / "eval_noop").read_text())
    assert "0 of 10 episodes of libero_object, 2 tasks succeeded with the noop actor" in trained
    write_training(demo.parent / "only_training")
    page = write_report(demo.parent / "only_training").read_text()
    assert "0.25 is the validation loss after 40 updates. No evaluation in simulation has a result yet." in text_of(page)
    assert page.count("<polyline") == 2, "loss and validation loss; constants and counters are no curves"


def test_a_training_of_one_step_has_its_numbers(tmp_path: Path) -> None:
    """And one that was evaluated once: the page said that nothing was trained, and left out what there is once."""
    write_json(tmp_path / "environment.json", {})
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    append_jsonl(tmp_path / "metrics.jsonl", {"update": 1, "success": 0.25, "success/reach_0": 0.5, "success/reach_1": 0.0, "loss": -0.01})
    append_jsonl(tmp_path / "metrics.jsonl", {"update": 1, "validation_success_rate": 0.75, "step_s": 2.0})
    page = write_report(tmp_path).read_text()
    text = text_of(page)
    assert "25 % of the rollouts of step 1 succeeded" in text and "Nothing was trained" not in text
    assert "validation success rate 0.75" in text and page.count("<polyline") == 5, "two rates, two tasks, one loss"


def test_an_incomplete_evaluation_says_so(fakes: Any, tmp_path: Path) -> None:
    write_evaluation(fakes, tmp_path / "run", "ssc", "policy")
    text = text_of(write_report(tmp_path / "run").read_text())
    assert "incomplete: 1 of 3 episodes have no outcome" in text
    assert "2 of 2 episodes" in text and "crash" in text


def test_an_evaluation_that_was_stopped_is_named(fakes: Any, demo: Path) -> None:
    """It has rows and no summary; as does one of whose episodes all crashed, no rate."""
    (demo / "eval" / "config.yaml").write_text("protocol: openvla-oft\n")
    (demo / "eval" / "summary.json").unlink()
    write_evaluation(fakes, demo / "crashed", "cc", "policy")
    (demo / "crashed" / "config.yaml").write_text("protocol: openvla-oft\n")
    text = text_of(write_report(demo).read_text())
    assert "eval: 10 episodes are recorded and there is no result yet; start it again to go on" in text
    assert "crashed: 2 episodes are recorded and there is no result yet; start it again to go on" in text


def test_phases_stand_in_the_order_in_which_they_began(demo: Path) -> None:
    """Also after a recipe was written again, as `collect` and `rl` do whenever they start."""
    write_training(demo / "a_later_one")
    for number, name in enumerate(("sft", "a_later_one")):
        append_jsonl(demo / name / "spans.jsonl", {"name": "data", "start": number, "s": 0.5, "depth": 0, "leaf": True, "pid": 1})
    (demo / "config.yaml").write_text("phases: []\n")
    for name, mtime in (("sft", 3e9), ("a_later_one", 2e9), (".", 4e9)):
        os.utime(demo / name / "config.yaml", (mtime, mtime))
    assert [phase.name for phase in read_phases(demo)][:3] == [".", "sft", "a_later_one"]


def test_a_crash_is_listed_with_its_error_and_not_its_traceback() -> None:
    raised = "raised: Traceback (most recent call last):\n  File x\nGLError: no context left"
    assert report_sections._short(raised) == "GLError: no context left"
    assert report_sections._short("hung: no answer within 180 s\nThread 0x1\nExtension modules") == "hung: no answer within 180 s"
    assert report_sections._short("") == ""


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is not a directory"):
        write_report(tmp_path / "nothing")
    with pytest.raises(ReportError, match=r"holds no run \(no config.yaml"):
        write_report(tmp_path)


def test_curves_are_numbers_over_updates() -> None:
    rows = [{"update": 5, "loss": 1, "name": "x", "ok": True, "bad": float("nan")}, {"update": 9, "loss": 0.5, "bad": float("inf")}]
    assert curves(rows) == {"loss": [(5, 1), (9, 0.5)]}
    assert curves(rows[:1]) == {"loss": [(5, 1)]}


def test_time_is_shared_among_leaves_of_the_longest_root_first() -> None:
    lane = {"thread": "MainThread", "pid": 1}
    spans = [
        {"name": "a", "start": 0, "s": 1.0, "depth": 1, "leaf": True, **lane},
        {"name": "small", "start": 0, "s": 2.0, "depth": 0, "leaf": False, **lane},
        {"name": "b", "start": 5, "s": 3.0, "depth": 1, "leaf": True, **lane},
        {"name": "big", "start": 5, "s": 4.0, "depth": 0, "leaf": False, **lane},
    ]
    big, small = time_shares(spans)
    assert (big.root, big.seconds, dict(big.shares)) == ("big", 4.0, {"b": 0.75, "unaccounted": 0.25})
    assert dict(small.shares) == {"a": 0.5, "unaccounted": 0.5}


def test_long_curves_are_drawn_as_means_of_equal_stretches() -> None:
    curve = [(float(x), float(x % 2)) for x in range(3000)]
    drawn = thinned(curve)
    assert len(drawn) == 300
    assert drawn[0] == (4.5, 0.5) and drawn[-1] == (2994.5, 0.5)
    assert thinned(curve[:10]) == curve[:10]


def test_axes_have_round_numbers() -> None:
    assert nice_ticks(0, 1) == [0, pytest.approx(0.2), pytest.approx(0.4), pytest.approx(0.6), pytest.approx(0.8), 1]
    assert nice_ticks(-3, 7) == [-2, 0, 2, 4, 6]
    assert nice_ticks(5, 5) == [5]
    assert [short(value) for value in (3e-05, 0.02, 15, 1500, 2_500_000)] == ["3e-05", "0.02", "15", "1.5k", "2.5M"]
    assert [duration(s) for s in (0.04, 12, 75, 3700)] == ["0.0 s", "12 s", "1 min 15 s", "1 h 01 min"]


def test_a_flat_curve_and_a_curve_over_decades_can_be_drawn() -> None:
    assert "logarithmic" not in line_chart("flat", {"flat": [(0, 2.0), (1, 2.0)]})
    chart = line_chart("loss", {"loss": [(0, 1000.0), (1, 0.01)]})
    assert "logarithmic" in chart and ">0.01<" in chart and ">1k<" in chart


def test_rows_are_what_counts_not_the_summary(demo: Path) -> None:
    """A summary that was edited changes nothing: rates come from rows."""
    summary = json.loads((demo / "eval" / "summary.json").read_text())
    write_json(demo / "eval" / "summary.json", summary | {"results": [{"successes": 10, "trials": 10}]})
    assert "9 of 10 episodes" in text_of(write_report(demo).read_text())
