"""`vla-rl bench loader`: samples per second against LeRobot's own loader, from the same files, and against bare decoding.

Regime: demonstrations of libero_object, 128 px, two views, recorded here by the scripted expert; one process without workers;
samples in a random order, each with 16 actions. `png`, `h264` and `av1` (video) are the forms of LeRobotDataset v3.0; `rows` are PNG
with one action (LeRobot decodes the pictures of every row that a chunk of actions takes); `windows` are four observations in a row
of AV1 video (`delta_timestamps`). Ours reads batches of 64, LeRobot reads item by item, as its DataLoader does.
CPU time, in turns, each in a fresh process.
Limit: decoding the same pictures and nothing else: from memory for PNG, the file from front to end for HDF5 (deflate) and windows of
video. A single picture of video needs its key picture: the limit decodes of every second group of pictures the first one, of the others
all up to the last one, and hands out one of each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.bench.common import benchmark_parser, finish, median_iqr, run_fresh

MODULE = "vla_rl.bench.loader"
CHUNK, BATCH, WINDOW = 16, 64, (-3, -2, -1, 0)
BARS = {"png": 1.0, "rows": 1.0, "h264": 1.0, "av1": 1.0, "windows": 2.0}
"""Ours over LeRobot's, samples per second."""
BAR_LIMIT = 0.8
"""Fraction of bare decoding."""


def main(arguments: Sequence[str]) -> int:
    """Record, convert, measure; 0 if every case reaches its bars."""
    parser = benchmark_parser("loader", __doc__)
    parser.add_argument("--episodes", type=int, default=8, help="demonstrations, at least 1")
    parser.add_argument("--samples", type=int, default=640, help="samples of each measurement, a multiple of 64")
    parser.add_argument("--rounds", type=int, default=3, help="fresh processes for each case and loader")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        written = run_fresh(MODULE, "prepare", folder, str(options.episodes))
        print(json.dumps(written), flush=True)
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        rows = [_case(case, folder, options.samples, options.rounds) for case in (*BARS, "hdf5")]
    ratio = min(row["ratio"] / BARS[row["case"]] for row in rows if "ratio" in row)
    fraction = min(row["fraction_of_limit"] for row in rows)
    print(f"smallest ratio over its bar: {ratio:.2f}; smallest fraction of bare decoding: {fraction:.2f} (bar {BAR_LIMIT})", flush=True)
    status = finish("loader", ratio, 1.0, fraction, [*rows, written], options)
    return status if fraction >= BAR_LIMIT else 1


def _case(case: str, folder: str, samples: int, rounds: int) -> dict[str, Any]:
    loaders = ("ours", "lerobot", "decode") if case in BARS else ("ours", "decode")
    rates: dict[str, list[float]] = {loader: [] for loader in loaders}
    for _ in range(rounds):
        for loader in loaders:
            rates[loader].append(run_fresh(MODULE, "measure", folder, case, loader, str(samples))["samples_per_s"])
    row: dict[str, Any] = {"case": case, **{f"{loader}_samples_per_s": round(median_iqr(rates[loader])[0], 1) for loader in loaders}}
    if "lerobot" in loaders:
        middle, low, high = median_iqr([ours / theirs for ours, theirs in zip(rates["ours"], rates["lerobot"])])
        row |= {"ratio": round(middle, 2), "ratio_quartiles": [round(low, 2), round(high, 2)], "bar": BARS[case]}
    row["fraction_of_limit"] = round(median_iqr([ours / bare for ours, bare in zip(rates["ours"], rates["decode"])])[0], 3)
    print(json.dumps(row), flush=True)
    return row


def prepare(folder: Path, episodes: int) -> dict[str, Any]:
    """Record demonstrations as HDF5, write them in the forms of LeRobot; size and CPU time of each form per control step."""
    from vla_rl.collection.collect import collect
    from vla_rl.collection.config import CollectConfig
    from vla_rl.datasets.episodes import load_episode
    from vla_rl.datasets.lerobot_store import LeRobotStore
    from vla_rl.datasets.store import EpisodeStore, list_episodes
    from vla_rl.sim.pool import PoolConfig

    pool = PoolConfig("serial", 1)
    collect(CollectConfig(str(folder / "run"), episodes_per_task=episodes, frame_every=1, pool=pool, show_progress=False))
    recorded = [load_episode(info) for info in list_episodes([folder / "run"])]
    stores = {"hdf5 lzf": EpisodeStore(folder / "lzf", "lzf"), "hdf5 gzip": EpisodeStore(folder / "gzip", "gzip")}
    stores |= {"png": LeRobotStore(folder / "png", "png")}
    stores |= {"av1": LeRobotStore(folder / "av1", "av1"), "h264": LeRobotStore(folder / "h264", "h264")}
    return {"case": "written", "unit": "per control step", **{name: _written(store, recorded) for name, store in stores.items()}}


def _written(store: Any, episodes: Sequence[Any]) -> dict[str, float]:
    start, steps = time.process_time(), sum(episode.num_steps for episode in episodes)
    with store.writing():
        for number, episode in enumerate(episodes):
            store.write(number, episode, 1)
    seconds = time.process_time() - start
    size = sum(path.stat().st_size for path in store.folder.rglob("*") if path.is_file())
    return {"kib": round(size / steps / 1024, 2), "ms": round(1000 * seconds / steps, 2)}


def measure(folder: Path, case: str, loader: str, samples: int) -> dict[str, float]:
    """One process: samples per CPU second, after a first batch that opens the files."""
    data = folder / {"rows": "png", "windows": "av1", "hdf5": "run"}.get(case, case)
    make = {"ours": _ours, "lerobot": _lerobot, "decode": _decode}[loader]
    read = make(data, case, samples)
    read(0, BATCH)
    start = time.process_time()
    for first in range(0, samples, BATCH):
        read(first, first + BATCH)
    return {"samples_per_s": samples / (time.process_time() - start)}


Read = Callable[[int, int], object]
"""Reads the samples of a range of positions in the random order."""


def _order(count: int, samples: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, count, samples)


def _ours(data: Path, case: str, samples: int) -> Read:
    from vla_rl.datasets.samples import EpisodeDataset
    from vla_rl.datasets.store import list_episodes

    dataset = EpisodeDataset(list_episodes([data]))
    order = _order(len(dataset), samples)
    if case == "windows":
        return lambda first, last: _window_batch(dataset, order[first:last])
    chunk = 1 if case == "rows" else CHUNK
    return lambda first, last: dataset.columns(order[first:last], chunk)


def _window_batch(dataset: Any, index_B: np.ndarray) -> object:
    from vla_rl.datasets.samples import action_windows

    rows_B, episodes_B = dataset.sample_rows_X[index_B], dataset.sample_episodes_X[index_B]
    actions = action_windows(dataset.actions_RA, rows_B, dataset.row_starts[episodes_B + 1], CHUNK)
    return dataset.observed_windows(index_B, WINDOW), actions


def _lerobot(data: Path, case: str, samples: int) -> Read:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    fps = 20
    deltas: dict[str, list[float]] | None = None if case == "rows" else {"action": [step / fps for step in range(CHUNK)]}
    if case == "windows" and deltas is not None:
        observed = ("observation.images.image", "observation.images.image2", "observation.state")
        deltas |= {name: [step / fps for step in WINDOW] for name in observed}
    dataset = LeRobotDataset("bench", root=data, delta_timestamps=deltas, video_backend="pyav", return_uint8=True)
    order = _order(len(dataset), samples).tolist()
    return lambda first, last: [dataset[index] for index in order[first:last]]


def _decode(data: Path, case: str, samples: int) -> Read:
    """As many pictures as the samples hold, decoded and nothing else."""
    if case in ("png", "rows"):
        return _decode_png(data, samples)
    if case == "hdf5":
        return _decode_hdf5(data)
    return _decode_windows(data) if case == "windows" else _decode_single_pictures(data)


def _decode_png(data: Path, samples: int) -> Read:
    from vla_rl.datasets.lerobot_catalog import read_table
    from vla_rl.datasets.lerobot_format import IMAGE_FEATURES
    from vla_rl.datasets.png import decode_png

    tables = [read_table(path, list(IMAGE_FEATURES.values())) for path in sorted((data / "data").rglob("*.parquet"))]
    files = [value["bytes"] for table in tables for feature in IMAGE_FEATURES.values() for value in table[feature].to_pylist()]
    order = _order(len(files), 2 * samples).tolist()
    return lambda first, last: [decode_png(files[number]) for number in order[2 * first : 2 * last]]


def _decode_windows(data: Path) -> Read:
    def endless() -> Iterator[np.ndarray]:
        for container in _videos(data):
            for frame in container.decode(video=0):
                yield frame.to_ndarray(format="rgb24")

    stream = endless()
    return lambda first, last: [next(stream) for _ in range(2 * len(WINDOW) * (last - first))]


def _decode_single_pictures(data: Path) -> Read:
    def endless() -> Iterator[np.ndarray]:
        for container in _videos(data):
            for number, group in enumerate(_groups(container)):
                yield [frame for packet in (group if number % 2 else group[:1]) for frame in packet.decode()][-1].to_ndarray(format="rgb24")

    stream = endless()
    return lambda first, last: [next(stream) for _ in range(2 * (last - first))]


def _videos(data: Path) -> Iterator[Any]:
    """The opened files, round and round."""
    import av

    while True:
        for path in sorted((data / "videos").rglob("*.mp4")):
            with av.open(str(path)) as container:
                container.streams.video[0].codec_context.thread_count = 1
                yield container


def _groups(container: Any) -> Iterator[list[Any]]:
    """Lists of packets, each from a key picture to the one before the next; the last one of a file is left out."""
    group: list[Any] = []
    for packet in container.demux(video=0):
        if packet.is_keyframe and group:
            yield group
            group = []
        group.append(packet)


def _decode_hdf5(data: Path) -> Read:
    import h5py

    from vla_rl.datasets.files import array

    def endless() -> Any:
        while True:
            for path in sorted((data / "episodes").glob("*.hdf5")):
                with h5py.File(path) as file:
                    for name in ("agentview_rgb", "eye_in_hand_rgb"):
                        yield from array(file, f"data/demo_0/obs/{name}")

    stream = endless()
    return lambda first, last: [next(stream) for _ in range(2 * (last - first))]


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        print(json.dumps(prepare(Path(sys.argv[2]), int(sys.argv[3]))))
    elif sys.argv[1] == "measure":
        print(json.dumps(measure(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))))
    else:
        raise SystemExit(main(sys.argv[1:]))
