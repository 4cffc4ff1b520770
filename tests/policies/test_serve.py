"""Servers and clients of both protocols over real sockets: batches, health, errors, limits, deadlines, tokens."""

from __future__ import annotations

import errno
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from serving_policies import CHUNK, EchoPolicy
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from vla_rl.cli import main
from vla_rl.config import ConfigError
from vla_rl.episode import STATE_DIM, VIEWS, Observation
from vla_rl.policies.remote import openpi, websocket
from vla_rl.policies.remote.client import TOKEN_VARIABLE, GrootClient, PolicyClient, open_client
from vla_rl.policies.remote.messages import MessageError, pack_openpi
from vla_rl.policies.remote.served import RemoteError, ServedPolicy
from vla_rl.policies.serve.batcher import Batcher
from vla_rl.policies.serve.openpi_server import _Connections
from vla_rl.policies.serve.service import Service
from vla_rl.serving import ServeConfig, served_in_background

PROTOCOLS = ("openpi", "groot")
TIMEOUT_S = 20.0
"""Far beyond what an answer takes, so that a busy machine fails no test."""


@contextmanager
def server(policy: EchoPolicy, protocol: str, **options: Any) -> Iterator[str]:
    """The echo policy behind a server; gives its URL."""
    config = ServeConfig("echo", protocol=protocol, port=0, **options)  # pyright: ignore[reportArgumentType]
    with served_in_background(config, policy, ServedPolicy("echo", "digest", policy.spec)) as url:
        yield url


def observation(number: float, prompt: str = "reach", size: int = 64) -> Observation:
    """An observation that the echo policy's answer identifies."""
    images = {view: np.full((size, size, 3), int(number), np.uint8) for view in VIEWS}
    return Observation(images, np.full(STATE_DIM, number, np.float32), prompt)


def expected(number: float, seed: int) -> list[float]:
    return [number] * 5 + [float(int(number)), float(seed % 1000)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_observation_goes_there_and_its_chunk_comes_back(protocol: str) -> None:
    with server(EchoPolicy(), protocol) as url, closing(open_client(url, TIMEOUT_S)) as client:
        assert client.served is not None and client.served.spec == EchoPolicy().spec
        assert (client.views, client.chunk_length) == (VIEWS, CHUNK)
        for number, seed in ((1.5, 7), (200.0, 2**62 + 1)):
            actions = client.ask(observation(number), seed)
            assert actions.dtype == np.float32 and actions.shape == (CHUNK, 7)
            wanted = expected(number, seed)
            np.testing.assert_allclose(actions, [wanted] * CHUNK, rtol=1e-6 if protocol == "groot" else 0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_clients_that_wait_are_answered_in_one_batch_and_health_answers_meanwhile(protocol: str) -> None:
    gate = threading.Event()
    policy = EchoPolicy(gate)
    with ExitStack() as stack:
        url = stack.enter_context(server(policy, protocol, max_batch=4, max_wait_ms=1000.0 * TIMEOUT_S))
        pool = stack.enter_context(ThreadPoolExecutor(5))
        first = pool.submit(stack.enter_context(closing(open_client(url, TIMEOUT_S))).ask, observation(0.0), 0)
        policy_runs_alone(policy, first)
        clients = [stack.enter_context(closing(open_client(url, TIMEOUT_S))) for _ in range(4)]
        others = [pool.submit(client.ask, observation(float(number)), number) for number, client in enumerate(clients, start=1)]
        assert health(url, protocol) == "ok"
        assert not any(future.done() for future in (first, *others))
        gate.set()
        answers = [future.result(TIMEOUT_S) for future in (first, *others)]
    assert [answer[0, 0] for answer in answers] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert max(policy.batches) == 4 and sum(policy.batches) == 5


def policy_runs_alone(policy: EchoPolicy, asked: Any) -> None:
    """Wait until the first request is being computed; the batch it is in cannot be joined any more."""
    assert policy.entered.wait(TIMEOUT_S), asked.exception(0.0)


def health(url: str, protocol: str) -> str:
    if protocol == "openpi":
        with urllib.request.urlopen(url.replace("ws://", "http://") + "/healthz", timeout=TIMEOUT_S) as answer:
            return answer.read().decode().strip().lower()
    return call_groot(url, {"endpoint": "ping"})["status"]


def call_groot(url: str, request: dict[str, Any]) -> Any:
    """One request through a plain REQ socket, as NVIDIA's client makes it."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(url)
        socket.send(msgpack.packb(request))
        assert socket.poll(int(1000 * TIMEOUT_S))
        return msgpack.unpackb(socket.recv())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("prompt", "said"), [("wrong", "ProcessorError: task: this prompt is refused"), ("bug", "RuntimeError: a bug")])
def test_an_error_reaches_the_client_that_caused_it_and_the_server_lives_on(protocol: str, prompt: str, said: str) -> None:
    """The wrong observation joins a batch with right ones, which are answered all the same."""
    gate = threading.Event()
    policy = EchoPolicy(gate)
    with ExitStack() as stack:
        url = stack.enter_context(server(policy, protocol, max_batch=4))
        clients = [stack.enter_context(closing(open_client(url, TIMEOUT_S))) for _ in range(4)]
        pool = stack.enter_context(ThreadPoolExecutor(4))
        asked = [pool.submit(clients[0].ask, observation(0.0), 0)]
        policy_runs_alone(policy, asked[0])
        prompts = ["reach", prompt, "reach"]
        asked += [pool.submit(client.ask, observation(1.0, p), 1) for client, p in zip(clients[1:], prompts)]
        gate.set()
        with pytest.raises(RemoteError, match=said) as caught:
            asked[2].result(TIMEOUT_S)
        assert ("Traceback" in str(caught.value)) == (prompt == "bug")
        assert [future.result(TIMEOUT_S)[0, 0] for future in (asked[0], asked[1], asked[3])] == [0.0, 1.0, 1.0]
        again = stack.enter_context(closing(open_client(url, TIMEOUT_S)))
        assert again.ask(observation(9.0), 0)[0, 0] == 9.0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_request_over_the_limit_is_refused_and_the_server_lives_on(protocol: str) -> None:
    said = r"message too big|at most 104858 are allowed"
    with server(EchoPolicy(), protocol, max_message_mib=0.1) as url:
        with closing(open_client(url, TIMEOUT_S)) as client, pytest.raises(RemoteError, match=said):
            client.ask(observation(1.0, size=200), 0)
        with closing(open_client(url, TIMEOUT_S)) as client:
            assert client.ask(observation(2.0), 0)[0, 0] == 2.0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_server_that_is_too_slow_and_one_that_is_not_there_are_named(protocol: str) -> None:
    gate = threading.Event()
    with server(EchoPolicy(gate), protocol) as url, closing(open_client(url, TIMEOUT_S)) as client:
        hurry(client, 0.2)
        began = time.monotonic()
        with pytest.raises(RemoteError, match=r"no answer within 0\.2 s"):
            client.ask(observation(1.0), 0)
        assert time.monotonic() - began < TIMEOUT_S / 2
        gate.set()
    with pytest.raises(RemoteError, match=f"{url}.*(start one with|is a policy server running there)"):
        open_client(url, 0.5)


def hurry(client: PolicyClient, timeout_s: float) -> None:
    client._timeout_s = timeout_s  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_token_is_asked_for(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with server(EchoPolicy(), protocol) as url:
        with closing(open_client(url, TIMEOUT_S)) as client:
            assert client.ask(observation(3.0), 0)[0, 0] == 3.0
        for wrong in ("guess", ""):
            monkeypatch.setenv(TOKEN_VARIABLE, wrong)
            with pytest.raises(RemoteError, match=r"token|401"):
                open_client(url, TIMEOUT_S)


def test_groots_server_ends_on_request_only_where_that_is_allowed() -> None:
    with server(EchoPolicy(), "groot") as url:
        assert "--allow-kill" in call_groot(url, {"endpoint": "kill"})["error"]
        assert call_groot(url, {"endpoint": "ping"})["status"] == "ok"
        assert "did you mean 'reset'" in call_groot(url, {"endpoint": "rest"})["error"]
        assert "no message" in call_raw(url, b"\xc1")["error"] and "is a dictionary" in call_raw(url, msgpack.packb([1]))["error"]
    with server(EchoPolicy(), "groot", allow_kill=True) as url:
        assert call_groot(url, {"endpoint": "kill"})["status"] == "ok"


def call_raw(url: str, message: bytes) -> Any:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(url)
        socket.send(message)
        assert socket.poll(int(1000 * TIMEOUT_S))
        return msgpack.unpackb(socket.recv())


def test_noise_of_clients_without_seeds_differs_by_request_and_repeats_with_the_server_seed() -> None:
    """Through NVIDIA's plain requests, which carry no seed."""

    def seeds_of(seed: int) -> list[float]:
        with server(EchoPolicy(), "groot", seed=seed) as url, closing(open_client(url, TIMEOUT_S)) as client:
            client.served = None
            return [float(client.ask(observation(1.0), 123)[0, 6]) for _ in range(3)]

    first = seeds_of(0)
    assert len(set(first)) == 3 and seeds_of(0) == first and seeds_of(1) != first


def test_wrong_urls_and_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RemoteError, match=r"must be ws://HOST:PORT"):
        open_client("http://localhost:8000", 1.0)
    with pytest.raises(RemoteError, match=r"Port out of range .* write ws://HOST:PORT"):
        open_client("ws://localhost:99999", 1.0)
    with pytest.raises(RemoteError, match=r"no openpi policy server answers at ws://\.host:8000"):
        open_client("ws://.host:8000", 1.0)
    with pytest.raises(RemoteError, match="no address to connect to"):
        open_client("tcp://localhost", 1.0)
    for values, said in (
        ({"max_batch": 0}, "max_batch is 0"),
        ({"port": 70000}, "port is 70000"),
        ({"max_message_mib": 0.0}, "above 0"),
        ({"allow_kill": True}, "belongs to protocol 'groot'"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServeConfig("x", **values)  # pyright: ignore[reportArgumentType]
    assert main(["serve"]) == 2 and "first argument is a policy's folder" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "nowhere")]) == 2 and "nowhere is not a folder" in capsys.readouterr().err


def test_a_port_that_is_taken_is_an_error() -> None:
    for protocol in PROTOCOLS:
        with server(EchoPolicy(), protocol) as url:
            config = ServeConfig("echo", protocol=protocol, port=int(url.rpartition(":")[2]))  # pyright: ignore[reportArgumentType]
            policy = EchoPolicy()
            with (
                pytest.raises(OSError, match=r"(?i)address already in use"),
                served_in_background(config, policy, ServedPolicy("e", "d", policy.spec)),
            ):
                pass


def test_a_client_that_cannot_be_let_in_does_not_end_the_server() -> None:
    """Out of file descriptors for a moment: accepting goes on. It ends when the server is stopped and its socket shut down."""
    policy, stop = EchoPolicy(), threading.Event()
    service = Service(Batcher(policy, 1, 0.0), ServedPolicy("echo", "digest", policy.spec), 0, 2**20)
    connections = _Connections(service)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        causes = iter([OSError(errno.EMFILE, "Too many open files")])

        class Full:
            """The listener of a process that has no descriptor left, once."""

            def accept(self) -> Any:
                for cause in causes:
                    raise cause
                return listener.accept()

        accepting = threading.Thread(target=connections.accept, args=(Full(), stop))
        accepting.start()
        with closing(open_client(f"ws://127.0.0.1:{listener.getsockname()[1]}", TIMEOUT_S)) as client:
            assert client.ask(observation(3.0), 0)[0, 0] == 3.0
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(TIMEOUT_S)
    assert not accepting.is_alive()
    connections.end()


def test_who_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that nobody takes up ends the connection, in place of a thread that waits for ever (and a server that never stops)."""
    monkeypatch.setattr(websocket, "SEND_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs, closing(websocket.Websocket(ours, ServerProtocol(state=State.OPEN))) as connection:
        connection.send(bytes(2**24))
        with pytest.raises(ConnectionClosed):
            connection.receive(TIMEOUT_S)


def test_what_a_client_sent_ahead_does_not_keep_a_server_from_ending() -> None:
    """A client that sends without waiting for answers: the request under way is finished, those behind it are not begun."""
    gate, ahead = threading.Event(), 5
    policy = EchoPolicy(gate)
    service = Service(Batcher(policy, 1, 0.0), ServedPolicy("echo", "digest", policy.spec), 0, 2**20)
    connections, stop = _Connections(service), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=connections.accept, args=(listener, stop))
        accepting.start()
        with closing(websocket.open_websocket(f"ws://127.0.0.1:{listener.getsockname()[1]}", TIMEOUT_S, 2**20, {})) as client:
            client.receive(TIMEOUT_S)
            for number in range(ahead):
                client.send(pack_openpi(openpi.observation_message(observation(float(number)), VIEWS, number)))
            assert policy.entered.wait(TIMEOUT_S)
            ending = threading.Thread(target=connections.end)
            ending.start()
            assert connections._ending.wait(TIMEOUT_S)
            gate.set()
            ending.join(TIMEOUT_S)
            assert not ending.is_alive() and policy.batches == [1]
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(TIMEOUT_S)


def test_closing_does_not_wait_for_somebody_who_keeps_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs, closing(websocket.Websocket(theirs, ClientProtocol(parse_uri("ws://peer"), state=State.OPEN))) as peer:
        connection = websocket.Websocket(ours, ServerProtocol(state=State.OPEN))
        closed = threading.Event()

        def keep_sending() -> None:
            while not closed.is_set() and peer._protocol.state is State.OPEN:
                peer.send(b"more")

        sending, leaving = threading.Thread(target=keep_sending), threading.Thread(target=connection.close)
        sending.start()
        leaving.start()
        leaving.join(TIMEOUT_S)
        left = not leaving.is_alive()
        closed.set()
        for thread in (sending, leaving):
            thread.join(TIMEOUT_S)
        assert left


def test_an_answer_that_is_no_message_is_named() -> None:
    """A server that speaks ZMQ but another language."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        answered = threading.Thread(target=lambda: (socket.recv(), socket.send(b"\xc1")))
        answered.start()
        with pytest.raises(MessageError, match="no message of the protocol"):
            GrootClient(f"tcp://127.0.0.1:{port}", TIMEOUT_S)
        answered.join()
