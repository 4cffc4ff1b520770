"""Lines of a log: which, how many, and what they count."""

import pytest

from vla_rl.telemetry.progress import LOG_LINES, CountProgress, EpisodeProgress


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_log_gets_about_twenty_lines_and_always_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    with CountProgress("sft", "updates", 1005, 0, show=True) as progress:
        for done in range(1, 1006):
            progress.advance(done, "loss 0.5")
    lines = lines_of(capsys)
    assert len(lines) == LOG_LINES + 1
    assert lines[0].startswith("sft: 50 of 1005 updates, loss 0.5, about ")
    assert lines[-1] == "sft: 1005 of 1005 updates, loss 0.5, about 0 s left"


def test_episodes_of_earlier_starts_are_done_but_not_successes_of_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    with EpisodeProgress("eval", 5, 2, show=True) as progress:
        progress.ended(success=True, crashed=False)
        progress.ended(success=False, crashed=True)
        progress.ended(success=False, crashed=False)
    assert [line.rpartition(", about")[0] for line in lines_of(capsys)] == [
        "eval: 3 of 5 episodes, 1/1 succeeded",
        "eval: 3 of 5 episodes, 1/1 succeeded, 1 crashed",
        "eval: 4 of 5 episodes, 1/2 succeeded, 1 crashed",
    ]


def test_nothing_is_shown_where_nobody_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with EpisodeProgress("eval", 1, 0, show=False) as progress:
        progress.ended(success=True, crashed=False)
    assert lines_of(capsys) == []
