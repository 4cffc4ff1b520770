"""Which EGL device renders: the inputs that broke other systems, as a table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vla_rl.sim.libero.egl import RenderingError, context, egl_device, is_software

GPUS = 8
"""Of the machine in all of these."""


@pytest.mark.parametrize(
    ("cuda_visible", "requested", "num_devices", "worker", "device"),
    [
        (None, None, 1, 0, 0),
        (None, None, 1, 5, 0),
        (None, None, 8, 3, 3),  # nothing is set: not every worker on the first GPU
        (None, None, 9, 8, 0),  # the ninth device draws in software
        (None, None, 2, 7, 1),  # EGL lists fewer devices than the machine has GPUs
        ("", None, 8, 0, 0),
        ("0", None, 8, 0, 0),
        ("7", None, 8, 0, 7),
        ("7", None, 1, 0, 0),  # the container lists only its own GPU
        ("7", None, 2, 0, 0),  # one GPU and the software device
        ("6,7", None, 8, 0, 6),
        ("6,7", None, 8, 1, 7),  # not every worker on the first GPU
        ("6,7", None, 8, 2, 6),
        ("6,7", None, 3, 1, 1),  # renumbered in the container
        (" 2 , 3 ", None, 4, 1, 3),
        ("GPU-8f2a", None, 2, 0, 0),
        ("GPU-8f2a,GPU-11cc", None, 3, 1, 1),
        ("6,7", "1", 8, 0, 1),  # an explicit request wins
        ("", "2", 4, 5, 2),
    ],
)
def test_device_of_worker(cuda_visible: str | None, requested: str | None, num_devices: int, worker: int, device: int) -> None:
    assert egl_device(cuda_visible, requested, num_devices, GPUS, worker) == device


def test_without_a_gpu_the_first_device_draws() -> None:
    assert egl_device(None, None, num_devices=3, num_gpus=0, worker=2) == 0


@pytest.mark.parametrize(
    ("cuda_visible", "requested", "num_devices", "message"),
    [
        (None, "7", 1, "MUJOCO_EGL_DEVICE_ID='7' must be a number from 0 to 0"),
        (None, "-1", 4, "must be a number from 0 to 3"),
        (None, "gpu", 4, "must be a number from 0 to 3"),
        (None, None, 0, "EGL lists no device; install libegl1"),
        ("GPU-a,GPU-b,GPU-c", None, 2, "names device 'GPU-c', but EGL lists 2"),
    ],
)
def test_impossible_requests_say_what_to_do(cuda_visible: str | None, requested: str | None, num_devices: int, message: str) -> None:
    with pytest.raises(RenderingError, match=message):
        egl_device(cuda_visible, requested, num_devices, GPUS, worker=2)


CHOOSES = """
import os
from vla_rl.sim.libero import egl
egl.num_gpus = lambda: 2
egl.egl_device = lambda visible, requested, num_devices, num_gpus, worker: worker if requested is None else int(requested)
"""
"""A process in front of two GPUs."""


@pytest.mark.parametrize(("asked", "devices"), [(None, "0 0 1"), ("0", "0 0 0")])
def test_a_child_chooses_for_itself_unless_the_user_has_asked(asked: str | None, devices: str) -> None:
    """The choice is an environment variable, which workers of a process that has drawn before inherit: they were all sent to its GPU."""
    child = CHOOSES + "egl.configure(1); print(os.environ[egl.DEVICE_VARIABLE])"
    parent = CHOOSES + "import subprocess, sys\n"
    parent += "for worker in (0, 1):\n    egl.configure(worker); print(os.environ[egl.DEVICE_VARIABLE], end=' ', flush=True)\n"
    parent += f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    environment = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_EGL_DEVICE_ID", "VLA_RL_EGL_CHOICE")}
    environment |= {} if asked is None else {"MUJOCO_EGL_DEVICE_ID": asked}
    done = subprocess.run([sys.executable, "-c", parent], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == devices


def test_software_is_recognised() -> None:
    assert is_software("llvmpipe (LLVM 15.0.6, 256 bits)")
    assert not is_software("NVIDIA H200/PCIe/SSE2")


def test_a_process_has_one_context() -> None:
    """Lists and textures live in the context that made them: a second one would draw garbage."""
    assert context() is context()


def test_without_a_driver_there_is_one_clear_error() -> None:
    """And nothing from MuJoCo's half made context, whose destructor failed with a traceback of its own."""
    no_driver = {"__EGL_VENDOR_LIBRARY_DIRS": "/nonexistent", "__EGL_VENDOR_LIBRARY_FILENAMES": "/nonexistent"}
    code = "from vla_rl.sim.libero import egl\ntry:\n    egl.context()\nexcept egl.RenderingError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **no_driver}, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no OpenGL context with MUJOCO_GL='egl'") and "apt-get install libegl1" in done.stdout
    assert done.stderr == ""
