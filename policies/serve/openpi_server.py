"""openpi's websocket protocol: metadata at once, then one answer for each observation (openpi `websocket_policy_server.py`).

An error is a text frame, followed by a close with code 1011; a message over the limit is closed with code 1009 by the websocket layer.
`GET /healthz` answers while the policy computes, because the policy has a thread of its own.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import time
from collections.abc import Callable
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from vla_rl.policies.remote.messages import MessageError, pack_openpi, unpack_openpi
from vla_rl.policies.remote.openpi import ACTIONS_KEY, read_observation
from vla_rl.policies.remote.served import ENTRY
from vla_rl.policies.serve.service import Listen, Service, error_text

HEALTH_PATH = "/healthz"
TOKEN_PREFIX = "Api-Key "
"""openpi's clients send their token as `Authorization: Api-Key TOKEN`."""


async def serve_openpi(service: Service, listen: Listen, stop: asyncio.Event, started: Callable[[str], None]) -> None:
    """Serve until `stop` is set; `started` gets the URL as soon as clients can connect. Raises OSError for a port that is taken."""
    numbers = itertools.count()

    async def talk(connection: ServerConnection) -> None:
        service.batcher.clients += 1
        try:
            await _talk(service, connection, f"openpi:{next(numbers)}")
        finally:
            service.batcher.clients -= 1

    def admit(connection: ServerConnection, request: Request) -> Response | None:
        if request.path == HEALTH_PATH:
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if not service.admits(request.headers.get("Authorization", "").removeprefix(TOKEN_PREFIX)):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "the API token is missing or wrong\n")
        return None

    service.batcher.clients = 0
    async with serve(
        talk, listen.host, listen.port, process_request=admit, compression=None, max_size=service.max_message_bytes, max_queue=1
    ) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        started(f"ws://{listen.host}:{port}")
        await stop.wait()


async def _talk(service: Service, connection: ServerConnection, client: str) -> None:
    """One connection: metadata, then answers until the client leaves or sends something wrong."""
    try:
        await connection.send(pack_openpi({ENTRY: service.served.to_dict()}))
        previous_ms: float | None = None
        for index in itertools.count():
            message = await connection.recv()
            began = time.perf_counter()
            reply = await _answer(service, message, client, index)
            if previous_ms is not None:
                reply["server_timing"]["prev_total_ms"] = previous_ms
            await connection.send(pack_openpi(reply))
            previous_ms = 1000.0 * (time.perf_counter() - began)
    except ConnectionClosed:
        return
    except Exception as error:  # noqa: BLE001 (it is told to the client that caused it; the others go on)
        await _refuse(connection, error)


async def _answer(service: Service, message: str | bytes, client: str, index: int) -> dict[str, Any]:
    if isinstance(message, str):
        raise MessageError("requests are binary msgpack frames, this one is text")
    began = time.perf_counter()
    observation, seed = read_observation(unpack_openpi(message), service.served.spec.views)
    noise_seed = service.noise_seed(client, index) if seed is None else seed
    answer = await asyncio.wrap_future(service.batcher.submit(observation, noise_seed))
    infer_ms = 1000.0 * (time.perf_counter() - began)
    return {ACTIONS_KEY: answer.actions_CA, "policy_timing": {"infer_ms": answer.infer_ms}, "server_timing": {"infer_ms": infer_ms}}


async def _refuse(connection: ServerConnection, error: Exception) -> None:
    try:
        await connection.send(error_text(error))
        await connection.close(CloseCode.INTERNAL_ERROR, "the error is in the previous frame")
    except ConnectionClosed:
        return
