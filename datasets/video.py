"""Videos of one camera: encoding an episode, and reading single pictures or windows back out of a file.

A file holds the pictures of one or more episodes one after the other. Picture k is shown at k / fps, and all arithmetic is
in whole pictures, so that nothing drifts however many episodes come before. A random access decodes from the key picture before it:
every second one is a key picture in AV1 (LeRobot's default), every one in H.264.

Shape legend: see `vla_rl/episode.py`; F pictures.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
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
KEY_EVERY: dict[Codec, int] = {"av1": 2, "h264": 1}
"""Pictures from one key picture to the next."""
_ENCODERS: dict[Codec, tuple[str, dict[str, str]]] = {
    "av1": ("libsvtav1", {"crf": "30", "preset": "12", "svtav1-params": "lp=1"}),
    "h264": ("libx264", {"crf": "17", "preset": "veryfast", "tune": "fastdecode", "threads": "1"}),
}
"""Encoder and options, one thread each, because collection fills the cores with environments. AV1's are LeRobot's (crf 30, preset 12).
H.264's are for training, which reads single pictures at random. LIBERO at 128 px, CPU time of a picture at random: 0.38 ms with a key
picture every second one and crf 23, 0.21 ms so, at the same error (35.4 dB) and 1.8 times the size; AV1 takes 0.40 ms, and 0.37 ms with
key pictures only, because it is they that take long to decode."""
_LEAST_SIZE: dict[Codec, int] = {"av1": 64, "h264": 16}
"""Pixels below which the encoder refuses."""
PIXEL_FORMAT = "yuv420p"
OPEN_VIDEOS = 256
"""Files that one process keeps open."""
NEAR = 2
"""A picture fewer than this many ahead is reached by decoding on, not by seeking."""
_NOWHERE = -1 - NEAR
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
    stream = container.add_stream(encoder, rate=fps, options={"g": str(KEY_EVERY[codec]), **options})
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
            with _opened(source) as container:
                template = container.streams.video[0]
                stream = stream or target.add_stream_from_template(template, opaque=True)
                copied = _copy_packets(container, template, target, stream, range(first, first + (count or 2**40)), written, fps)
            if copied == 0 or (count is not None and copied != count):
                raise DatasetError(
                    f"{source}: has {copied} of the pictures {first} to {first + (count or copied) - 1}; the file is cut off"
                )
            written += copied
    return output.getvalue()


def _opened(source: Path | io.BytesIO) -> Any:
    """A video to read from. Raises DatasetError for a file that is missing or damaged."""
    try:
        container = av.open(source if isinstance(source, io.BytesIO) else str(source))
    except (FFmpegError, OSError) as error:
        raise _unreadable(source, error) from error
    if not container.streams.video:
        container.close()
        raise _unreadable(source, "no video in it")
    return container


def _unreadable(source: object, why: object) -> DatasetError:
    return DatasetError(f"{source}: not a readable video ({why}); restore it, or record or convert the episode again")


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
        "video.g": KEY_EVERY[codec],
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


@dataclass(frozen=True)
class _Packets:
    """Where each picture lies in a file that stores its pictures in the order in which they are shown. P pictures."""

    ticks_P: Int64
    """When it is shown, in the stream's time base."""
    starts_P: Int64
    """Its first byte in the file."""
    sizes_P: Int64
    """Its bytes."""
    keys_P: Int64
    """The key picture at or before it."""


def _packets_of(container: Any, stream: Any) -> _Packets | None:
    """Read through a file once; None for one whose pictures lie in another order than they are shown in, or nobody says where."""
    rows = [(packet.pts, packet.pos, packet.size, packet.is_keyframe) for packet in container.demux(stream) if packet.size]
    known = all(pts is not None and start is not None and start >= 0 for pts, start, _, _ in rows)
    if not rows or not known or not rows[0][3]:
        return None
    ticks_P, starts_P, sizes_P, is_key_P = (np.array(column, np.int64) for column in zip(*rows))
    if (np.diff(ticks_P) <= 0).any():
        return None
    return _Packets(ticks_P, starts_P, sizes_P, np.maximum.accumulate(np.where(is_key_P, np.arange(len(rows)), 0)))


class _OpenVideo:
    """One open file and where its decoder stands.

    Pictures are read from their place in the file and handed to the decoder (a seek of FFmpeg costs a third of decoding a small picture);
    files that a decoder answers with a delay, because of pictures that refer to later ones, are read by seeking.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._container = _opened(path)
        self._stream: Any = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1  # small pictures: threads cost more than they give
        try:
            self._packets = _packets_of(self._container, self._stream)
        except FFmpegError as error:
            raise _unreadable(self._path, error) from error
        self._file = open(path, "rb")  # noqa: SIM115 - it is closed with the container
        self._fed = -1
        """The picture that the decoder was given last, when pictures are read from their places."""
        self._frames: Any = None
        self._next = _NOWHERE

    def read(self, numbers: Sequence[int], fps: int) -> UInt8:
        """uint8[F, H, W, 3] of ascending picture numbers."""
        pictures = np.empty((len(numbers), self._stream.height, self._stream.width, 3), np.uint8)
        for row, number in enumerate(numbers):
            pictures[row] = self._decode(number, fps)
        return pictures

    def _decode(self, number: int, fps: int) -> UInt8:
        if self._packets is not None:
            frames = self._feed(self._packets, number, fps)
            if frames:
                return frames[0].to_ndarray(format="rgb24")
            self._packets = None
        return self._decode_by_seeking(number, fps)

    def _feed(self, packets: _Packets, number: int, fps: int) -> list[Any]:
        """Picture `number` from the decoder, given those since its key picture that it has not had; nothing if it answers with a delay."""
        tick = round(Fraction(number, fps) / self._stream.time_base)
        place = int(np.searchsorted(packets.ticks_P, tick - self._half_period(fps)))
        if place == len(packets.ticks_P) or round(int(packets.ticks_P[place]) * self._stream.time_base * fps) != number:
            raise self._missing(number, fps)
        key = int(packets.keys_P[place])
        first = self._fed + 1 if key <= self._fed + 1 <= place else key
        frames: list[Any] = []
        for at in range(first, place + 1):
            packet = av.Packet(os.pread(self._file.fileno(), int(packets.sizes_P[at]), int(packets.starts_P[at])))
            packet.pts = int(packets.ticks_P[at])
            frames = self._stream.codec_context.decode(packet)
            self._fed = at
            if len(frames) != 1 or frames[0].pts != packet.pts:
                return []
        return frames

    def _half_period(self, fps: int) -> float:
        return 0.5 / fps / float(self._stream.time_base)

    def _missing(self, number: int, fps: int) -> DatasetError:
        return DatasetError(f"{self._path}: has no picture {number} (at {number / fps:.3f} s); the file is shorter than the table says")

    def _decode_by_seeking(self, number: int, fps: int) -> UInt8:
        """Go on decoding where the picture is near, seek to the key picture before it where it is not."""
        if not 0 <= number - self._next < NEAR:
            self._seek(number, fps)
        for frame in self._frames:
            self._next = round(frame.pts * self._stream.time_base * fps) + 1
            if self._next > number:
                if self._next != number + 1:
                    break
                return frame.to_ndarray(format="rgb24")
        self._next = _NOWHERE
        raise self._missing(number, fps)

    def _seek(self, number: int, fps: int) -> None:
        timestamp = round(Fraction(number, fps) / self._stream.time_base)
        self._container.seek(timestamp, stream=self._stream, backward=True)
        self._frames = self._container.decode(self._stream)

    def count(self) -> int:
        """Packets of the file."""
        self._container.seek(0, stream=self._stream)
        self._next, self._fed = _NOWHERE, -1
        return sum(packet.size > 0 for packet in self._container.demux(self._stream))

    def close(self) -> None:
        """Close the file."""
        self._container.close()
        self._file.close()
