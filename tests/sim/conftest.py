"""Makes the helper modules of this folder importable here and in worker processes, which get this `sys.path`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads it once, when the first test module imports it
sys.path.insert(0, str(Path(__file__).parent))
