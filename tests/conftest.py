"""Settings that hold for every test."""

import os

os.environ.setdefault("MUJOCO_GL", "egl")  # robosuite reads it once, at its first import in the process
