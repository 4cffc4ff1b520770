"""What every simulator does with a picture after OpenGL has drawn it."""

from __future__ import annotations

import numpy as np

from vla_rl.conventions import Orientation

_AXES = {
    Orientation.RAW: np.s_[:, :],
    Orientation.VERTICAL_FLIP: np.s_[::-1, :],
    Orientation.ROTATED_180: np.s_[::-1, ::-1],
}


def oriented(picture: np.ndarray, orientation: Orientation) -> np.ndarray:
    """uint8[H, W, 3], contiguous: a picture as `mjr_readPixels` returned it (rows bottom-up), in the wanted orientation."""
    return np.ascontiguousarray(picture[_AXES[orientation]])
