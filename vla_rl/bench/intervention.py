"""From key press to executed action in a session in real time: `vla-rl collect` with its page's websocket, a mirror that draws, and
the control loop, as a person would have them. A client presses and lets go of a key at random moments; both count.

`ratio` is two control periods (100 ms) over the 95 % quantile: a press waits for half a period on average, then for the step itself.
A browser adds what it needs to hand a key event to the page.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from vla_rl.bench.common import benchmark_parser, finish
from vla_rl.datasets.hdf5 import read_episode

PERIOD_S = 0.05
GAPS_S = (0.12, 0.35)
"""Shortest and longest time between two key events (s)."""
SIDEWAYS = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
REST = (0.0,) * 6


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and print its closing JSON line; 0 if 95 % of the presses are executed within two control periods."""
    parser = benchmark_parser("intervention", __doc__)
    parser.add_argument("--suite", default="libero_object", help="`reach` or a LIBERO suite (task 0)")
    parser.add_argument("--presses", type=int, default=120, help="key events")
    options = parser.parse_args(arguments)
    row = asyncio.run(_measure(options))
    print(f"{row['presses']} key events: p50 {row['p50_ms']} ms, p95 {row['p95_ms']} ms; control {row['control_hz']} Hz", flush=True)
    return finish("intervention", 2e3 * PERIOD_S / row["p95_ms"], 1.0, None, [row], options)


async def _measure(options: Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(_recipe(options, folder)))
        command = [sys.executable, "-m", "vla_rl.cli", "collect", str(recipe)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert process.stdout is not None
        while not (line := (await process.stdout.readline()).decode()).startswith("Open "):
            if not line:
                raise RuntimeError(f"{' '.join(command)} ended with {await process.wait()} before it opened a page")
        await _play(line.split()[1], options.presses)
        await process.wait()
        (file,) = (Path(folder) / "run" / "episodes").glob("*.hdf5")
        return _row(read_episode(file).provenance)


def _recipe(options: Namespace, folder: str) -> dict[str, Any]:
    kind = "reach" if options.suite == "reach" else "libero"
    steps = round(options.presses * GAPS_S[1] / PERIOD_S) + 100
    operator = {"kind": "page", "port": 0, "idle_steps": None, "shaping": {"translation_gain": 0.05}}
    values = {"run_dir": f"{folder}/run", "suite": options.suite, "tasks": [0], "episodes_per_task": 1, "frame_every": 50}
    return values | {"max_steps": steps, "operator": operator, "env": {"kind": kind, "resolution": 128}, "pool": {"workers": 1}}


async def _play(link: str, presses: int) -> None:
    """Take over, press and let go, say success, finish."""
    async with aiohttp.ClientSession() as client, client.ws_connect(link + "socket", max_msg_size=0) as socket:
        await socket.send_json({"kind": "hello", "operator": "bench", "browser": "bench", "tab": "bench"})
        await _until(socket, lambda state: state["envs"][0]["running"] and state["envs"][0]["driver"] == "waiting")
        await socket.send_json({"kind": "command", "event": "take_over", "env": 0})
        await _until(socket, lambda state: state["envs"][0]["step"] > 10)
        pressing = asyncio.create_task(_press(socket, presses))
        while not pressing.done():
            await _hear(socket)
        await socket.send_json({"kind": "command", "event": "success", "env": 0})
        await _until(socket, lambda state: state["complete"])
        await socket.send_json({"kind": "finish"})


async def _press(socket: aiohttp.ClientWebSocketResponse, presses: int) -> None:
    """At random moments, so that they fall anywhere in a control period; clocks of processes of one machine are the same."""
    moments = random.Random(0)
    for number in range(presses):
        await asyncio.sleep(moments.uniform(*GAPS_S))
        raw = SIDEWAYS if number % 2 == 0 else REST
        await socket.send_json({"kind": "push", "raw": raw, "pressed_ms": time.perf_counter() * 1000})


async def _until(socket: aiohttp.ClientWebSocketResponse, condition: Any) -> None:
    while True:
        state = await _hear(socket)
        if state is not None and condition(state):
            return


async def _hear(socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any] | None:
    """Take one message, as the page would: a picture is acknowledged. The state, if it is one."""
    message = await socket.receive(timeout=300)
    if message.type is aiohttp.WSMsgType.BINARY:
        header = json.loads(message.data[4 : 4 + int.from_bytes(message.data[:4])])
        await socket.send_json({"kind": "seen", "env": header["env"], "step": header["step"], "take": header["take"]})
        return None
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise RuntimeError(f"the session closed the connection ({socket.close_code})")
    value = json.loads(message.data)
    return value if value["kind"] == "state" else None


def _row(provenance: Mapping[str, Any]) -> dict[str, Any]:
    latencies_ms = sorted(1000 * latency for latency in provenance["latency_s"])
    quantiles = statistics.quantiles(latencies_ms, n=100, method="inclusive")
    seen = [step for step in provenance["seen_step"] if step >= 0]
    return {
        "presses": len(latencies_ms),
        "p50_ms": round(statistics.median(latencies_ms), 1),
        "p95_ms": round(quantiles[94], 1),
        "longest_ms": round(latencies_ms[-1], 1),
        "control_hz": round(1 / provenance["control_period"]["mean_s"], 2),
        "control_period_p95_ms": round(1000 * provenance["control_period"]["p95_s"], 1),
        "pictures_per_s": round(len(set(seen)) / (len(provenance["seen_step"]) * provenance["control_period"]["mean_s"]), 1),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
