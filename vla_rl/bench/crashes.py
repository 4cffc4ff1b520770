"""`vla-rl bench crashes`: SIGKILL at random moments of a collection that writes both formats.

Each round starts `collect` of one Reach recipe anew (HDF5 and LeRobot), kills it at a random moment, and reads
what is there: every episode that `episodes.jsonl` counts must be whole in both formats, and at most the one being written may be more.
At the end the files must be those of a run that nobody killed, and LeRobot's own class must load all of them.

`ratio` is the share of kills after which all of that held; the bar is 1.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vla_rl.bench.common import benchmark_parser, finish
from vla_rl.collection.collect import collect
from vla_rl.collection.config import CollectConfig
from vla_rl.datasets.episode_rows import EpisodeInfo
from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.samples import EpisodeDataset
from vla_rl.datasets.store import list_episodes
from vla_rl.sim.base import EnvConfig
from vla_rl.sim.pool import PoolConfig
from vla_rl.telemetry.files import read_jsonl

EPISODES = 2000
"""Of the recipe: more than all rounds together record."""
WITHIN_S = 0.4
"""A kill comes at most so long after the collection began to write."""


def main(arguments: Sequence[str]) -> int:
    """Kill, look, finish, compare; 0 if nothing that was finished was ever lost."""
    parser = benchmark_parser("crashes", __doc__)
    parser.add_argument("--kills", type=int, default=50, help="rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        rounds = [kill_once(run, moments.uniform(0, WITHIN_S)) for _ in range(options.kills)]
        recorded = len(read_jsonl(run / "episodes.jsonl"))
        rounds.append(problems_of(run, newest=recorded))
        same = same_as_undisturbed(run, Path(folder) / "undisturbed", recorded)
        lerobot = episodes_that_lerobot_loads(run / "lerobot", Path(folder) / "cache")
    loads_all = lerobot in (recorded, recorded + 1)  # the last kill may have come between an episode and its row
    good = sum(not problems for problems in rounds)
    row = {
        "case": "Reach, HDF5 and LeRobot (h264) together",
        "kills": options.kills,
        "episodes_recorded": recorded,
        "rounds_with_a_loss": len(rounds) - good,
        "problems": [problem for problems in rounds for problem in problems][:10],
        "identical_to_undisturbed": same,
        "episodes_that_lerobot_loads": lerobot,
    }
    print(row, flush=True)
    return finish("crashes", good / len(rounds) if same and loads_all else 0.0, 1.0, None, [row], options)


def recipe(folder: Path, episodes: int) -> CollectConfig:
    """Reach demonstrations in both formats."""
    return CollectConfig(
        run_dir=str(folder),
        suite="reach",
        tasks=(0,),
        episodes_per_task=episodes,
        frame_every=1,
        format="both",
        pictures="h264",
        env=EnvConfig(kind="reach", resolution=64),
        pool=PoolConfig("serial", 1),
        show_progress=False,
    )


def _collect_quietly(folder: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    collect(recipe(folder, EPISODES))


def kill_once(folder: Path, after_s: float) -> list[str]:
    """Collect, kill `after_s` after the first new row, and say what is wrong with what is there."""
    log = folder / "episodes.jsonl"
    before = log.stat().st_size if log.exists() else 0
    child = multiprocessing.get_context("fork").Process(target=_collect_quietly, args=(folder,))
    child.start()
    while child.is_alive() and (log.stat().st_size if log.exists() else 0) == before:
        time.sleep(0.001)
    time.sleep(after_s)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    return problems_of(folder, newest=6)


def problems_of(folder: Path, newest: int) -> list[str]:
    """What does not hold of a run directory whose writer was killed; the `newest` episodes are read whole."""
    counted = {row["number"] for row in read_jsonl(folder / "episodes.jsonl") if row["kept"]}
    found = []
    for name in ("episodes", "lerobot"):
        infos = list_episodes([folder / name])
        present = {info.spec.init_number for info in infos}
        if counted - present:
            found.append(f"{name}: {sorted(counted - present)} were counted and are gone")
        if len(present - counted) > 1:
            found.append(f"{name}: {sorted(present - counted)} are there and were not counted")
        found += [f"{info.name} is not whole" for info in infos[-newest:] if not _is_whole(info)]
    return found


def _is_whole(info: EpisodeInfo) -> bool:
    episode = load_episode(info)
    return episode.num_steps == len(episode.frames()) == info.num_steps


def same_as_undisturbed(folder: Path, other: Path, episodes: int) -> bool:
    """Whether HDF5 files are the bytes, and LeRobot samples the numbers, of a run that nobody killed."""
    collect(recipe(other, episodes))
    names = [path.name for path in sorted((other / "episodes").glob("[!.]*.hdf5"))]
    if any((folder / "episodes" / name).read_bytes() != (other / "episodes" / name).read_bytes() for name in names):
        return False
    ours, theirs = (EpisodeDataset(list_episodes([path / "lerobot"])[: len(names)]) for path in (folder, other))
    return bool((ours.actions_RA == theirs.actions_RA).all() and (ours.states_RS == theirs.states_RS).all())


def episodes_that_lerobot_loads(folder: Path, cache: Path) -> int:
    """Episodes of the folder as LeRobot's own class sees it, the last frame decoded."""
    os.environ["HF_DATASETS_CACHE"] = str(cache)  # read when Hugging Face's datasets is imported, which happens here
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("run", root=folder, video_backend="pyav")
    dataset[len(dataset) - 1]
    return dataset.num_episodes


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
