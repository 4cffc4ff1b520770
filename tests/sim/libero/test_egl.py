"""Which EGL device renders: the inputs that broke other systems, as a table."""

from __future__ import annotations

import pytest

from vla_rl.sim.libero.egl import RenderingError, context, egl_device, is_software


@pytest.mark.parametrize(
    ("cuda_visible", "requested", "num_devices", "worker", "device"),
    [
        (None, None, 1, 0, 0),
        (None, None, 8, 3, 0),
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
    assert egl_device(cuda_visible, requested, num_devices, worker) == device


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
        egl_device(cuda_visible, requested, num_devices, worker=2)


def test_software_is_recognised() -> None:
    assert is_software("llvmpipe (LLVM 15.0.6, 256 bits)")
    assert not is_software("NVIDIA H200/PCIe/SSE2")


def test_a_process_has_one_context() -> None:
    """Lists and textures live in the context that made them: a second one would draw garbage."""
    assert context() is context()
