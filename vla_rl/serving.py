"""`vla-rl serve`: a policy for others to ask, in openpi's or GR00T's protocol, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from vla_rl.config import ConfigError
from vla_rl.policies.inference import ActingPolicy
from vla_rl.policies.remote.client import TOKEN_VARIABLE
from vla_rl.policies.remote.served import ServedPolicy
from vla_rl.policies.serve.batcher import Batcher
from vla_rl.policies.serve.groot_server import serve_groot
from vla_rl.policies.serve.openpi_server import serve_openpi
from vla_rl.policies.serve.service import Listen, Service
from vla_rl.telemetry.files import folder_digest

DEFAULT_PORTS = {"openpi": 8000, "groot": 5555}
"""The ports of openpi's and NVIDIA's own servers."""


@dataclass(frozen=True)
class ServeConfig:
    """The options of `vla-rl serve`."""

    checkpoint: str
    """Folder of a policy (ours, or one of the published layouts in docs/policies.md), or its name on the Hugging Face hub."""
    protocol: Literal["openpi", "groot"] = "openpi"
    """`openpi`: websocket and msgpack. `groot`: ZMQ and msgpack."""
    host: str = "127.0.0.1"
    """Interface to listen on: this machine only, unless it is another address; `0.0.0.0` is every interface."""
    port: int | None = None
    """TCP port; None: 8000 for openpi, 5555 for GR00T; 0: a free one."""
    max_batch: int = 8
    """Rows of every forward pass; requests of that many clients are answered together. At least 1."""
    max_wait_ms: float = 5.0
    """Longest that a request waits for others to join its batch, while other clients could; at least 0. Nobody waits for a policy that
    answers a batch within a millisecond."""
    max_message_mib: float = 32.0
    """Largest request (MiB); above 0. Two 512-pixel pictures are 1.5 MiB."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the policy computes; `auto` takes CUDA where there is a GPU."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` computes in bfloat16 with half the memory for weights: other actions, by a few per cent of their range."""
    compile: bool = False
    """Compile the networks of flow policies (pi0, pi0.5, GR00T) with `torch.compile`; the first chunk waits for the compiler."""
    seed: int = 0
    """Of the noise of clients that give no seed; at least 0."""
    allow_kill: bool = False
    """Let a client of GR00T's protocol end the server with its `kill` request."""

    def __post_init__(self) -> None:
        least = {"max_batch": (self.max_batch, 1), "max_wait_ms": (self.max_wait_ms, 0), "seed": (self.seed, 0)}
        for name, (value, minimum) in least.items():
            if value < minimum:
                raise ConfigError(f"{name} is {value}; it must be at least {minimum}")
        if not self.max_message_mib > 0:
            raise ConfigError(f"max_message_mib is {self.max_message_mib}; it must be above 0")
        if self.port is not None and not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}; it must be 0 to 65535")
        if self.allow_kill and self.protocol != "groot":
            raise ConfigError(f"allow_kill belongs to protocol 'groot'; protocol {self.protocol!r} has no such request")

    @property
    def listen(self) -> Listen:
        """Where to listen."""
        return Listen(self.host, DEFAULT_PORTS[self.protocol] if self.port is None else self.port)


def run_serve(config: ServeConfig) -> int:
    """Load the policy, print where it is served, and serve until SIGINT or SIGTERM (or an allowed `kill`); returns 0.

    Raises what the checkpoint raises, and OSError for a port that is taken.
    """
    from vla_rl.engine.world import device_kind
    from vla_rl.policies.accelerate import accelerate
    from vla_rl.policies.checkpoint import load_acting_policy
    from vla_rl.policies.published import resolve_folder

    device = device_kind(config.device, "device")
    folder = resolve_folder(config.checkpoint)
    policy = accelerate(load_acting_policy(folder, device), config.precision, config.compile)
    served = ServedPolicy(config.checkpoint, folder_digest(folder), policy.spec)
    serve_in_foreground(config, policy, served, device, lambda url: print(f"{served.name} is served at {url}", flush=True))
    return 0


def serve_in_foreground(
    config: ServeConfig, policy: ActingPolicy, served: ServedPolicy, device: str, started: Callable[[str], None]
) -> None:
    """Serve a loaded policy until SIGINT or SIGTERM; `started` gets the URL as soon as clients can connect. For the main thread."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        serve(config, policy, served, device, stop, started)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(
    config: ServeConfig, policy: ActingPolicy, served: ServedPolicy, device: str, stop: threading.Event, started: Callable[[str], None]
) -> None:
    """Serve a loaded policy until `stop` is set. Raises OSError for a port that is taken."""
    batcher = Batcher(policy, config.max_batch, config.max_wait_ms / 1000.0, device)
    limit = round(config.max_message_mib * 2**20)
    service = Service(batcher, served, config.seed, limit, os.environ.get(TOKEN_VARIABLE))
    if config.protocol == "openpi":
        serve_openpi(service, config.listen, stop, started)
    else:
        serve_groot(service, config.listen, stop, started, config.allow_kill)


@contextmanager
def served_in_background(config: ServeConfig, policy: ActingPolicy, served: ServedPolicy) -> Iterator[str]:
    """A server in a thread of this process for as long as the block runs; gives its URL.

    Raises OSError for a port that is taken.
    """
    stop, ready = threading.Event(), threading.Event()
    urls: list[str] = []
    failures: list[OSError] = []

    def started(url: str) -> None:
        urls.append(url)
        ready.set()

    def run() -> None:
        try:
            serve(config, policy, served, "cpu", stop, started)
        except OSError as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="policy server")
    thread.start()
    ready.wait()
    try:
        if failures:
            raise failures[0]
        yield urls[0]
    finally:
        stop.set()
        thread.join()
