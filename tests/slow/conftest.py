"""Learning curves use the small recipes of the phase tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "phases")]
