"""The collect command: the same files whoever works and however often it is interrupted; plans and bad recipes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from vla_rl.cli import main
from vla_rl.collection import collect as collect_module
from vla_rl.collection.browser.server import PortTaken
from vla_rl.collection.collect import CollectConfig, collect, free_to_change, run_collect
from vla_rl.collection.operators import PageOperator, ReplayOperator, ScriptedOperatorConfig
from vla_rl.collection.plan import action_noise, plan_demonstrations
from vla_rl.config import ConfigError, build, to_plain
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.hdf5 import encode_episode, read_episode
from vla_rl.datasets.lerobot_store import LeRobotStore
from vla_rl.datasets.loader import DataConfig, open_datasets
from vla_rl.datasets.store import EpisodeStore, list_episodes
from vla_rl.episode import SPLITS, Episode
from vla_rl.policies.published import CheckpointError
from vla_rl.sim.base import Env
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import FolderInUseError, read_jsonl

Recipe = Callable[..., CollectConfig]


def files(config: CollectConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((Path(config.run_dir) / "episodes").glob("[!.]*"))}


def test_files_do_not_depend_on_who_worked(reach_recipe: Recipe) -> None:
    """One env, two in this process, two worker processes: byte for byte the same files."""
    pools = {"one": PoolConfig("serial", 1), "serial": PoolConfig("serial", 2), "process": PoolConfig("process", 2)}
    runs = {name: reach_recipe(name, pool=pool) for name, pool in pools.items()}
    summaries = {name: collect(config) for name, config in runs.items()}
    assert len(files(runs["one"])) == 6
    assert files(runs["one"]) == files(runs["serial"]) == files(runs["process"])
    assert summaries["process"].tasks == {"reach task 0": "3/3", "reach task 2": "3/3"} and summaries["process"].complete


def test_files_do_not_depend_on_what_was_in_memory_before(reach_recipe: Recipe) -> None:
    """Other episodes are compressed in between, and buffers lie elsewhere each time. With LZF, whose table is never cleared, one time in
    twenty the third episode comes out different."""
    config = reach_recipe(tasks=(0,), frame_every=1)
    collect(config)
    episodes = [load_episode(info) for info in list_episodes([config.run_dir])]
    size = episodes[0].frames()[0].images["image"].nbytes
    rng, heap = random.Random(0), list[bytearray]()
    contents = [set[bytes]() for _ in episodes]
    for _ in range(200):
        heap += [bytearray(rng.choice((rng.randrange(16, size), size // 2, size, size + rng.randrange(64)))) for _ in range(30)]
        rng.shuffle(heap)
        del heap[rng.randrange(200) :]
        number = rng.randrange(len(episodes))
        contents[number].add(encode_episode(episodes[number], 1))
    assert [len(different) for different in contents] == [1, 1, 1]


def test_rendering_afterwards_gives_the_same_files(reach_recipe: Recipe) -> None:
    live, afterwards = reach_recipe("live"), reach_recipe("afterwards", render="afterwards")
    collect(live)
    collect(afterwards)
    assert files(live) == files(afterwards)


def test_both_formats_resume_with_what_either_lacks(reach_recipe: Recipe) -> None:
    """An HDF5 file is deleted, and the newest LeRobot episode taken out: the next start brings both back, and the same."""
    config, whole = (reach_recipe(name, format="both", frame_every=1, pictures="h264") for name in ("run", "whole"))
    collect(whole)
    collect(config)
    run = Path(config.run_dir)
    store = LeRobotStore(run / "lerobot", "h264")
    with store.writing():
        last = max(list_episodes([run / "lerobot"]), key=lambda info: info.entry.episode_index)  # type: ignore[attr-defined]
        store.remove(last.entry.row["number"])  # type: ignore[attr-defined]
    (run / "episodes/episode_000000.hdf5").unlink()
    assert collect(config).recorded_now == 2
    assert files(config) == files(whole) and store.numbers() == list(range(6))
    hdf5, lerobot = list_episodes([run / "episodes"]), list_episodes([run / "lerobot"])
    for one, other in zip(hdf5, lerobot):
        assert one.spec == other.spec and (load_episode(one).actions_NA() == load_episode(other).actions_NA()).all()


def test_libero_files_hold_the_same_episodes(reach_recipe: Recipe) -> None:
    config = reach_recipe(libero_files=True)
    collect(config)
    merged = sorted((Path(config.run_dir) / "libero").iterdir())
    assert [file.name for file in merged] == ["reach_0_demo.hdf5", "reach_2_demo.hdf5"]
    single = read_episode(Path(config.run_dir) / "episodes" / "episode_000004.hdf5")
    together = read_episode(merged[1], "demo_1")
    assert single.spec == together.spec and (single.actions_NA() == together.actions_NA()).all()


def test_what_was_collected_trains(reach_recipe: Recipe) -> None:
    config = reach_recipe()
    summary = collect(config)
    dataset, _ = open_datasets(DataConfig((config.run_dir,), validation_fraction=0))
    assert dataset.actions_RA.shape == (summary.steps, 7)
    episodes = [read_episode(info.path) for info in dataset.infos]
    assert len(dataset) == sum(-(-episode.num_steps // 3) for episode in episodes), "a sample per picture: every third step"
    assert any((episode.actions_NA() != episode.labels_NA()).any() for episode in episodes), "noise is executed, labels stay clean"
    assert {episode.steps[0].observation.prompt for episode in episodes} == {"reach the red block", "reach the blue block"}


def test_resuming_records_only_what_is_missing(reach_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    config = reach_recipe()
    whole = reach_recipe("whole")
    collect(whole)
    recorded = 0

    def interrupt(self: object, number: int, episode: Episode, *rest: object) -> object:
        nonlocal recorded
        if recorded == 2:
            raise KeyboardInterrupt
        recorded += 1
        return original(self, number, episode, *rest)  # type: ignore[arg-type]

    original = collect_module.Recorder.record
    monkeypatch.setattr(collect_module.Recorder, "record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        collect(config)
    monkeypatch.setattr(collect_module.Recorder, "record", original)
    assert len(files(config)) == 2
    (Path(config.run_dir) / "episodes" / next(iter(files(config)))).unlink()  # a damaged file that the user deleted
    summary = collect(config)
    assert (summary.recorded_now, summary.finished) == (5, 6)
    assert files(config) == files(whole)
    assert sorted(row["number"] for row in read_jsonl(Path(config.run_dir) / "episodes.jsonl")) == list(range(6))
    assert collect(config).recorded_now == 0


def test_a_crashed_episode_makes_the_result_incomplete_and_is_tried_again(
    reach_recipe: Recipe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vla_rl.sim.reach import ReachEnv

    config = reach_recipe()
    reset = ReachEnv.reset

    def failing(self: ReachEnv, spec: object, look: object) -> object:
        if getattr(spec, "init", "") == "sampled:1":
            raise RuntimeError("the scene fell over")
        return reset(self, spec, look)  # type: ignore[arg-type]

    monkeypatch.setattr(ReachEnv, "reset", failing)
    assert run_collect(config) == 1
    assert "INCOMPLETE: 2 of 6 episodes crashed twice" in capsys.readouterr().out
    crashed = [row for row in read_jsonl(Path(config.run_dir) / "episodes.jsonl") if row["outcome"] == "crash"]
    assert len(crashed) == 2 and all("the scene fell over" in row["reason"] for row in crashed)
    monkeypatch.setattr(ReachEnv, "reset", reset)
    assert run_collect(config) == 0
    assert len(read_jsonl(Path(config.run_dir) / "episodes.jsonl")) == 6


def test_failures_are_dropped_and_counted(reach_recipe: Recipe) -> None:
    """Two steps are too few for the blocks that are far away."""
    dropped, kept = (
        reach_recipe("dropped", max_steps=4, episodes_per_task=8),
        reach_recipe("kept", max_steps=4, episodes_per_task=8, keep_failures=True),
    )
    first, second = collect(dropped), collect(kept)
    assert first.tasks == second.tasks and 0 < first.successes < 16
    assert (first.episodes, second.episodes) == (first.successes, 16)
    assert first.complete and len(files(dropped)) == first.successes


def heed_ctrl_c() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and children inherit that: as if a terminal had started this one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.faults
def test_ctrl_c_and_sigkill_lose_nothing_that_was_finished(reach_recipe: Recipe, tmp_path: Path) -> None:
    """The real command with worker processes, interrupted twice in different ways, ends with the files of an undisturbed run."""
    config = reach_recipe(episodes_per_task=12, pool=PoolConfig("process", 2), show_progress=True)
    undisturbed = reach_recipe("undisturbed", episodes_per_task=12)
    collect(undisturbed)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(to_plain(config)))
    command = [sys.executable, "-m", "vla_rl.cli", "collect", str(recipe)]
    for sign, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_ctrl_c)
        assert process.stderr is not None
        while "succeeded" not in process.stderr.readline():
            assert process.poll() is None, "it ended before it could be disturbed"
        # a terminal's Ctrl-C reaches every process of the group; the kernel's out-of-memory killer takes one
        os.killpg(process.pid, sign) if sign is signal.SIGINT else os.kill(process.pid, sign)
        rest = process.stderr.read()
        assert process.wait() == status, rest
        assert (status != 130) or "start the same command again" in rest
    assert 0 < len(files(config)) < 24
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert files(config) == files(undisturbed)


def test_a_plan_is_in_the_demonstration_range_and_depends_on_the_recipe_alone(reach_recipe: Recipe) -> None:
    config = reach_recipe(suite="libero_object", env=CollectConfig("x").env, tasks=(), episodes_per_task=4, first_seed=100)
    specs = plan_demonstrations(config)
    assert [spec.task for spec in specs] == [task for task in range(10) for _ in range(4)]
    assert {spec.init for spec in specs} == {f"sampled:{seed}" for seed in range(100, 104)}
    assert all(spec.init_number in SPLITS["demonstrations"] and spec.protocol.max_steps == 280 for spec in specs)
    assert specs == plan_demonstrations(config) and len({spec.key for spec in specs}) == 40
    noises = [action_noise(config, spec) for spec in specs]
    assert all(0.25 <= noise <= 0.4 for noise in noises) and len(set(noises)) == 40


def test_all_goals_show_one_scene_once_per_prompt(reach_recipe: Recipe) -> None:
    config = reach_recipe(suite="libero_object", env=CollectConfig("x").env, tasks=(0,), episodes_per_task=12, goals="all")
    specs = plan_demonstrations(config)
    assert Counter(spec.init for spec in specs) == {"sampled:0": 6, "sampled:1": 6}, "task 0 has six objects beside the basket"
    first_scene = {spec.prompt: spec.goal for spec in specs[:6]}
    assert (
        first_scene[""] == "" and first_scene["pick up the milk and place it in the basket"] == "(And (In milk_1 basket_1_contain_region))"
    )
    assert len({spec.key for spec in specs}) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suite": "libero_objekt"}, "did you mean 'libero_object'"),
        ({"tasks": [10]}, r"tasks has \[10\]; suite 'libero_object' has tasks 0 to 9"),
        ({"episodes_per_task": 0}, "episodes_per_task is 0, must be at least 1"),
        ({"first_seed": 999_999, "episodes_per_task": 2}, "leaves the seeds 0 to 999999"),
        ({"noise_std": [0.5, 0.2]}, r"noise_std is \[0.5, 0.2\], must be \[low, high\]"),
        ({"suite": "reach"}, "'reach' needs both"),
        ({"frame_evry": 3}, "frame_every"),
        ({"format": "both"}, "format is 'both' and frame_every 3; LeRobot has a picture in every row"),
        ({"format": "lerobot", "frame_every": 1, "libero_files": True}, "libero_files needs the HDF5 files"),
        ({"suite": "libero_10", "tasks": [2]}, "no scripted expert"),
        ({"operator": {"kind": "page", "views": ["imag"]}}, "operator: views has 'imag'; did you mean 'image'"),
        ({"operator": {"kind": "page", "bindings": ["forward=KeyE"]}}, "operator: bindings give KeyE to two commands"),
        ({"operator": {"kind": "page", "device": "lerobot"}}, "device 'lerobot' needs its type name"),
    ],
)
def test_bad_recipes_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    """Through the command line: status 2, the message on standard error, no directory left."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"run_dir": str(tmp_path / "run"), **changes}))
    assert main(["collect", str(recipe)]) == 2
    assert capsys.readouterr().err.count("\n") <= 3
    with pytest.raises((ConfigError, ValueError), match=message):
        plan_demonstrations(build(CollectConfig, json.loads(recipe.read_text()), where="recipe"))
    assert not (tmp_path / "run").exists()


def test_a_second_recorder_and_another_recipe_are_refused(reach_recipe: Recipe) -> None:
    config = reach_recipe()
    with EpisodeStore(Path(config.run_dir) / "episodes").writing(), pytest.raises(FolderInUseError, match="is being written to by"):
        collect(config)
    collect(config)
    with pytest.raises(ConfigError, match=r"holds a run of another recipe.*\n.*frame_every"):
        collect(reach_recipe(frame_every=2))


def test_a_run_goes_on_with_more_episodes_and_other_workers(reach_recipe: Recipe) -> None:
    """Fewer episodes than there are is another recipe, and so is more of several tasks, where every number would move."""
    first = collect(reach_recipe(tasks=(0,), episodes_per_task=2))
    more = collect(reach_recipe(tasks=(0,), episodes_per_task=3, pool=PoolConfig("serial", workers=1)))
    assert (first.planned, more.planned, more.finished, more.recorded_now) == (2, 3, 3, 1)
    with pytest.raises(ConfigError, match="episodes_per_task: 3 -> 1"):
        collect(reach_recipe(tasks=(0,), episodes_per_task=1))


def test_a_page_may_move_to_another_port(reach_recipe: Recipe) -> None:
    free = free_to_change(reach_recipe(operator=PageOperator("page")))
    assert {"operator.port", "operator.host", "operator.shaping", "pool"} <= set(free) and "operator.kind" not in free
    config = reach_recipe(operator=ReplayOperator("replay", "elsewhere"))
    assert "operator.dataset" not in free_to_change(config)


def test_a_missing_policy_is_found_before_anything_starts(reach_recipe: Recipe, tmp_path: Path) -> None:
    config = reach_recipe(checkpoint=str(tmp_path / "none"), operator=ScriptedOperatorConfig("scripted"))
    with pytest.raises(CheckpointError, match="none is not a folder; give a checkpoint's policy folder"):
        collect(config, make_env=_no_env)
    assert not Path(config.run_dir).exists()


def test_a_port_in_use_is_found_before_anything_starts(reach_recipe: Recipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"127.0.0.1:{port} \(Address already in use\); choose another with --operator.port"):
            collect(reach_recipe(operator=PageOperator("page", port=port)), make_env=_no_env)


def test_a_host_that_is_none_is_found_before_anything_starts(reach_recipe: Recipe) -> None:
    """192.0.2.1 is for documentation (RFC 5737), no machine's own."""
    with pytest.raises(PortTaken, match=r"192.0.2.1:0 \(Cannot assign requested address\); choose another with --operator.host"):
        collect(reach_recipe(operator=PageOperator("page", host="192.0.2.1", port=0)), make_env=_no_env)


def _no_env(*_: object) -> Env:
    raise AssertionError("no simulator may start")
