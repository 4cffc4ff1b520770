"""Headless Chromium over its DevTools protocol: pages, real key events, screenshots. Nothing but aiohttp and the browser.

Chrome DevTools Protocol, https://chromedevtools.github.io/devtools-protocol/: Page, Runtime and Input domains.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

INSTALL = "apt-get update && apt-get install -y chromium"
PATIENCE_S = 120.0
"""Longest wait for the browser (s): a machine with other work may be fifty times slower."""
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0")


def chromium_path() -> str | None:
    """The browser, under the names that distributions give it."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = json.loads((await self._socket.receive()).data)
                if answer.get("id") == self._number:
                    assert "error" not in answer, (method, answer)
                    return answer["result"]

    async def load(self, method: str, **parameters: Any) -> None:
        """A command that loads a page (`Page.navigate`, `Page.reload`), until it is loaded."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            while json.loads((await self._socket.receive()).data).get("method") != "Page.loadEventFired":
                pass

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait inside the page until a JavaScript expression is true; its value."""
        patience_ms = 1000 * (PATIENCE_S - 5)
        look = f"let value = null; try {{ value = ({condition}); }} catch (error) {{ value = null; }}"
        end = "if (value) resolve(value); else if (performance.now() > late) reject(new Error('never')); else setTimeout(look, 8);"
        script = (
            f"new Promise((resolve, reject) => {{ const late = performance.now() + {patience_ms};"
            f"const look = () => {{ {look} {end} }}; look(); }})"
        )
        try:
            return await self.run(script)
        except AssertionError as error:
            seen = await self.run("document.body?.innerText + JSON.stringify(typeof state === 'undefined' ? null : state)")
            raise AssertionError(f"{condition} never became true; the page shows:\n{seen}") from error

    async def key(self, code: str, down: bool) -> None:
        """A key goes down or up, as from a keyboard."""
        text = code.removeprefix("Key").removeprefix("Digit").lower() if len(code.removeprefix("Key").removeprefix("Digit")) == 1 else code
        await self.call("Input.dispatchKeyEvent", type="rawKeyDown" if down else "keyUp", code=code, key=text)

    async def press(self, code: str) -> None:
        """Down and up."""
        await self.key(code, True)
        await self.key(code, False)

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: Path) -> None:
        """What a person sees, as PNG."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"]))

    async def size(self, width: int, height: int, mobile: bool = False) -> None:
        """Of the window; `mobile` with touch and a phone's pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if mobile else 1, mobile=mobile
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    async def scheme(self, name: str) -> None:
        """`light` or `dark`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A running browser with a profile of its own."""
    path = chromium_path()
    assert path is not None, f"no Chromium on this machine; install it: {INSTALL}"
    with tempfile.TemporaryDirectory() as profile:
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-port=0",
        ]
        process = await asyncio.create_subprocess_exec(
            path, *flags, f"--user-data-dir={profile}", "about:blank", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"DevTools listening on" not in (line := await process.stderr.readline()):
                assert line, "the browser ended before it listened"
        address = line.decode().split()[-1].split("/devtools")[0].replace("ws://", "http://")
        try:
            async with aiohttp.ClientSession() as session:
                yield Browser(session, address)
        finally:
            process.kill()
            await process.wait()


class Browser:
    """Opens tabs."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session, self._address = session, address

    async def open(self, url: str) -> Tab:
        """A new tab that shows `url`."""
        async with self._session.put(f"{self._address}/json/new?about:blank") as answer:
            target = await answer.json()
        socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        tab = Tab(socket)
        await tab.call("Page.enable")
        await tab.load("Page.navigate", url=url)
        return tab
