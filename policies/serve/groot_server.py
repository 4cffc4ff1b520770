"""GR00T's ZMQ protocol: one msgpack request, one msgpack answer (Isaac-GR00T `gr00t/policy/server_client.py`).

NVIDIA's server answers one request at a time through a REP socket. This one listens with a ROUTER socket, which the same clients
(REQ sockets) talk to, so that the requests of several are answered in one batch, and `ping` is answered while the policy computes.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from vla_rl.config import nearest_name
from vla_rl.policies.remote.groot import DESCRIBE_ENDPOINT, actions_message, modalities, read_request
from vla_rl.policies.remote.messages import MessageError, pack_groot, unpack_groot
from vla_rl.policies.serve.service import Listen, Service, error_text

ACTIVE_S = 5.0
"""A client counts as one that may ask for this long after its last request: ZMQ does not say when a peer leaves."""
HARD_LIMIT = 4
"""ZMQ drops the connection of a peer that sends more than this many times the limit; below that, the error is told."""
MOST_REQUESTS = 64
"""Observations that can wait in the batcher at the same time, a thread each."""


@dataclass
class _Clients:
    """Who asked lately, by ZMQ identity."""

    last_s: dict[bytes, float] = field(default_factory=dict[bytes, float])

    def asked(self, identity: bytes) -> int:
        """Note a request; returns how many clients may ask now."""
        now = time.monotonic()
        self.last_s[identity] = now
        self.last_s = {client: last for client, last in self.last_s.items() if now - last < ACTIVE_S}
        return len(self.last_s)


def serve_groot(service: Service, listen: Listen, stop: threading.Event, started: Callable[[str], None], allow_kill: bool = False) -> None:
    """Serve until `stop` is set (or a client says `kill`, if allowed); `started` gets the URL as soon as clients can connect.

    Raises OSError for a port that is taken or an address that is not this machine's.
    """
    with ThreadPoolExecutor(MOST_REQUESTS, thread_name_prefix="request") as threads:
        asyncio.run(_serve(service, listen, stop, started, allow_kill, threads))


async def _serve(
    service: Service,
    listen: Listen,
    stop: threading.Event,
    started: Callable[[str], None],
    allow_kill: bool,
    threads: ThreadPoolExecutor,
) -> None:
    asyncio.get_running_loop().set_default_executor(threads)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.MAXMSGSIZE, HARD_LIMIT * service.max_message_bytes)
    socket.setsockopt(zmq.LINGER, 1000)
    clients, numbers = _Clients(), itertools.count()
    running: set[asyncio.Task[None]] = set()

    async def reply(envelope: list[bytes], message: bytes) -> None:
        answer = await _reply(service, message, f"groot:{next(numbers)}", stop if allow_kill else None)
        await socket.send_multipart([*envelope, answer])

    async def listen_on() -> None:
        while True:
            *envelope, message = await socket.recv_multipart()
            service.batcher.clients = clients.asked(envelope[0])
            task = asyncio.create_task(reply(envelope, message))
            running.add(task)
            task.add_done_callback(running.discard)

    try:
        started(f"tcp://{listen.host}:{_bind(socket, listen)}")
        listener = asyncio.create_task(listen_on())
        await asyncio.to_thread(stop.wait)
        listener.cancel()
        await asyncio.gather(*running)
    finally:
        socket.close()
        context.term()


def _bind(socket: zmq.asyncio.Socket, listen: Listen) -> int:
    """Listen, and return the port. Raises OSError."""
    try:
        if not listen.port:
            return socket.bind_to_random_port(f"tcp://{listen.host}")
        socket.bind(f"tcp://{listen.host}:{listen.port}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot listen on tcp://{listen.host}:{listen.port} ({error.strerror})") from error
    return listen.port


async def _reply(service: Service, message: bytes, client: str, killable: threading.Event | None) -> bytes:
    """The answer to one request; whatever goes wrong is an answer too, because a client waits for exactly one."""
    try:
        if len(message) > service.max_message_bytes:
            raise MessageError(f"the request has {len(message)} bytes, at most {service.max_message_bytes} are allowed")
        request = unpack_groot(message)
        if not isinstance(request, dict):
            raise MessageError(f"a request is a dictionary with 'endpoint' and 'data', not {type(request).__name__}")
        if not service.admits(request.get("api_token")):
            raise MessageError("the API token is missing or wrong")
        return pack_groot(await _call(service, request, client, killable))
    except Exception as error:  # noqa: BLE001 (it is told to the client that caused it; the others go on)
        return pack_groot({"error": error_text(error)})


async def _call(service: Service, request: dict[str, Any], client: str, killable: threading.Event | None) -> Any:
    endpoint = request.get("endpoint", "get_action")
    if endpoint == "get_action":
        return await _get_action(service, request.get("data"), client)
    if endpoint == "kill":
        return _kill(killable)
    answers: dict[str, Any] = {
        "ping": {"status": "ok", "message": "Server is running"},
        "reset": {},
        "get_modality_config": modalities(service.served.spec),
        DESCRIBE_ENDPOINT: service.served.to_dict(),
    }
    if endpoint not in answers:
        raise MessageError(f"Unknown endpoint: {endpoint!r}{nearest_name(str(endpoint), ['get_action', 'kill', *answers])}")
    return answers[endpoint]


async def _get_action(service: Service, data: Any, client: str) -> list[Any]:
    observations, seeds, flat = read_request(data, service.served.spec.views)
    if seeds is None:
        seeds = [service.noise_seed(client, row) for row in range(len(observations))]
    service.batcher.clients = max(service.batcher.clients, len(observations))
    asked = [asyncio.to_thread(service.batcher.ask, observation, seed) for observation, seed in zip(observations, seeds)]
    answers = await asyncio.gather(*asked)
    return actions_message(np.stack([answer.actions_CA for answer in answers]), flat)


def _kill(killable: threading.Event | None) -> dict[str, str]:
    if killable is None:
        raise MessageError("this server does not end on a client's request; start it with --allow-kill, or stop it where it runs")
    killable.set()
    return {"status": "ok", "message": "Server is ending"}
