"""Roles for tests of backends."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from vla_rl.cluster.backend import Parcel, Sealed
from vla_rl.config import ConfigError


class Echo:
    """Answers what it was asked."""

    def __init__(self, greeting: str) -> None:
        if not greeting:
            raise ConfigError("greeting is empty; say something")
        self.greeting = greeting

    def greet(self, name: str) -> str:
        return f"{self.greeting}, {name}"

    def process(self) -> int:
        return os.getpid()

    def picture(self, size: int) -> Sealed:
        """A large array, and its sum."""
        pixels = np.arange(size, dtype=np.int64)
        return Sealed(int(pixels.sum()), {"pixels": pixels, "name": self.greeting})

    def add_up(self, parcels: list[Parcel]) -> list[int]:
        return [int(parcel.fetch()["pixels"].sum()) for parcel in parcels]

    def fail(self) -> None:
        raise ConfigError("this was asked for")

    def fail_in_a_way_that_does_not_travel(self) -> None:
        class Local(RuntimeError):
            def __init__(self, a: int, b: int) -> None:
                super().__init__("no pickle")

        raise Local(1, 2)

    def shout(self) -> None:
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep_for_ever(self) -> None:
        time.sleep(10_000)

    def close(self) -> None: ...
