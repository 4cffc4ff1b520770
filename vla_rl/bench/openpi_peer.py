"""openpi's side of `vla-rl bench serve`, run by the interpreter that has openpi-client; imports nothing of ours.

python openpi_peer.py server                          a null policy behind openpi's server loop, written from its description:
                                                      receive, infer, send, in the event loop (openpi `websocket_policy_server.py`)
python openpi_peer.py client URL CLIENTS REQUESTS     openpi's own client, a thread and a connection each
"""

import asyncio
import json
import sys
import threading
import time

import numpy as np
import websockets.asyncio.server
from openpi_client import msgpack_numpy  # pyright: ignore[reportMissingImports]
from openpi_client.websocket_client_policy import WebsocketClientPolicy  # pyright: ignore[reportMissingImports]

PIXELS, CHUNK = 224, 10


def element():
    """openpi's LIBERO observation: two pictures, a state, a prompt."""
    picture = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    return {
        "observation/image": picture,
        "observation/wrist_image": picture.copy(),
        "observation/state": np.zeros(8, np.float32),
        "prompt": "pick up the milk and place it in the basket",
    }


async def serve():
    """Serve until the process is ended."""

    async def handle(connection):
        packer = msgpack_numpy.Packer()
        await connection.send(packer.pack({}))
        async for message in connection:
            began = time.monotonic()
            msgpack_numpy.unpackb(message)
            answer = {"actions": np.zeros((CHUNK, 7), np.float32), "policy_timing": {"infer_ms": 0.0}}
            answer["server_timing"] = {"infer_ms": 1000 * (time.monotonic() - began)}
            await connection.send(packer.pack(answer))

    async with websockets.asyncio.server.serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        print(f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}", flush=True)
        await server.serve_forever()


def ask(url, clients, requests):
    """Seconds of every round trip of each client, and the seconds that all of them took together."""
    times = [[] for _ in range(clients)]
    policies = [WebsocketClientPolicy(url) for _ in range(clients)]

    def run(number):
        observation = element()
        for _ in range(requests):
            began = time.perf_counter()
            policies[number].infer(observation)
            times[number].append(time.perf_counter() - began)

    for policy in policies:
        policy.infer(element())
    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seconds": time.perf_counter() - began, "times": [value for row in times for value in row]}))


if __name__ == "__main__":
    if sys.argv[1] == "server":
        asyncio.run(serve())
    else:
        ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
