"""Headless OpenGL: which device renders, and the process-wide context.

EGL numbers its devices without regard to `CUDA_VISIBLE_DEVICES`, and robosuite refuses at import what MuJoCo
accepts, so the mapping is one function here (`egl_device`), with a table test.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from vla_rl.errors import UserError

SOFTWARE_RENDERERS = ("llvmpipe", "softpipe", "swrast", "software")
"""Parts of a renderer's name that tell it draws on the CPU."""
SOFTWARE_REMEDY = "install the GPU's EGL driver: rendering is then 30 times faster"
"""What to do where one draws beside a GPU."""
DEVICE_VARIABLE = "MUJOCO_EGL_DEVICE_ID"
"""What MuJoCo and robosuite read."""
_CHOICE_VARIABLE = "VLA_RL_EGL_CHOICE"
"""`PID:DEVICE`: that DEVICE_VARIABLE holds our choice for that process. A child process that inherits both chooses for itself."""


class RenderingError(UserError):
    """No OpenGL context, or a device that does not exist."""


def num_gpus() -> int:
    """NVIDIA GPUs that this machine, or this container, has device files of."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def egl_device(cuda_visible: str | None, requested: str | None, num_devices: int, num_gpus: int, worker: int = 0) -> int:
    """EGL device index for a worker.

    cuda_visible: value of CUDA_VISIBLE_DEVICES (None: unset, all `num_gpus` GPUs). requested: value of MUJOCO_EGL_DEVICE_ID, which wins.
    num_devices: how many devices EGL lists, GPUs first (a container may list fewer than the host has). worker: index among the
    workers of this machine; they are dealt round robin over the visible GPUs.
    Raises RenderingError for a request that no device answers.
    """
    if num_devices < 1:
        raise RenderingError("EGL lists no device; install libegl1 and libgl1-mesa-dri, or a GPU driver with EGL")
    if requested is not None:
        if not requested.isdecimal() or int(requested) >= num_devices:
            raise RenderingError(
                f"MUJOCO_EGL_DEVICE_ID={requested!r} must be a number from 0 to {num_devices - 1}; unset it to let vla-rl choose"
            )
        return int(requested)
    everything = ",".join(map(str, range(min(num_gpus, num_devices))))
    visible = [part.strip() for part in (everything if cuda_visible is None else cuda_visible).split(",") if part.strip()]
    if not visible or num_devices == 1:
        return 0
    position = worker % len(visible)
    name = visible[position]
    if name.isdecimal() and int(name) < num_devices:
        return int(name)
    if position < num_devices:
        return position
    raise RenderingError(
        f"CUDA_VISIBLE_DEVICES={cuda_visible!r} names device {name!r}, but EGL lists {num_devices}; set MUJOCO_EGL_DEVICE_ID to one of them"
    )


def configure(worker: int = 0) -> None:
    """Choose the EGL device through environment variables; call before mujoco or robosuite create a context.

    Plain assignment, because a value that robosuite would reject at import must not survive.
    """
    # llvmpipe: rasterise in the calling thread. One env per core is the rule here, and its helper threads then only wait for
    # each other (same pixels, 1.7 times the wall time on a busy machine).
    os.environ.setdefault("LP_NUM_THREADS", "0")
    backend = os.environ.setdefault("MUJOCO_GL", "egl")
    if backend != "egl":
        return
    requested = _requested(os.environ.pop(DEVICE_VARIABLE, None), os.environ.get(_CHOICE_VARIABLE, ""))
    _import_robosuite_quietly()
    from mujoco.egl import egl_ext

    device = egl_device(os.environ.get("CUDA_VISIBLE_DEVICES"), requested, len(egl_ext.eglQueryDevicesEXT()), num_gpus(), worker)
    if requested is None:
        os.environ[_CHOICE_VARIABLE] = f"{os.getpid()}:{device}"
    os.environ[DEVICE_VARIABLE] = str(device)


def _requested(device: str | None, choice: str) -> str | None:
    """The device that was asked for: by the user, or by an earlier call in this process, but not what a parent process chose for itself."""
    chooser, _, chosen = choice.partition(":")
    return None if device == chosen and chooser != str(os.getpid()) else device


@cache
def _import_robosuite_quietly() -> None:
    """robosuite asserts on MUJOCO_EGL_DEVICE_ID at import, so it is imported while that is unset.

    Its advice about a private macro file, and Python's about its escape sequences, mean nothing to our users.
    """
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import robosuite  # pyright: ignore[reportMissingImports]  # noqa: F401


def context() -> Any:
    """The process's one GL context, made current in the calling thread. Raises RenderingError with a remedy if there is none.

    Current each time: a stock robosuite renderer of this process takes its place, and leaves none when it is freed.
    """
    made = _make_context()
    made.make_current()
    return made


@cache
def _make_context() -> Any:
    try:
        import mujoco  # asserts on MUJOCO_GL

        mujoco.GLContext._context = None  # its destructor asks for it, also of a context that could not be made
        made = mujoco.GLContext(1, 1)
        made.make_current()
    except (ImportError, RuntimeError) as error:
        raise RenderingError(
            f"no OpenGL context with MUJOCO_GL={os.environ.get('MUJOCO_GL')!r} ({error}); "
            f"on Debian: apt-get install libegl1 libgl1-mesa-dri libosmesa6"
        ) from error
    atexit.register(_free, made)  # runs before mujoco's own hook terminates EGL, after which freeing fails
    return made


def _free(made: Any) -> None:
    from OpenGL import error

    with contextlib.suppress(error.GLError):  # a stock robosuite environment in this process may have ended EGL before
        made.free()
    made._context = None


@cache
def renderer_name() -> str:
    """`glGetString(GL_RENDERER)` of the context."""
    context()
    from OpenGL import GL

    name = GL.glGetString(GL.GL_RENDERER)
    return name.decode() if isinstance(name, bytes) else str(name)


def is_software(name: str) -> bool:
    """Whether a renderer with this name draws on the CPU."""
    return any(part in name.lower() for part in SOFTWARE_RENDERERS)
