"""Videos and PNG columns: integer time however many episodes come before, random access, damage."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vla_rl.datasets.lerobot_parts import picture_column
from vla_rl.datasets.lerobot_tables import parquet_bytes
from vla_rl.datasets.png import PngColumns, decode_png, encode_png, locate_pngs
from vla_rl.datasets.schema import DatasetError
from vla_rl.datasets.video import VideoFiles, cut_video, encode_video, join_videos

FPS = 20


def grey(level: int, size: int = 16) -> np.ndarray:
    return np.full((size, size, 3), level, np.uint8)


def test_hundreds_of_short_episodes_do_not_drift(tmp_path: Path) -> None:
    """LeRobot #3177: picture k of the file is shown at exactly k / fps, and episode 199 is found where it lies."""
    clips = [encode_video(np.stack([grey((7 * episode + 40 * t) % 250) for t in range(3)]), FPS, "h264") for episode in range(200)]
    path = tmp_path / "all.mp4"
    path.write_bytes(join_videos(clips, FPS))
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        times = sorted(packet.pts * stream.time_base for packet in container.demux(stream) if packet.size)
    assert [time * FPS for time in times] == list(range(600)), "fractions, so equal means equal"
    files = VideoFiles()
    for episode in (199, 0, 137):
        levels = files.read(path, np.arange(3 * episode, 3 * episode + 3), FPS)[:, 8, 8, 0].astype(int)
        assert np.abs(levels - [(7 * episode + 40 * t) % 250 for t in range(3)]).max() <= 3, "of 255; other pictures differ by 7 or more"
    again = tmp_path / "one.mp4"
    again.write_bytes(cut_video(path, 3 * 137, 3, FPS))
    assert np.array_equal(files.read(again, np.arange(3), FPS), files.read(path, np.arange(411, 414), FPS))
    assert (files.count(path), files.count(again)) == (600, 3)


@pytest.mark.parametrize("codec", ["av1", "h264"])
def test_random_access_gives_what_decoding_in_order_gives(tmp_path: Path, codec: str) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "v.mp4"
    path.write_bytes(encode_video(rng.integers(0, 256, (11, 64, 64, 3), np.uint8), FPS, codec))  # type: ignore[arg-type]
    whole = VideoFiles().read(path, np.arange(11), FPS)
    files = VideoFiles()
    for _ in range(20):
        numbers = rng.integers(0, 11, 5)
        assert np.array_equal(files.read(path, numbers, FPS), whole[numbers])
    with pytest.raises(DatasetError, match=r"has no picture 11 \(at 0\.550 s\); the file is shorter"):
        files.read(path, np.array([11]), FPS)
    with pytest.raises(DatasetError, match="has 2 of the pictures 9 to 11"):
        cut_video(path, 9, 3, FPS)


@pytest.mark.parametrize("options", [{"g": "7", "bf": "0"}, {"g": "12", "bf": "2"}, {"g": "30", "bf": "3"}])
def test_videos_of_others_give_at_random_what_they_give_in_order(tmp_path: Path, options: dict[str, str]) -> None:
    """Long ways from key picture to key picture, and pictures that refer to later ones, which decoders answer with a delay."""
    path = tmp_path / "theirs.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "20", **options})
        stream.width = stream.height = 32
        for t in range(40):
            ramp = np.linspace(0, 90, 32, dtype=np.uint8)[:, None, None] + np.uint8(4 * t)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.broadcast_to(ramp, (32, 32, 3)).copy(), "rgb24")))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        whole = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    files, rng = VideoFiles(), np.random.default_rng(0)
    for _ in range(20):
        numbers = rng.integers(0, 40, 3)
        assert np.array_equal(files.read(path, numbers, FPS), whole[numbers])
    with pytest.raises(DatasetError, match="has no picture 40"):
        files.read(path, np.array([40]), FPS)


@pytest.mark.parametrize("rows", [1, 3, 90])
def test_pngs_are_found_in_the_file_where_parquet_says_they_are(tmp_path: Path, rows: int) -> None:
    """Several row groups, and pictures larger than a page: against reading the column with pyarrow."""
    rng = np.random.default_rng(rows)
    pictures = [encode_png(rng.integers(0, 256, (96, 96, 3), np.uint8)) for _ in range(rows)]
    tables = [pa.table({"a": picture_column(pictures), "n": pa.array(range(rows))}) for _ in range(3)]
    path = tmp_path / "t.parquet"
    path.write_bytes(parquet_bytes(tables))
    spans = locate_pngs(path, "a")
    assert spans is not None and len(spans) == 3 * rows
    content, column = path.read_bytes(), pq.read_table(path)["a"].to_pylist()
    assert [content[start : start + length] for start, length in spans.tolist()] == [value["bytes"] for value in column]
    assert PngColumns().read(path, "a", 2 * rows) == pictures[0]


def test_compressed_columns_are_read_all_the_same(tmp_path: Path) -> None:
    pictures = [encode_png(grey(level)) for level in range(7)]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": picture_column(pictures)}), path, compression="snappy", row_group_size=3)
    assert locate_pngs(path, "a") is None
    columns = PngColumns()
    assert [columns.read(path, "a", row) for row in (6, 0, 3, 5)] == [pictures[row] for row in (6, 0, 3, 5)]


def test_what_is_no_picture_is_named() -> None:
    with pytest.raises(DatasetError, match=r"row 3: not a readable picture .*; 5 bytes"):
        decode_png(b"hello", "row 3")
