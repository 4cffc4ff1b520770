"""openpi's websocket protocol: metadata at once, then one answer for each observation (openpi `websocket_policy_server.py`).

A thread per connection receives, asks the batcher (in which it may compute for everyone) and sends. An error is a text frame, followed by a
close with code 1011; a message over the limit is closed with code 1009. `GET /healthz` is a connection, so it has a thread of its own too.
"""

from __future__ import annotations

import http
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import CloseCode
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from vla_rl.policies.remote.messages import MessageError, pack_openpi, unpack_openpi
from vla_rl.policies.remote.openpi import ACTIONS_KEY, read_observation
from vla_rl.policies.remote.served import ENTRY
from vla_rl.policies.remote.websocket import Websocket, accept_websocket
from vla_rl.policies.serve.service import Listen, Service, error_text

_LOG = logging.getLogger(__name__)
HEALTH_PATH = "/healthz"
TOKEN_PREFIX = "Api-Key "
"""openpi's clients send their token as `Authorization: Api-Key TOKEN`."""
ACCEPT_AGAIN_S = 0.5
"""Pause after a client that could not be let in."""
HANDSHAKE_TIMEOUT_S = 10.0
"""How long a client may take to say what it wants."""


def serve_openpi(service: Service, listen: Listen, stop: threading.Event, started: Callable[[str], None]) -> None:
    """Serve until `stop` is set; `started` gets the URL as soon as clients can connect. Raises OSError for a port that is taken."""
    service.batcher.clients = 0
    server = _Connections(service)
    with socket.create_server((listen.host, listen.port), backlog=128) as listener:
        accepting = threading.Thread(target=server.accept, args=(listener, stop), name="accept")
        accepting.start()
        started(f"ws://{listen.host}:{listener.getsockname()[1]}")
        stop.wait()
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        accepting.join()
    server.end()


class _Connections:
    """The open connections of a server, a thread each."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._ending = threading.Event()

    def accept(self, listener: socket.socket, stop: threading.Event) -> None:
        """Give every client a thread, until `stop` is set and the listening socket shut down."""
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not stop.wait(ACCEPT_AGAIN_S):  # too many open files, or a client that was gone at once: others still come
                    _LOG.warning("a client could not be let in (%s); trying again", error)
                continue
            thread = threading.Thread(target=self._serve, args=(connection, f"openpi:{next(self._numbers)}"), name="client", daemon=True)
            with self._lock:
                self._open[connection] = thread
            thread.start()

    def end(self) -> None:
        """Shut every connection down and wait for its thread, which finishes the request it is in, and begins none behind it."""
        self._ending.set()
        with self._lock:
            connections = dict(self._open)
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RD)
            except OSError:
                continue
        for thread in connections.values():
            thread.join()

    def _serve(self, connection: socket.socket, client: str) -> None:
        """One connection, from its request to its end; whatever it sends, the others go on."""
        try:
            websocket, protocol, request = accept_websocket(connection, self._service.max_message_bytes, HANDSHAKE_TIMEOUT_S)
            response = self._admit(protocol, request)
            protocol.send_response(response)
            websocket.flush()
            if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS:
                self._talk(websocket, client)
        except (ConnectionClosed, InvalidHandshake, TimeoutError, OSError):
            pass  # the client is gone, or never was one
        finally:
            with self._lock:
                del self._open[connection]
            connection.close()

    def _admit(self, protocol: ServerProtocol, request: Request) -> Response:
        if request.path == HEALTH_PATH:
            return protocol.reject(http.HTTPStatus.OK, "OK\n")
        if not self._service.admits(request.headers.get("Authorization", "").removeprefix(TOKEN_PREFIX)):
            return protocol.reject(http.HTTPStatus.UNAUTHORIZED, "the API token is missing or wrong\n")
        return protocol.accept(request)

    def _talk(self, websocket: Websocket, client: str) -> None:
        """Metadata, then answers until the client leaves or sends something wrong."""
        with self._lock:
            self._service.batcher.clients += 1
        try:
            websocket.send(pack_openpi({ENTRY: self._service.served.to_dict()}))
            previous_ms: float | None = None
            for index in itertools.count():
                message = websocket.receive(None)
                if self._ending.is_set():
                    return
                began = time.perf_counter()
                reply = answer_openpi(self._service, message, client, index)
                if previous_ms is not None:
                    reply["server_timing"]["prev_total_ms"] = previous_ms
                websocket.send(pack_openpi(reply))
                previous_ms = 1000.0 * (time.perf_counter() - began)
        except ConnectionClosed:
            return
        except Exception as error:  # noqa: BLE001 (it is told to the client that caused it; the others go on)
            websocket.send(error_text(error))
            websocket.close(CloseCode.INTERNAL_ERROR, "the error is in the previous frame")
        finally:
            with self._lock:
                self._service.batcher.clients -= 1


def answer_openpi(service: Service, message: str | bytes, client: str, index: int) -> dict[str, Any]:
    """The answer to request number `index` of a client. Raises MessageError, or what the policy raises for the observation."""
    if isinstance(message, str):
        raise MessageError("requests are binary msgpack frames, this one is text")
    began = time.perf_counter()
    observation, seed = read_observation(unpack_openpi(message), service.served.spec.views)
    answer = service.batcher.ask(observation, service.noise_seed(client, index) if seed is None else seed)
    infer_ms = 1000.0 * (time.perf_counter() - began)
    return {ACTIONS_KEY: answer.actions_CA, "policy_timing": {"infer_ms": answer.infer_ms}, "server_timing": {"infer_ms": infer_ms}}
