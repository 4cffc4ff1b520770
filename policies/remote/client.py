"""Clients of the two policy protocols: connect, learn what is served, ask for chunks; every wait has a deadline.

client = open_client("ws://host:8000", timeout_s=30.0)     # openpi; tcp://host:5555 for GR00T
client.served                                              # what our server says of its policy; None for another server
client.ask(observation, views, noise_seed)                 # float32[C, 7]
"""

from __future__ import annotations

import os
from typing import Any, Protocol
from urllib.parse import urlsplit

import zmq
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from vla_rl.episode import VIEWS, Float32, Observation
from vla_rl.policies.remote import groot, openpi
from vla_rl.policies.remote.messages import MessageError, pack_groot, pack_openpi, unpack_groot, unpack_openpi
from vla_rl.policies.remote.served import ENTRY, RemoteError, ServedPolicy
from vla_rl.policies.remote.websocket import open_websocket

TOKEN_VARIABLE = "VLA_RL_API_TOKEN"
"""Environment variable with the token that a server asks for; a token on a command line would be visible to everyone on the machine."""
MAX_ANSWER_BYTES = 64 * 2**20
"""An answer is a chunk of actions; nothing honest is larger."""


class PolicyClient(Protocol):
    """One connection to a policy server; one request at a time."""

    served: ServedPolicy | None
    """What the server says of its policy; None for a server that is not ours."""
    views: tuple[str, ...]
    """Views that the server looks at."""
    chunk_length: int | None
    """Actions of a chunk; None where the server does not say."""

    def ask(self, observation: Observation, noise_seed: int) -> Float32:
        """The chunk float32[C, 7] for an observation. Raises RemoteError."""
        ...

    def close(self) -> None:
        """End the connection; may be called twice."""
        ...


def open_client(url: str, timeout_s: float) -> PolicyClient:
    """Connect to a server by its URL's scheme. Raises RemoteError for another scheme, no server, or none that answers in time."""
    try:
        scheme, _ = urlsplit(url).scheme, urlsplit(url).port
    except ValueError as error:
        raise RemoteError(f"remote policy {url!r}: {error}; write ws://HOST:PORT or tcp://HOST:PORT") from error
    if scheme in ("ws", "wss"):
        return OpenpiClient(url, timeout_s)
    if scheme == "tcp":
        return GrootClient(url, timeout_s)
    raise RemoteError(f"remote policy {url!r} must be ws://HOST:PORT (openpi's protocol) or tcp://HOST:PORT (GR00T's)")


class OpenpiClient:
    """A client of openpi's websocket protocol."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connect and read the server's metadata. Raises RemoteError."""
        self._url, self._timeout_s = url, timeout_s
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Api-Key {token}"} if token else {}
        try:
            self._connection = open_websocket(url, timeout_s, MAX_ANSWER_BYTES, headers)
        except InvalidStatus as error:
            raise RemoteError(f"{url} refused the connection: {error}; if it wants a token, set {TOKEN_VARIABLE}") from error
        except (OSError, InvalidHandshake, InvalidURI, UnicodeError) as error:  # a host like `.x` is no name: UnicodeError
            raise RemoteError(f"no openpi policy server answers at {url} ({error}); start one with 'vla-rl serve CHECKPOINT'") from error
        metadata = unpack_openpi(self._receive())
        described = metadata.get(ENTRY) if isinstance(metadata, dict) else None
        self.served = None if described is None else ServedPolicy.from_dict(described)
        self.views = VIEWS if self.served is None else self.served.spec.views
        self.chunk_length = None if self.served is None else self.served.spec.chunk_length

    def ask(self, observation: Observation, noise_seed: int) -> Float32:
        """See `PolicyClient.ask`."""
        seed = None if self.served is None else noise_seed
        request = pack_openpi(openpi.observation_message(observation, self.views, seed))
        try:
            self._connection.send(request)
        except ConnectionClosed as error:
            raise RemoteError(self._closed(error)) from error
        return openpi.read_actions(unpack_openpi(self._receive()))

    def close(self) -> None:
        """See `PolicyClient.close`."""
        self._connection.close()

    def _receive(self) -> bytes:
        try:
            answer = self._connection.receive(self._timeout_s)
        except TimeoutError as error:
            raise RemoteError(_late(self._url, self._timeout_s)) from error
        except ConnectionClosed as error:
            raise RemoteError(self._closed(error)) from error
        if isinstance(answer, str):
            raise RemoteError(f"{self._url} answered with an error:\n{answer}")
        return answer

    def _closed(self, error: ConnectionClosed) -> str:
        return f"{self._url} closed the connection ({error}); is the server still running, and is the request within its size limit?"


class GrootClient:
    """A client of GR00T's ZMQ protocol."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connect and ask what is served. Raises RemoteError; ZMQ itself would wait for a server for ever."""
        self._url, self._timeout_s = url, timeout_s
        self._token = os.environ.get(TOKEN_VARIABLE)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        try:
            self._socket.connect(url)
            described = self._call(groot.DESCRIBE_ENDPOINT)
            self.served = None if _is_error(described) else ServedPolicy.from_dict(described)
            modalities = self._checked(self._call("get_modality_config"))
            views, chunk_length = groot.views_and_chunk(modalities)
        except zmq.ZMQError as error:
            self.close()
            raise RemoteError(f"{url} is no address to connect to ({error}); write tcp://HOST:PORT") from error
        except (RemoteError, MessageError):
            self.close()
            raise
        self.views: tuple[str, ...] = views
        self.chunk_length: int | None = chunk_length

    def ask(self, observation: Observation, noise_seed: int) -> Float32:
        """See `PolicyClient.ask`."""
        seed = None if self.served is None else noise_seed
        message = groot.observation_message(observation, self.views, seed)
        return groot.read_actions(self._checked(self._call("get_action", message)))

    def close(self) -> None:
        """See `PolicyClient.close`."""
        self._socket.close()
        self._context.term()

    def _call(self, endpoint: str, data: dict[str, Any] | None = None) -> Any:
        request = {"endpoint": endpoint} | ({} if data is None else {"data": data}) | ({"api_token": self._token} if self._token else {})
        self._socket.send(pack_groot(request))
        if not self._socket.poll(round(1000 * self._timeout_s)):
            raise RemoteError(_late(self._url, self._timeout_s))
        return unpack_groot(self._socket.recv())

    def _checked(self, answer: Any) -> Any:
        if _is_error(answer):
            raise RemoteError(f"{self._url} answered with an error:\n{answer['error']}")
        return answer


def _is_error(answer: Any) -> bool:
    return isinstance(answer, dict) and "error" in answer


def _late(url: str, timeout_s: float) -> str:
    return f"{url} gave no answer within {timeout_s:g} s; is a policy server running there? A slow policy needs a larger policy.timeout_s"
