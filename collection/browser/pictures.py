"""Pictures for the page: JPEG for live views, one WebP sheet for an episode's film."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from vla_rl.episode import UInt8

LIVE_QUALITY, FILM_QUALITY = 80, 70
"""Of JPEG and WebP."""
FILM_FRAMES, FILM_SIDE, FILM_COLUMNS = 96, 128, 12
"""Most frames of a film, their side (pixels), and frames in a row of its sheet."""


def live_message(header: Mapping[str, Any], picture_HWC: UInt8) -> bytes:
    """One binary message: length of the header (uint32, big endian), the header as JSON, a JPEG."""
    head = json.dumps(header).encode()
    return struct.pack(">I", len(head)) + head + encode(picture_HWC, "JPEG", LIVE_QUALITY)


def encode(picture_HWC: UInt8, form: str, quality: int) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture_HWC)).save(buffer, form, quality=quality)
    return buffer.getvalue()


def film_sheet(pictures: Sequence[UInt8]) -> tuple[bytes, dict[str, int]]:
    """A WebP with evenly chosen pictures side by side, and where they are: `frames`, `columns`, `side`."""
    chosen = np.linspace(0, len(pictures) - 1, min(len(pictures), FILM_FRAMES)).round().astype(int)
    rows = math.ceil(len(chosen) / FILM_COLUMNS)
    sheet = Image.new("RGB", (FILM_SIDE * min(FILM_COLUMNS, len(chosen)), FILM_SIDE * rows))
    for place, number in enumerate(chosen):
        picture = Image.fromarray(np.ascontiguousarray(pictures[number])).resize((FILM_SIDE, FILM_SIDE))
        sheet.paste(picture, (FILM_SIDE * (place % FILM_COLUMNS), FILM_SIDE * (place // FILM_COLUMNS)))
    buffer = io.BytesIO()
    sheet.save(buffer, "WEBP", quality=FILM_QUALITY)
    return buffer.getvalue(), {"frames": len(chosen), "columns": FILM_COLUMNS, "side": FILM_SIDE}
