"""Videos of one camera: encoding an episode, and reading single pictures or windows back out of a file.

A file holds the pictures of one or more episodes one after the other. Picture k is shown at k / fps, and all arithmetic is
in whole pictures, so that nothing drifts however many episodes come before. A key picture every second one (LeRobot's
default) bounds what a random access decodes to two pictures.

Shape legend: see `vla_rl/episode.py`; F pictures.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import av
import av.logging
import numpy as np
from av.error import FFmpegError

from vla_rl.datasets.schema import DatasetError
from vla_rl.episode import Int64, UInt8

os.environ.setdefault("SVT_LOG", "1")  # errors only: the encoders print thirty lines for every episode
av.logging.set_level(av.logging.ERROR)

Codec = Literal["av1", "h264"]
"""AV1 is LeRobot's default; H.264 plays everywhere and encodes faster."""
_ENCODERS: dict[Codec, tuple[str, dict[str, str]]] = {
    "av1": ("libsvtav1", {"crf": "30", "preset": "12", "svtav1-params": "lp=1"}),
    "h264": ("libx264", {"crf": "23", "preset": "veryfast", "threads": "1"}),
}
"""Encoder and options: LeRobot's (crf 30, preset 12), and one thread, because collection fills the cores with environments."""
_LEAST_SIZE: dict[Codec, int] = {"av1": 64, "h264": 16}
"""Pixels below which the encoder refuses."""
KEY_EVERY = 2
"""Pictures from one key picture to the next."""
PIXEL_FORMAT = "yuv420p"
OPEN_VIDEOS = 256
"""Files that one process keeps open."""
_NOWHERE = -1 - KEY_EVERY
"""Position of a decoder that must seek before it gives anything."""


def require_encodable(codec: Codec, height: int, width: int) -> None:
    """Raise DatasetError for pictures that the codec cannot take."""
    least = _LEAST_SIZE[codec]
    if height < least or width < least or height % 2 or width % 2:
        raise DatasetError(
            f"pictures are {height} x {width}; {codec} video needs an even height and width of at least {least}: "
            "record larger pictures, or use pictures: png"
        )


def encode_video(pictures_FHWC: UInt8, fps: int, codec: Codec) -> bytes:
    """The mp4 file of uint8[F, H, W, 3]. Raises DatasetError for a size that the codec cannot take, or a lost picture."""
    require_encodable(codec, *pictures_FHWC.shape[1:3])
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = _add_stream(container, codec, fps, (pictures_FHWC.shape[1], pictures_FHWC.shape[2]))
        packets = 0
        for number, picture in enumerate(pictures_FHWC):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), "rgb24")
            frame.pts = number
            packets += _write(container, stream.encode(frame))
        packets += _write(container, stream.encode())
    if packets != len(pictures_FHWC):
        raise DatasetError(f"{codec} kept {packets} of {len(pictures_FHWC)} pictures")
    return file.getvalue()


def _add_stream(container: Any, codec: Codec, fps: int, size: tuple[int, int]) -> Any:
    encoder, options = _ENCODERS[codec]
    stream = container.add_stream(encoder, rate=fps, options={"g": str(KEY_EVERY), **options})
    stream.height, stream.width = size
    stream.pix_fmt = PIXEL_FORMAT
    stream.codec_context.time_base = Fraction(1, fps)
    return stream


def _write(container: Any, packets: Sequence[Any]) -> int:
    container.mux(packets)
    return sum(packet.size > 0 for packet in packets)


def join_videos(files: Sequence[bytes], fps: int) -> bytes:
    """One mp4 file with the pictures of several, in order, copied and not encoded again."""
    if len(files) == 1:
        return files[0]
    return copy_pictures([(io.BytesIO(content), 0, None) for content in files], fps)


def cut_video(path: Path, first: int, count: int, fps: int) -> bytes:
    """The mp4 file of `count` pictures of a longer one, copied and not encoded again; the first must be a key picture."""
    return copy_pictures([(path, first, count)], fps)


def copy_pictures(sources: Sequence[tuple[Path | io.BytesIO, int, int | None]], fps: int) -> bytes:
    """One mp4 file of `(file, first, count)`, count None for all of it. Raises DatasetError when a picture is missing."""
    output = io.BytesIO()
    with av.open(output, "w", format="mp4") as target:
        stream: Any = None
        written = 0
        for source, first, count in sources:
            with av.open(source if isinstance(source, io.BytesIO) else str(source)) as container:
                template = container.streams.video[0]
                stream = stream or target.add_stream_from_template(template, opaque=True)
                copied = _copy_packets(container, template, target, stream, range(first, first + (count or 2**40)), written, fps)
            if copied == 0 or (count is not None and copied != count):
                raise DatasetError(
                    f"{source}: has {copied} of the pictures {first} to {first + (count or copied) - 1}; the file is cut off"
                )
            written += copied
    return output.getvalue()


def _copy_packets(container: Any, template: Any, target: Any, stream: Any, wanted: range, written: int, fps: int) -> int:
    """Copy packets of the pictures `wanted` to the end of `target`, which holds `written` pictures. Returns how many."""
    tick = template.time_base
    shift = round(Fraction(written - wanted.start, fps) / tick)
    container.seek(round(Fraction(wanted.start, fps) / tick), stream=template, backward=True)
    copied = 0
    for packet in container.demux(template):
        if packet.size and packet.pts is not None and round(packet.pts * tick * fps) in wanted:
            packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
            packet.stream = stream
            target.mux(packet)
            copied += 1
    return copied


def video_info(codec: Codec, height: int, width: int, fps: int) -> dict[str, Any]:
    """LeRobot's description of a video feature (`info` of the feature in `meta/info.json`)."""
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": codec,
        "video.pix_fmt": PIXEL_FORMAT,
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "video.g": KEY_EVERY,
        "has_audio": False,
    }


class VideoFiles:
    """Pictures by (file, number), in any order. Keeps files open, and decodes each run of a request once.

    Can be sent to a spawned worker, which opens the files itself.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[Path, _OpenVideo] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": OrderedDict()}

    def read(self, path: Path, numbers_F: Int64, fps: int) -> UInt8:
        """uint8[F, H, W, 3] of the pictures `numbers_F` of one file. Raises DatasetError for a damaged or too short file."""
        wanted = np.unique(numbers_F)
        video = self._video(path)
        try:
            pictures = video.read(wanted.tolist(), fps)
        except (FFmpegError, EOFError) as error:
            raise DatasetError(f"{path}: cannot decode pictures {wanted.tolist()[:5]}: {error}; restore the file") from error
        return pictures[np.searchsorted(wanted, numbers_F)]

    def count(self, path: Path) -> int:
        """Number of pictures that a file holds (not what its header says)."""
        video = self._video(path)
        return video.count()

    def _video(self, path: Path) -> _OpenVideo:
        if path not in self._open:
            if len(self._open) >= OPEN_VIDEOS:
                self._open.popitem(last=False)[1].close()
            self._open[path] = _OpenVideo(path)
        self._open.move_to_end(path)
        return self._open[path]


class _OpenVideo:
    """One open file and where its decoder stands."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._container = av.open(str(path))
        except (FFmpegError, OSError) as error:
            raise self._unreadable(error) from error
        if not self._container.streams.video:
            raise self._unreadable("no video in it")
        self._stream: Any = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1  # small pictures: threads cost more than they give
        self._frames: Any = None
        self._next = _NOWHERE

    def _unreadable(self, why: object) -> DatasetError:
        return DatasetError(f"{self._path}: not a readable video ({why}); restore it, or record or convert the episode again")

    def read(self, numbers: Sequence[int], fps: int) -> UInt8:
        """uint8[F, H, W, 3] of ascending picture numbers."""
        pictures = np.empty((len(numbers), self._stream.height, self._stream.width, 3), np.uint8)
        for row, number in enumerate(numbers):
            pictures[row] = self._decode(number, fps)
        return pictures

    def _decode(self, number: int, fps: int) -> UInt8:
        """Go on decoding where the picture is near, seek to the key picture before it where it is not."""
        if not 0 <= number - self._next < KEY_EVERY:
            self._seek(number, fps)
        for frame in self._frames:
            self._next = round(frame.pts * self._stream.time_base * fps) + 1
            if self._next > number:
                if self._next != number + 1:
                    break
                return frame.to_ndarray(format="rgb24")
        self._next = _NOWHERE
        raise DatasetError(f"{self._path}: has no picture {number} (at {number / fps:.3f} s); the file is shorter than the table says")

    def _seek(self, number: int, fps: int) -> None:
        timestamp = round(Fraction(number, fps) / self._stream.time_base)
        self._container.seek(timestamp, stream=self._stream, backward=True)
        self._frames = self._container.decode(self._stream)

    def count(self) -> int:
        """Packets of the file."""
        self._container.seek(0, stream=self._stream)
        self._next = _NOWHERE
        return sum(packet.size > 0 for packet in self._container.demux(self._stream))

    def close(self) -> None:
        """Close the file."""
        self._container.close()
