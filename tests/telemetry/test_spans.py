"""Spans nest, and the leaves explain the root's time."""

import threading
import time
from pathlib import Path

import pytest

from vla_rl.telemetry.files import read_jsonl
from vla_rl.telemetry.spans import SpanTotals, add_span, close_span_log, leaf_shares, open_span_log, span


@pytest.fixture(autouse=True)
def closed_log():
    yield
    close_span_log()


def test_nesting_depth_and_leaves_are_recorded(tmp_path: Path) -> None:
    log = open_span_log(tmp_path / "spans.jsonl")
    with span("step"):
        with span("rollout"), span("render"):
            pass
        add_span("physics", 0.5)
    rows = {row["name"]: row for row in log.rows}
    assert [(name, rows[name]["depth"], rows[name]["leaf"]) for name in ("step", "rollout", "render", "physics")] == [
        ("step", 0, False),
        ("rollout", 1, False),
        ("render", 2, True),
        ("physics", 1, True),
    ]
    assert rows["physics"]["s"] == 0.5
    assert read_jsonl(tmp_path / "spans.jsonl") == log.rows


def test_nothing_is_written_inside_a_step(tmp_path: Path) -> None:
    """Writing takes time that no span would explain."""
    file = tmp_path / "spans.jsonl"
    open_span_log(file)
    with span("earlier"):
        pass
    with span("step"):
        with span("render"):
            pass
        assert [row["name"] for row in read_jsonl(file)] == ["earlier"]
    assert [row["name"] for row in read_jsonl(file)] == ["earlier", "render", "step"]


def test_a_log_that_is_replaced_or_closed_leaves_nothing_unwritten(tmp_path: Path) -> None:
    log = open_span_log(tmp_path / "spans.jsonl")
    log._written_s = time.monotonic() + 1000.0
    thread = threading.Thread(target=lambda: add_span("policy_forward", 0.1))
    thread.start()
    thread.join()
    assert read_jsonl(tmp_path / "spans.jsonl") == []
    close_span_log()
    assert [row["name"] for row in read_jsonl(tmp_path / "spans.jsonl")] == ["policy_forward"]


def test_a_span_is_recorded_when_its_block_raises() -> None:
    log = open_span_log(None)
    with pytest.raises(KeyError), span("step"):
        raise KeyError
    assert [row["name"] for row in log.rows] == ["step"]


def test_shares_by_hand() -> None:
    def row(name: str, start: float, seconds: float, leaf: bool, thread: str = "main") -> dict:
        return {"name": name, "start": start, "s": seconds, "leaf": leaf, "thread": thread, "pid": 1}

    rows = [
        row("step", 0, 10, False),
        row("step", 20, 10, False),
        row("render", 1, 4, True),
        row("render", 21, 8, True),
        row("optimizer", 6, 3, True),
        row("elsewhere", 12, 5, True),
        row("other thread", 2, 5, True, thread="policy"),
    ]
    shares = leaf_shares(rows, "step")
    assert shares == pytest.approx({"render": 0.6, "optimizer": 0.15, "unaccounted": 0.25})
    assert list(shares) == ["render", "optimizer", "unaccounted"]


def test_no_log_costs_nothing_and_records_nothing() -> None:
    with span("step"):
        add_span("x", 1.0)
    assert leaf_shares([], "step") == {}


def test_totals_become_one_leaf_per_name_and_start_anew() -> None:
    log = open_span_log(None)
    totals = SpanTotals()
    with span("loop"):
        for _ in range(3):
            with totals.timed("actor"):
                pass
            with totals.timed("pool"):
                pass
        totals.flush()
        totals.flush()
    assert [(row["name"], row["leaf"], row["depth"]) for row in log.rows] == [("actor", True, 1), ("pool", True, 1), ("loop", False, 0)]
    assert sum(row["s"] for row in log.rows[:2]) <= log.rows[2]["s"]
