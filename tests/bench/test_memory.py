"""The memory benchmark: what it plans, its levels, and that it sees a child's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vla_rl.bench import memory


def test_blocks_of_tasks_go_round_with_a_new_scene_each() -> None:
    specs = memory.planned("libero_object", [3, 5], 2, 7)
    assert [spec.task for spec in specs] == [3, 3, 5, 5, 3, 3, 5]
    assert len({spec.init for spec in specs}) == 7
    assert {spec.split for spec in specs} == {"train"}


def test_levels_are_medians_of_ten() -> None:
    assert memory.levels([*range(10), *[7.0] * 9, 100.0]) == [4.5, 7.0]


def test_memory_of_children_counts() -> None:
    before = memory.pss_mib()
    code = "held = bytearray(b'x') * 2**26; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        grown = memory.pss_mib() - before
        child.communicate(b"\n")
    assert 64 <= grown < 128, "64 MiB of its own, and an interpreter"


def test_too_few_episodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        memory.main(["--episodes", "150"])
    assert "must be a multiple of 100 and at least 200, got 150" in capsys.readouterr().err
