"""Videos are upright and unmirrored for people, whatever orientation a policy sees, and every frame is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from vla_rl.conventions import Orientation
from vla_rl.episode import VIEW_AGENT, VIEW_WRIST, Observation, Outcome
from vla_rl.eval.video import VideoError, side_by_side, upright, video_frames, video_name, write_video


def true_picture() -> np.ndarray:
    """Four quarters: red above left, green above right, blue below left, white below right."""
    picture = np.zeros((64, 64, 3), np.uint8)
    picture[:32, :32, 0], picture[:32, 32:, 1], picture[32:, :32, 2], picture[32:, 32:] = 255, 255, 255, 255
    return picture


def stored(orientation: Orientation) -> np.ndarray:
    """The same picture as the simulator would hand it out: robosuite's raw frame is the true picture upside down."""
    raw = true_picture()[::-1]
    return {Orientation.RAW: raw, Orientation.VERTICAL_FLIP: raw[::-1], Orientation.ROTATED_180: raw[::-1, ::-1]}[orientation]


@pytest.mark.parametrize("orientation", list(Orientation))
def test_people_see_the_true_picture(orientation: Orientation) -> None:
    assert np.array_equal(upright(stored(orientation), orientation), true_picture())


@pytest.mark.parametrize("orientation", list(Orientation))
def test_marked_corners_survive_the_encoder(tmp_path: Path, orientation: Orientation) -> None:
    observation = Observation({VIEW_AGENT: stored(orientation), VIEW_WRIST: np.zeros((64, 64, 3), np.uint8)}, np.zeros(8, np.float32), "")
    write_video(tmp_path / "x.mp4", [side_by_side(observation, orientation)] * 3, 10)
    [frame, *_] = decoded(tmp_path / "x.mp4")
    assert frame.shape == (64, 128, 3)
    for row, column, colour in ((16, 16, (255, 0, 0)), (16, 48, (0, 255, 0)), (48, 16, (0, 0, 255)), (48, 48, (255, 255, 255))):
        # Lossy colours in 4:2:0: the middle of a flat quarter is within 12 of 255.
        assert np.abs(frame[row, column].astype(int) - colour).max() <= 12
    assert frame[:, 80:].max() <= 12, "the wrist view is on the right, and black"


def decoded(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_no_frame_is_dropped_and_time_is_the_robots(fakes: Any, tmp_path: Path) -> None:
    """Frames before steps 0, 2, 4, 6 and the last picture: five, at 10 per second."""
    frames = video_frames(fakes.episode(fakes.spec()), Orientation.ROTATED_180)
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 2, 4, 6, 8]
    write_video(tmp_path / "x.mp4", frames, 10)
    assert len(decoded(tmp_path / "x.mp4")) == 5
    with av.open(str(tmp_path / "x.mp4")) as container:
        assert container.streams.video[0].average_rate == 10


def test_odd_pictures_get_even_sides() -> None:
    odd = Observation({view: np.full((33, 33, 3), 7, np.uint8) for view in (VIEW_AGENT, VIEW_WRIST)}, np.zeros(8, np.float32), "")
    picture = side_by_side(odd, Orientation.RAW)
    assert picture.shape == (34, 66, 3) and (picture == 7).all()


def test_the_name_says_what_happened(fakes: Any) -> None:
    name = video_name(fakes.episode(fakes.spec(7, 2), Outcome.FAILURE), "after: named object")
    assert name == "after_named_object_libero_object_2_benchmark_7_s0_failure.mp4"


def test_what_cannot_be_a_video_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    with pytest.raises(VideoError, match="no pictures"):
        write_video(path, [], 10)
    with pytest.raises(VideoError, match="one shape with even sides"):
        write_video(path, [np.zeros((3, 4, 3), np.uint8)], 10)
    assert not list(tmp_path.iterdir())


def test_a_pyav_without_the_codec_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.eval.video.CODEC", "libx999")
    with pytest.raises(VideoError, match="this PyAV has no libx999; install PyAV from its wheel"):
        write_video(tmp_path / "x.mp4", [np.zeros((4, 4, 3), np.uint8)], 10)
