"""`vla-rl collect` with a page, as a process of its own, and a page that is played by the test over the websocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

PATIENCE_S = 60.0


def recipe(run: Path, **changes: Any) -> dict[str, Any]:
    """Reach at real time, one env, three scenes."""
    operator = {"kind": "page", "port": 0, "shaping": {"translation_gain": 0.4}} | changes.pop("operator", {})
    values: dict[str, Any] = {"run_dir": str(run), "suite": "reach", "tasks": [0], "episodes_per_task": 3, "max_steps": 300}
    values |= {"frame_every": 2, "operator": operator, "env": {"kind": "reach", "resolution": 64}, "pool": {"workers": 1}}
    return values | changes


@contextlib.asynccontextmanager
async def session(values: dict[str, Any], folder: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """The running command and the link that it printed."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vla_rl.cli", "collect", str(path), stdout=asyncio.subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
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
