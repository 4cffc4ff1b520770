"""A websocket connection over a blocking socket, for one thread: no event loop and no second thread between the wire and its reader.

The protocol itself (handshake, masking, fragments, pings, closing, size limits) is the `websockets` package's sans-I/O implementation.
"""

from __future__ import annotations

import socket
import ssl
import time
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidHandshake
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import Event, Protocol, State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

CHUNK_BYTES = 2**18
"""Most bytes taken from the socket at once."""
BUFFER_BYTES = 2**22
"""Asked for as the kernel's buffer on either side, so that a request crosses without waiting for its reader."""
SEND_TIMEOUT_S = 60.0
"""How long the other side may take to read a message; one that does not is left."""
CLOSE_TIMEOUT_S = 1.0
"""How long the other side may take to answer a close."""


class Websocket:
    """Messages over a socket, by a protocol that has not shaken hands yet; `open_websocket` and `accept_websocket` do that."""

    def __init__(self, connection: socket.socket, protocol: Protocol) -> None:
        self._socket, self._protocol = connection, protocol
        self._events: list[Event] = []

    def send(self, message: bytes | str) -> None:
        """Send one message. Raises ConnectionClosed if the connection has ended."""
        if self._protocol.state is not State.OPEN:
            raise self._how_it_closed()
        if isinstance(message, str):
            self._protocol.send_text(message.encode())
        else:
            self._protocol.send_binary(message)
        self.flush()

    def receive(self, timeout_s: float | None) -> bytes | str:
        """The next message; None waits for ever. Raises TimeoutError, or ConnectionClosed once the connection has ended."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        parts: list[bytes] = []
        text = False
        while True:
            frame = self.next_event(deadline_s)
            assert isinstance(frame, Frame), "the handshake is over"
            if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                text = text or frame.opcode is Opcode.TEXT
                parts.append(frame.data if isinstance(frame.data, bytes) else bytes(frame.data))
                if frame.fin:
                    whole = parts[0] if len(parts) == 1 else b"".join(parts)
                    return whole.decode() if text else whole

    def next_event(self, deadline_s: float | None) -> Event:
        """The next frame, or the handshake's request or response; pings are answered on the way."""
        while not self._events:
            if deadline_s is not None and deadline_s <= time.monotonic():
                raise TimeoutError
            self._socket.settimeout(None if deadline_s is None else deadline_s - time.monotonic())
            try:
                data = self._socket.recv(CHUNK_BYTES)
            except ConnectionError:
                data = b""
            if data:
                self._protocol.receive_data(data)
            elif not self._protocol.eof_sent or self._protocol.state is not State.CLOSED:
                self._protocol.receive_eof()
            self.flush()
            self._events = self._protocol.events_received()
            if not self._events and self._protocol.state is State.CLOSED:
                if self._protocol.handshake_exc is not None:
                    raise self._protocol.handshake_exc
                raise self._protocol.close_exc
        return self._events.pop(0)

    def _how_it_closed(self) -> ConnectionClosed:
        """What ended a connection that is closing or closed."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            while True:
                self.next_event(deadline_s)
        except ConnectionClosed as error:
            return error
        except TimeoutError:
            return ConnectionClosedError(None, None)

    def flush(self) -> None:
        """Write what the protocol wants written; a peer that is gone, or does not read, is noticed by the next receive."""
        self._socket.settimeout(SEND_TIMEOUT_S)
        for data in self._protocol.data_to_send():
            try:
                if data:
                    self._socket.sendall(data)
                else:
                    self._socket.shutdown(socket.SHUT_WR)
            except OSError as error:
                if isinstance(error, TimeoutError):  # half a message is out: nothing can follow it
                    self._leave()
                return

    def _leave(self) -> None:
        """End the connection without a word."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self, code: int = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        """Say goodbye, wait a moment for the answer, and free the socket; may be called twice."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
            self.flush()
            deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
            try:
                while True:  # what was on its way, or comes from somebody who does not listen
                    self.receive(max(0.0, deadline_s - time.monotonic()))
            except (ConnectionClosed, TimeoutError, UnicodeDecodeError):
                pass
        self._socket.close()


def open_websocket(url: str, timeout_s: float, max_bytes: int, headers: dict[str, str]) -> Websocket:
    """Connect to a websocket server. Raises OSError, TimeoutError, or what `websockets` raises for a handshake that fails."""
    address, parts = parse_uri(url), urlsplit(url)
    connection: socket.socket = socket.create_connection((address.host, address.port), timeout_s)
    _prepare(connection)
    if parts.scheme == "wss":
        connection = ssl.create_default_context().wrap_socket(connection, server_hostname=address.host)
    protocol = ClientProtocol(address, max_size=max_bytes)
    websocket = Websocket(connection, protocol)
    request = protocol.connect()
    request.headers.update(Headers(headers))
    protocol.send_request(request)
    websocket.flush()
    deadline_s = time.monotonic() + timeout_s
    response = websocket.next_event(deadline_s)
    assert isinstance(response, Response), "a client's first event is the response"
    if protocol.handshake_exc is not None:
        connection.close()
        raise protocol.handshake_exc
    return websocket


def accept_websocket(connection: socket.socket, max_bytes: int, timeout_s: float) -> tuple[Websocket, ServerProtocol, Request]:
    """Read the request of a client that has connected; the caller accepts or rejects it through the protocol.

    Raises TimeoutError, or what `websockets` raises for something else than a request.
    """
    _prepare(connection)
    protocol = ServerProtocol(max_size=max_bytes)
    websocket = Websocket(connection, protocol)
    request = websocket.next_event(time.monotonic() + timeout_s)
    if not isinstance(request, Request):
        raise InvalidHandshake("a client's first message is a request")
    return websocket, protocol, request


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, name, BUFFER_BYTES)
