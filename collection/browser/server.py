"""The web server of a session: one page, one websocket per tab, pictures as fast as each tab takes them.

It runs in a thread of its own with an asyncio loop. It knows nothing of control: what tabs say goes to `say`, what they are shown
comes from `Board` and `show`. Only text messages of the kinds in `messages.py` are read.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import WSCloseCode, WSMsgType, web

from vla_rl.collection.browser.access import COOKIE, Access, same_origin
from vla_rl.collection.browser.messages import MAX_BYTES, BadMessage, Hello, Message, Ping, Seen, parse
from vla_rl.collection.browser.pictures import live_message
from vla_rl.collection.operators import PageOperator
from vla_rl.collection.watched_pool import Picture
from vla_rl.errors import UserError

if TYPE_CHECKING:
    from vla_rl.collection.session_state import Board

PAGE = Path(__file__).with_name("page.html")
HELLO_S = 10.0
"""Seconds that a new connection may take to say who it is."""
TAB_ELSEWHERE, NAME_TAKEN, NEWER_TAB = 4001, 4002, 4003
"""Close codes that the page explains to its person."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' blob: data:; "
    "connect-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""No other site can frame the page, and the page talks to nobody else."""

Say = Callable[[str, Any, Callable[[str], None]], None]
"""`say(operator, said, answer)`, see `Session.say`."""


class PortTaken(UserError):
    """Nothing can listen where the recipe wants the page."""


@contextmanager
def _naming_port(operator: PageOperator) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{operator.host}:{operator.port}"
        number = error.errno or 0  # below 0: of getaddrinfo, which does not know the host
        reason = str(error.strerror).partition(" (while")[0] if number < 0 else os.strerror(number)  # their text has the address again
        key = "host" if number < 0 or number == errno.EADDRNOTAVAIL else "port"
        raise PortTaken(f"the page cannot listen on {where} ({reason}); choose another with --operator.{key}") from error


def require_port(operator: PageOperator) -> None:
    """Raise PortTaken if nobody can listen where the recipe wants the page: for before the simulators start, which takes a while."""
    with _naming_port(operator):
        family = socket.AF_INET6 if ":" in operator.host else socket.AF_INET
        socket.create_server((operator.host, operator.port), family=family).close()


@dataclass
class _Tab:
    """One connection."""

    hello: Hello
    socket: web.WebSocketResponse
    waiting: dict[int, Picture] = field(default_factory=dict[int, Picture])
    """Newest picture of each env that it has not been sent."""
    unseen: set[int] = field(default_factory=set[int])
    """Envs of which it has been sent a picture and has not shown it yet."""
    hears_state: bool = False
    """The state is on its way to it; how things are then is sent after it."""
    state_is_old: bool = False


class PageServer:
    """Serves `page.html` and its websocket; `joined` and `left` are what is said when a person comes and goes."""

    def __init__(self, say: Say, board: Board, operator: PageOperator, joined: Callable[[str], Any], left: Callable[[str], Any]) -> None:
        self._say, self._board, self._operator = say, board, operator
        self._joined, self._left = joined, left
        self._access = Access(operator.host)
        self._tabs: dict[str, _Tab] = {}
        """By operator."""
        self._newest: dict[int, Picture] = {}
        self._closing: set[asyncio.Task[bool]] = set()
        """Earlier connections of tabs, which may take a while to say goodbye."""
        self._loop = asyncio.new_event_loop()
        self.address = ""

    def show(self, picture: Picture) -> None:
        """A new picture of an env; from any thread, never waits."""
        self._loop.call_soon_threadsafe(self._offer, picture)

    def publish(self) -> None:
        """The board has a new snapshot; from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._send_state()))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Listen; prints what to open. Raises PortTaken."""
        runner = web.AppRunner(self._application(), access_log=None)
        thread = threading.Thread(target=self._run, name="page server", daemon=True)
        thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(runner), self._loop).result()
        self._board.on_change = self.publish
        print(f"Open {self.link}", flush=True)
        try:
            yield
        finally:
            self._board.on_change = lambda: None
            asyncio.run_coroutine_threadsafe(self._stop(runner), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    @property
    def link(self) -> str:
        """What the next person opens."""
        return self._access.link(self.address)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self, runner: web.AppRunner) -> None:
        await runner.setup()
        site = web.TCPSite(runner, self._operator.host, self._operator.port)
        with _naming_port(self._operator):
            await site.start()
        port = runner.addresses[0][1]
        everywhere = self._operator.host in ("0.0.0.0", "::")
        name = "localhost" if self._access.local else socket.gethostname() if everywhere else self._operator.host
        self.address = f"http://{name}:{port}/"

    async def _stop(self, runner: web.AppRunner) -> None:
        for tab in list(self._tabs.values()):
            await tab.socket.close(code=WSCloseCode.GOING_AWAY, message=b"the session has ended")
        await runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard])
        application.router.add_get("/", self._page)
        application.router.add_get("/socket", self._socket)
        application.router.add_get("/episodes/{number:[0-9]{1,9}}/thumbnail", self._thumbnail)
        application.router.add_get("/episodes/{number:[0-9]{1,9}}/film", self._film)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Refuse who may not see anything, with a reason for people."""
        if not self._access.own_host(request.host):
            return _refusal(403, f"This page is at {self.address}, not at {request.host}.")
        token = request.query.get("token")
        if request.path == "/" and token is not None and not self._access.admits(request.cookies.get(COOKIE)):
            return self._redeem(token)
        if not self._access.admits(request.cookies.get(COOKIE)):
            return _refusal(401, "Open the link that vla-rl collect printed in its terminal: it holds a token, which works once.")
        response = await handler(request)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _redeem(self, token: str) -> web.StreamResponse:
        cookie = self._access.redeem(token)
        if cookie is None:
            return _refusal(401, "This link was used already, or belongs to an earlier session. Its terminal shows the one that works now.")
        print(f"Someone opened the page. For the next person: {self.link}", flush=True)
        response = web.HTTPSeeOther("/")
        response.set_cookie(COOKIE, cookie, httponly=True, samesite="Strict")
        return response

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=PAGE.read_text(), content_type="text/html")

    async def _thumbnail(self, request: web.Request) -> web.StreamResponse:
        body = await asyncio.to_thread(self._board.thumbnail, int(request.match_info["number"]))
        if body is None:
            return _refusal(404, "That episode is not recorded.")
        return web.Response(body=body, content_type="image/webp")

    async def _film(self, request: web.Request) -> web.StreamResponse:
        film = await asyncio.to_thread(self._board.film, int(request.match_info["number"]))
        if film is None:
            return _refusal(404, "That episode is not recorded.")
        sheet, layout = film
        return web.Response(body=sheet, content_type="image/webp", headers={"X-Film": json.dumps(layout)})

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        if not same_origin(request.headers.get("Origin"), request.host):
            return _refusal(403, "Another site tried to open this session.")
        connection = web.WebSocketResponse(max_msg_size=MAX_BYTES, heartbeat=5.0)
        await connection.prepare(request)
        tab: _Tab | None = None
        try:
            tab = await self._admit(connection)
            if tab is not None:
                await self._listen_to(tab)
        except BadMessage as error:
            await connection.close(code=WSCloseCode.POLICY_VIOLATION, message=close_reason(str(error)))
        finally:
            if tab is not None and self._tabs.get(tab.hello.operator) is tab:
                del self._tabs[tab.hello.operator]
                self._say(tab.hello.operator, self._left(tab.hello.operator), _nobody)
        return connection

    async def _admit(self, connection: web.WebSocketResponse) -> _Tab | None:
        """Hear who it is. A second tab of the same browser, or a name that somebody has, is refused; a reload takes its place again."""
        hello = await _hear_hello(connection)
        refusal = self._why_not(hello)
        if refusal is not None:
            await connection.close(code=refusal[0], message=close_reason(refusal[1]))
            return None
        tab = _Tab(hello, connection)
        self._replace(tab)
        self._say(hello.operator, self._joined(hello.operator), _nobody)
        await self._send(tab, self._welcome(hello))
        return tab

    def _why_not(self, hello: Hello) -> tuple[int, str] | None:
        """Close code and reason for a tab that cannot come in beside those that are here; None: it can."""
        others = [other.hello for other in self._tabs.values() if other.hello.tab != hello.tab]
        if any(other.browser == hello.browser for other in others):
            return TAB_ELSEWHERE, "this session is open in another tab of this browser; use that one"
        if any(other.operator == hello.operator for other in others):
            return NAME_TAKEN, f"an operator called {hello.operator} is here already; choose another name"
        return None

    def _replace(self, tab: _Tab) -> None:
        """Take the tab in, in the place of its own earlier connection; at once, so that nobody else can come in between."""
        for other in [other for other in self._tabs.values() if other.hello.tab == tab.hello.tab]:
            del self._tabs[other.hello.operator]
            if other.hello.operator != tab.hello.operator:
                self._say(other.hello.operator, self._left(other.hello.operator), _nobody)
            closing = self._loop.create_task(other.socket.close(code=NEWER_TAB, message=b"this tab was loaded again"))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._tabs[tab.hello.operator] = tab

    def _welcome(self, hello: Hello) -> dict[str, Any]:
        """What a tab must know once."""
        return {
            "kind": "welcome",
            "operator": hello.operator,
            "keys": self._operator.keys(),
            "rate": self._board.conventions.control_rate_hz,
            "device": self._operator.device,
            "policy": self._board.has_policy,
            "title": self._board.title,
        }

    async def _listen_to(self, tab: _Tab) -> None:
        if self._board.snapshot:
            await self._send_state_to(tab)
        for picture in list(self._newest.values()):
            tab.waiting[picture.env] = picture
            await self._send_next(tab, picture.env)
        async for message in tab.socket:
            if message.type is not WSMsgType.TEXT:
                raise BadMessage("only text messages are read")
            await self._hear(tab, parse(message.data))

    async def _hear(self, tab: _Tab, said: Message) -> None:
        match said:
            case Ping():
                await self._send(tab, {"kind": "pong", "sent_ms": said.sent_ms, "now_ms": time.perf_counter() * 1000})
                return
            case Hello():
                raise BadMessage("hello was said already")
            case Seen():
                tab.unseen.discard(said.env)
                await self._send_next(tab, said.env)
            case _:
                pass
        self._say(tab.hello.operator, said, lambda text: self._refuse(tab, text))

    def _refuse(self, tab: _Tab, text: str) -> None:
        """Tell a person why not; from the loop's thread."""
        asyncio.run_coroutine_threadsafe(self._send(tab, {"kind": "refused", "text": text}), self._loop)

    def _offer(self, picture: Picture) -> None:
        self._newest[picture.env] = picture
        for tab in self._tabs.values():
            tab.waiting[picture.env] = picture
            if picture.env not in tab.unseen:
                self._loop.create_task(self._send_next(tab, picture.env))

    async def _send_next(self, tab: _Tab, env: int) -> None:
        """Send the newest picture of an env, if there is one that this tab has not got; the next goes when it has shown this one."""
        picture = tab.waiting.pop(env, None)
        if picture is None or env in tab.unseen or tab.socket.closed:
            return
        tab.unseen.add(env)
        for view, image in picture.images.items():
            header = {"env": env, "view": view, "step": picture.control_step, "take": picture.take, "at_ms": picture.executed_s * 1000}
            message = await asyncio.to_thread(live_message, header, self._board.upright(image))
            await _quietly(tab.socket.send_bytes(message))

    async def _send_state(self) -> None:
        await asyncio.gather(*(self._send_state_to(tab) for tab in self._tabs.values()))

    async def _send_state_to(self, tab: _Tab) -> None:
        """The newest state, as fast as this tab takes it: one on a slow network neither delays the others nor piles states up."""
        tab.state_is_old = True
        if tab.hears_state:
            return
        tab.hears_state = True
        try:
            while tab.state_is_old:
                tab.state_is_old = False
                await self._send(tab, self._board.snapshot)
        finally:
            tab.hears_state = False

    async def _send(self, tab: _Tab, value: dict[str, Any]) -> None:
        if not tab.socket.closed:
            await _quietly(tab.socket.send_str(json.dumps(value)))


async def _hear_hello(connection: web.WebSocketResponse) -> Hello:
    """Who comes. Raises BadMessage for whoever says something else first, or nothing."""
    try:
        first = await connection.receive(HELLO_S)
    except TimeoutError as error:
        raise BadMessage(f"nobody said hello within {HELLO_S:g} s") from error
    hello = parse(first.data) if first.type is WSMsgType.TEXT else None
    if not isinstance(hello, Hello):
        raise BadMessage("the first message must say hello")
    return hello


def close_reason(text: str) -> bytes:
    """The text, or as many of its characters as a close frame has room for (RFC 6455, 5.5: 125 bytes with the code)."""
    return text.encode()[:123].decode(errors="ignore").encode()


async def _quietly(sending: Any) -> None:
    """A tab that is going away while something is sent to it says so by closing, which is handled where it is read."""
    try:
        await sending
    except (ConnectionError, RuntimeError):
        return


def _nobody(text: str) -> None:
    """Nobody to tell."""


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n", headers=HEADERS)
