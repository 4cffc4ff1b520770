"""Settings that hold for every test."""

import os

from hypothesis import settings

os.environ.setdefault("MUJOCO_GL", "egl")  # robosuite reads it once, at its first import in the process

settings.register_profile("busy", deadline=None)  # a busy machine is no wrong answer
settings.load_profile("busy")
