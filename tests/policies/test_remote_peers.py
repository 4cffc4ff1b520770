"""Against others: openpi's own client drives our server; our clients drive servers written from the protocols' descriptions."""

from __future__ import annotations

import io
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from serving_policies import EchoPolicy
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from vla_rl.bench.openpi_environment import openpi_python
from vla_rl.conventions import Conventions
from vla_rl.episode import STATE_DIM, VIEWS, Observation
from vla_rl.policies.remote.client import open_client
from vla_rl.policies.remote.served import RemoteError, ServedPolicy
from vla_rl.remote_actor import RemoteActor
from vla_rl.serving import ServeConfig, served_in_background

TIMEOUT_S = 20.0
CHUNK = 6


def test_openpis_own_client_drives_our_server() -> None:
    """The real package, in an interpreter of its own, over two connections with an error between them."""
    python, policy = openpi_python(), EchoPolicy()
    config = ServeConfig("echo", port=0)
    with served_in_background(config, policy, ServedPolicy("echo", "digest", policy.spec)) as url:
        script = Path(__file__).with_name("openpi_script.py")
        done = subprocess.run([str(python), "-P", str(script), url], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert int(seen["numpy"].split(".")[0]) < 2
    assert ServedPolicy.from_dict(seen["metadata"]["vla_rl"]).spec == policy.spec
    for number, chunk in zip((3.0, 4.0), seen["actions"]):
        assert np.asarray(chunk).shape == (4, 7) and {row[0] for row in chunk} == {number}
        assert {row[5] for row in chunk} == {number}, "the picture's corner"
    assert seen["dtype"] == "float32"
    assert seen["keys"] == [["actions", "policy_timing", "server_timing"]] * 2
    assert seen["timing"] == [["infer_ms"], ["infer_ms", "prev_total_ms"]]
    assert "this prompt is refused" in seen["error"] and seen["after"] == 6.0


def observation(number: float) -> Observation:
    images = {view: np.full((16, 16, 3), index, np.uint8) for index, view in enumerate(VIEWS)}
    return Observation(images, np.full(STATE_DIM, number, np.float32), "pick up the milk")


@contextmanager
def openpi_server(metadata: dict[str, Any], shape: tuple[int, ...] = (CHUNK, 7)) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A websocket server from the protocol's description: msgpack by hand, float64 actions that carry the state's first number."""
    requests: list[dict[str, Any]] = []

    def array(value: np.ndarray) -> dict[bytes, Any]:
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}

    def handle(connection: ServerConnection) -> None:
        connection.send(msgpack.packb(metadata))
        try:
            while True:
                request = msgpack.unpackb(connection.recv())
                requests.append(request)
                if not np.frombuffer(request["observation/state"][b"data"], "<f4")[0] >= 0:
                    connection.send("Traceback: a negative state")
                    connection.close(1011, "Internal server error. Traceback included in previous frame.")
                    return
                number = float(np.frombuffer(request["observation/state"][b"data"], "<f4")[0])
                connection.send(msgpack.packb({"actions": array(np.full(shape, number)), "policy_timing": {"infer_ms": 1.0}}))
        except ConnectionClosed:
            return

    with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", requests
        server.shutdown()
        thread.join()


def test_our_client_drives_an_openpi_server() -> None:
    with openpi_server({"reset_pose": [0.0]}) as (url, requests), closing(open_client(url, TIMEOUT_S)) as client:
        assert client.served is None and client.chunk_length is None
        actions = client.ask(observation(2.0), 99)
        assert actions.dtype == np.float32 and actions.tolist() == [[2.0] * 7] * CHUNK
        with pytest.raises(RemoteError, match="Traceback: a negative state"):
            client.ask(observation(-1.0), 0)
        with pytest.raises(RemoteError, match="closed the connection"):
            client.ask(observation(1.0), 0)
    assert set(requests[0]) == {"observation/image", "observation/wrist_image", "observation/state", "prompt"}, "nothing of ours is sent"
    image = requests[0]["observation/wrist_image"]
    assert (image[b"dtype"], image[b"shape"], set(image[b"data"])) == ("|u1", [16, 16, 3], {1})


def test_an_openpi_server_of_another_robot_is_named() -> None:
    with (
        openpi_server({}, shape=(CHUNK, 14)) as (url, _),
        closing(open_client(url, TIMEOUT_S)) as client,
        pytest.raises(ValueError, match=r"float\[C, 7\].*got \[6, 14\]"),
    ):
        client.ask(observation(1.0), 0)


@contextmanager
def groot_server(video: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """A REP socket that answers as NVIDIA's `PolicyServer` does, msgpack and npy by hand."""
    requests: list[Any] = []

    def npy(value: np.ndarray) -> dict[str, Any]:
        file = io.BytesIO()
        np.save(file, value)
        return {"__ndarray_class__": True, "as_npy": file.getvalue()}

    def modality(steps: int, keys: list[str]) -> dict[str, Any]:
        fields = {"delta_indices": list(range(steps)), "modality_keys": keys, "action_configs": None}
        return {"__ModalityConfig_class__": True, "as_json": fields}

    def answer(request: Any) -> Any:
        parts = ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
        if request["endpoint"] == "get_modality_config":
            return {"video": modality(1, video), "state": modality(1, parts), "action": modality(CHUNK, parts)}
        if request["endpoint"] == "get_action":
            state = request["data"]["observation"]["state"]
            x = np.load(io.BytesIO(state["x"]["as_npy"]))
            assert x.shape == (1, 1, 1) and np.load(io.BytesIO(state["gripper"]["as_npy"])).shape == (1, 1, 2)
            actions = {part: npy(np.full((1, CHUNK, 1), x.item(), np.float32)) for part in parts}
            return [actions | {"gripper": npy(np.ones((1, CHUNK, 1), np.float32))}, {}]
        return {"error": f"Unknown endpoint: {request['endpoint']}"}

    def run(socket: Any) -> None:
        while (request := msgpack.unpackb(socket.recv()))["endpoint"] != "stop":
            requests.append(request)
            socket.send(msgpack.packb(answer(request)))
        socket.send(b"\xc0")

    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        url = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        thread = threading.Thread(target=run, args=(socket,))
        thread.start()
        yield url, requests
        with context.socket(zmq.REQ) as last:
            last.connect(url)
            last.send(msgpack.packb({"endpoint": "stop"}))
            last.recv()
        thread.join()


def test_our_client_drives_a_groot_server() -> None:
    with groot_server(["image", "wrist_image"]) as (url, requests), closing(open_client(url, TIMEOUT_S)) as client:
        assert client.served is None and (client.views, client.chunk_length) == (VIEWS, CHUNK)
        actions = client.ask(observation(0.5), 99)
        assert actions.tolist() == [[0.5] * 6 + [-1.0]] * CHUNK, "their gripper 1 is open, ours -1"
        sent = requests[-1]["data"]
        said = sent["observation"]["language"]
        assert sent["options"] is None and said == {"annotation.human.action.task_description": [["pick up the milk"]]}
        frame = np.load(io.BytesIO(sent["observation"]["video"]["wrist_image"]["as_npy"]))
        assert frame.shape == (1, 1, 16, 16, 3) and (frame == 1).all()


def test_what_another_server_does_not_say_must_be_given_and_its_protocols_conventions_count() -> None:
    with openpi_server({}) as (url, _):
        with pytest.raises(RemoteError, match=r"set policy\.executed_horizon"):
            RemoteActor(url, 1, TIMEOUT_S)
        with closing(RemoteActor(url, 1, TIMEOUT_S, executed_horizon=5)) as actor:
            assert (actor.needs.chunk_length, actor.needs.views, actor.needs.conventions) == (5, VIEWS, Conventions())
    with groot_server(["image"]) as (url, _):
        with pytest.raises(RemoteError, match=f"executed_horizon is 9; a chunk of {url} has {CHUNK} actions"):
            RemoteActor(url, 1, TIMEOUT_S, executed_horizon=9)
        with closing(RemoteActor(url, 1, TIMEOUT_S, executed_horizon=3)) as actor:
            assert actor.needs.views == ("image",)
    with groot_server(["ego_view"]) as (url, _), pytest.raises(ValueError, match="ego_view"):
        open_client(url, TIMEOUT_S)
