"""Videos for people: both views side by side, upright and unmirrored, at the speed of the robot.

Policies see pictures in the orientation of their training data (often mirrored). A person must not: the orientation
is undone here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from av.codec.codec import Codec, UnknownCodecError
from av.container import OutputContainer
from av.video.stream import VideoStream

from vla_rl.conventions import Orientation
from vla_rl.episode import VIEWS, Episode, Observation
from vla_rl.errors import UserError
from vla_rl.telemetry.files import atomic_path

CODEC = "libx264"
"""H.264, which every browser plays; the wheels of PyAV carry it."""
QUALITY = "20"
"""Constant rate factor: 0 is lossless, 51 the worst; at 20 the small pictures show no blocks."""


class VideoError(UserError):
    """A video that cannot be made."""


def upright(image: np.ndarray, orientation: Orientation) -> np.ndarray:
    """uint8[H, W, 3] as a person standing there would see it, whatever orientation it was stored in."""
    if orientation is Orientation.RAW:
        return image[::-1]
    if orientation is Orientation.ROTATED_180:
        return image[:, ::-1]
    return image


def side_by_side(observation: Observation, orientation: Orientation) -> np.ndarray:
    """uint8[H, V * W, 3]: all views of an observation beside each other, with even sides (H.264 halves the colours)."""
    picture = np.concatenate([upright(observation.images[view], orientation) for view in VIEWS], axis=1)
    height, width = picture.shape[:2]
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def video_frames(episode: Episode, orientation: Orientation) -> list[np.ndarray]:
    """The recorded frames of an episode in time order, and its last picture if both views of it exist."""
    frames = episode.frames()
    pictures = [side_by_side(frames[t], orientation) for t in sorted(frames)]
    last = episode.final_observation
    if last is not None and all(view in last.images for view in VIEWS):
        pictures.append(side_by_side(last, orientation))
    return pictures


def video_name(episode: Episode, condition: str) -> str:
    """A file name with what a person looks for: condition, task, init, outcome."""
    name = f"{condition}_{episode.spec.key}_{episode.outcome.value}"
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name) + ".mp4"


def write_video(path: Path, pictures: Sequence[np.ndarray], frames_per_second: int) -> None:
    """Encode uint8[H, W, 3] pictures as an H.264 mp4, atomically; every picture is one frame.

    Raises VideoError for no pictures, unequal or odd sizes, or a PyAV that was built without H.264.
    """
    _check(path, pictures)
    # `pix_fmt` of the stream is what players understand; the frames themselves are RGB and converted by PyAV.
    with atomic_path(path) as temporary, av.open(str(temporary), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(CODEC, rate=frames_per_second, options={"crf": QUALITY, "threads": "1"})
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        _encode(container, stream, pictures)


def _check(path: Path, pictures: Sequence[np.ndarray]) -> None:
    if not pictures:
        raise VideoError(f"{path.name}: no pictures; record the episode with Look.record_every > 0")
    shapes = {picture.shape for picture in pictures}
    if len(shapes) > 1 or any(side % 2 for side in pictures[0].shape[:2]):
        raise VideoError(f"{path.name}: pictures have shapes {sorted(shapes)}; H.264 needs one shape with even sides")
    try:
        Codec(CODEC, "w")
    except UnknownCodecError as error:
        raise VideoError(
            f"{path.name}: this PyAV has no {CODEC}; install PyAV from its wheel (pip install av), or set videos to 0"
        ) from error


def _encode(container: OutputContainer, stream: VideoStream, pictures: Sequence[np.ndarray]) -> None:
    for picture in pictures:
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        container.mux(stream.encode(frame))
    container.mux(stream.encode())
