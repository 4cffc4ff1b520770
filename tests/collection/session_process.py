"""`vla-rl collect` with a page, as a process of its own, and a page that is played by the test over the websocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

PATIENCE_S = 200.0
"""Longest wait for anything that comes by itself (s): a machine with other work may be fifty times slower."""


def recipe(run: Path, **changes: Any) -> dict[str, Any]:
    """Reach at real time, one env, three scenes."""
    operator = {"kind": "page", "port": 0, "shaping": {"translation_gain": 0.4}} | changes.pop("operator", {})
    values: dict[str, Any] = {"run_dir": str(run), "suite": "reach", "tasks": [0], "episodes_per_task": 3, "max_steps": 300}
    values |= {"frame_every": 2, "operator": operator, "env": {"kind": "reach", "resolution": 64}, "pool": {"workers": 1}}
    return values | changes


def heed_ctrl_c() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and children inherit that: as if a terminal had started this one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.asynccontextmanager
async def session(values: dict[str, Any], folder: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """The running command, in a process group of its own, and the link that it printed; its standard error goes to `errors.txt`."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    with open(folder / "errors.txt", "ab") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vla_rl.cli", "collect", str(path)),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("Open http"):
                assert line, "the command ended before it opened a page"
        yield line.split()[1], process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Page:
    """What a tab says and hears, without a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.state: dict[str, Any] = {}
        self.refusals: list[str] = []
        self.pictures: list[dict[str, Any]] = []

    async def say(self, kind: str, **values: Any) -> None:
        await self.socket.send_json({"kind": kind, **values})

    async def command(self, event: str, env: int = 0) -> None:
        await self.say("command", event=event, env=env)

    async def until(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Hear messages, and show pictures, until a state fulfils the condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not (self.state and condition(self.state)):
                await self._hear()
        return self.state

    async def refused(self) -> str:
        """The next refusal."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.refusals:
                await self._hear()
        return self.refusals.pop()

    async def _hear(self) -> None:
        message = await self.socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            length = int.from_bytes(message.data[:4])
            header = json.loads(message.data[4 : 4 + length])
            assert message.data[4 + length :][:3] == b"\xff\xd8\xff", "a JPEG follows the header"
            self.pictures.append(header)
            await self.say("seen", env=header["env"], step=header["step"], take=header["take"])
            return
        assert message.type is aiohttp.WSMsgType.TEXT, (message, self.socket.close_code)
        value = json.loads(message.data)
        if value["kind"] == "state":
            self.state = value
        elif value["kind"] == "refused":
            self.refusals.append(value["text"])


@contextlib.asynccontextmanager
async def page(link: str, operator: str = "ada", browser: str | None = None, tab: str | None = None) -> AsyncIterator[Page]:
    """A tab that has said hello."""
    async with aiohttp.ClientSession() as client, client.ws_connect(link + "socket", max_msg_size=0) as socket:
        made = Page(socket)
        await made.say("hello", operator=operator, browser=browser or f"browser of {operator}", tab=tab or f"tab of {operator}")
        yield made


def env_of(state: dict[str, Any], env: int = 0) -> dict[str, Any]:
    """What the page knows of an environment."""
    return state["envs"][env]


def waits(state: dict[str, Any]) -> bool:
    """Whether env 0 has a take that nobody drives."""
    return env_of(state)["running"] and env_of(state)["driver"] == "waiting" and not env_of(state)["ending"]


async def take_over(tab: Page) -> int:
    """Until it is in hand; a take that is ending refuses, and the next one comes. The step at which it was taken."""
    while True:
        await tab.until(waits)
        await tab.command("take_over")
        state = await tab.until(lambda state: env_of(state)["driver"] == "operator" or tab.refusals)
        if not tab.refusals:
            return env_of(state)["step"]
        tab.refusals.clear()


async def drive(tab: Page, steps: int, raw: tuple[float, ...] = (0, 1, 0, 0, 0, 0)) -> None:
    """Take over and push until so many control steps have been executed."""
    before = await take_over(tab)
    for _ in range(steps):
        await tab.say("push", raw=raw)
        seen = env_of(tab.state)["step"]
        await tab.until(lambda state, seen=seen: env_of(state)["step"] > seen)
        if env_of(tab.state)["step"] >= before + steps:
            break
    await tab.say("push", raw=(0, 0, 0, 0, 0, 0))
