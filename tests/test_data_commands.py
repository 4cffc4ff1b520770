"""`vla-rl data` and `vla-rl replay` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from vla_rl.cli import main
from vla_rl.collection.collect import collect
from vla_rl.collection.config import CollectConfig
from vla_rl.datasets.store import list_episodes
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three demonstrations of Reach with a picture before every third step, HDF5."""
    folder = tmp_path_factory.mktemp("reach") / "run"
    env, pool = EnvConfig(kind="reach", resolution=32), PoolConfig("serial", 1)
    collect(CollectConfig(str(folder), "reach", (0,), episodes_per_task=3, env=env, pool=pool, show_progress=False))
    return folder


def test_own_recordings_replay_with_error_0_and_the_same_outcome(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--csv", str(tmp_path / "errors.csv")]) == 0
    assert "3 of 3 episodes replay exactly: state error 0 at every step, same outcome" in capsys.readouterr().out
    rows = (tmp_path / "errors.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(info.num_steps for info in list_episodes([run]))
    assert all(row.endswith(",0.0") for row in rows[1:])


def test_a_changed_action_shows_from_the_next_step_on(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = tmp_path / "spoilt.hdf5"
    spoilt.write_bytes(next((run / "episodes").glob("*.hdf5")).read_bytes())
    with h5py.File(spoilt, "a") as file:
        file["data/demo_0/actions"][2, 0] *= -1
    assert main(["replay", str(spoilt)]) == 1
    out = capsys.readouterr().out
    assert "begins at control step 3" in out and "0 of 1 episodes replay exactly" in out


def test_what_an_operator_said_need_not_be_what_the_simulator_says(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A person's verdict ends a take where no predicate holds: its replay is exact all the same. The simulator's own must come again."""
    judged = tmp_path / "judged.hdf5"
    judged.write_bytes(next((run / "episodes").glob("*.hdf5")).read_bytes())
    for reason, status in (("operator", 0), ("time limit", 1)):
        with h5py.File(judged, "a") as file:
            file["data/demo_0"].attrs.update({"outcome": "failure", "reason": reason})
        assert main(["replay", str(judged)]) == status
    out = capsys.readouterr().out
    assert "success (the operator said: failure)" in out and "success (recorded: failure)" in out


def test_sparse_recordings_are_filled_and_then_converted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "convert", str(run), "--to", "lerobot", "--into", str(tmp_path / "no")]) == 2
    assert main(["replay", str(run), "--fill-into", str(tmp_path / "dense")]) == 0
    assert main(["data", "convert", str(tmp_path / "dense"), "--to", "lerobot", "--into", str(tmp_path / "lerobot")]) == 0
    assert main(["data", "check", str(tmp_path / "lerobot")]) == 0
    assert main(["replay", str(tmp_path / "lerobot"), "--episodes", "1"]) == 0
    assert "1 of 1 episodes replay exactly" in capsys.readouterr().out


def test_inspect_prints_and_writes_a_page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(run), "--page", str(tmp_path / "page.html")]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    steps = sum(info.num_steps for info in list_episodes([run]))
    assert f"3 episodes (3 success), {steps} control steps" in out and "reach:0" in out and "before every 3. step" in out
    pictures = sum(2 * min(3, info.num_frames) for info in list_episodes([run]))
    assert page.count("<article") == 3 and page.count("data:image/png;base64,") == pictures and page.count("<svg") == 8
    assert "http" not in page, "self-contained"


def test_stats_are_printed_and_written_where_they_belong(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stats", str(run)]) == 0
    stats = json.loads(capsys.readouterr().out)
    with_all = np.concatenate([_actions(path) for path in sorted((run / "episodes").glob("*.hdf5"))])
    assert stats["action"]["q99"] == np.quantile(with_all, 0.99, axis=0).tolist() and stats["action"]["count"] == [len(with_all)]
    assert main(["data", "stats", str(run), "--write"]) == 2
    assert "--write needs one LeRobot folder" in capsys.readouterr().err


def _actions(path: Path) -> np.ndarray:
    with h5py.File(path) as file:
        return file["data/demo_0/actions"][()].astype(np.float32).astype(np.float64)


def test_filter_and_merge_write_new_datasets(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "filter", str(run), "--into", str(tmp_path / "two"), "--without-numbers", "1"]) == 0
    assert "2 episodes" in (out := capsys.readouterr().out) and "left out: 1 episodes" in out
    assert main(["data", "merge", str(tmp_path / "two"), "--into", str(tmp_path / "merged")]) == 0
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["reach_0_demo.hdf5"]
    assert main(["replay", str(tmp_path / "merged")]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data"], "data needs an action, not ''"),
        (["data", "chekc", "x"], "did you mean 'check'"),
        (["data", "check", "nowhere"], "nowhere: does not exist"),
        (["data", "filter", "x", "--into", "y"], "nothing to filter"),
        (["data", "convert", "x", "--to", "lerobot", "--into", "y", "--suite", "libero_object"], "a published file is one dataset with"),
    ],
)
def test_bad_commands_say_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_episode_that_does_not_exist_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--episodes", "3"]) == 2
    assert "--episodes has 3; the dataset has episodes 0 to 2" in capsys.readouterr().err
