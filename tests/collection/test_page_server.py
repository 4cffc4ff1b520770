"""Who gets in and who hears what, with connections that the test holds: the orders in which two browsers can race."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import WSMsgType

from vla_rl.collection.browser.messages import BadMessage
from vla_rl.collection.browser.server import NAME_TAKEN, NEWER_TAB, TAB_ELSEWHERE, PageServer, close_reason
from vla_rl.collection.operators import PageOperator
from vla_rl.conventions import Conventions


class Connection:
    """A websocket whose other side answers when the test lets it."""

    def __init__(self, operator: str = "", browser: str = "", tab: str = "") -> None:
        self.says = json.dumps({"kind": "hello", "operator": operator, "browser": browser, "tab": tab}) if operator else None
        self.heard: list[dict[str, Any]] = []
        self.close_code: int | None = None
        self.closed = False
        self.reads, self.says_goodbye = asyncio.Event(), asyncio.Event()
        self.reads.set()

    async def receive(self, timeout_s: float) -> Any:
        if self.says is None:
            raise TimeoutError
        return SimpleNamespace(type=WSMsgType.TEXT, data=self.says)

    async def send_str(self, text: str) -> None:
        await self.reads.wait()
        self.heard.append(json.loads(text))

    async def close(self, code: int, message: bytes) -> bool:
        self.close_code = code
        await self.says_goodbye.wait()
        return True


class Lobby:
    """A server that does not listen, and what it says to the session."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        board: Any = SimpleNamespace(snapshot={"number": 0}, conventions=Conventions(), has_policy=False, title="")
        self.board = board
        self.server = PageServer(
            lambda operator, said, answer: self.said.append(said), board, PageOperator("page"), lambda o: ("in", o), lambda o: ("out", o)
        )
        self.loop = self.server._loop

    def admit(self, connection: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(self.server._admit(connection), 30))

    def settle(self) -> None:
        """Let everything run that can."""
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))


@pytest.fixture
def lobby() -> Any:
    lobby = Lobby()
    yield lobby
    lobby.settle()
    lobby.loop.close()


def test_a_reload_comes_in_at_once_and_nobody_else_under_its_name(lobby: Lobby) -> None:
    """The old connection takes its time to say goodbye (a phone that lost its network): others are not let in meanwhile."""
    first, reload, thief = Connection("ada", "b1", "t1"), Connection("ada", "b1", "t1"), Connection("ada", "b2", "t2")
    lobby.admit(first)
    tab = lobby.admit(reload)
    lobby.settle()
    assert first.close_code == NEWER_TAB and [message["kind"] for message in reload.heard] == ["welcome"]
    thief.says_goodbye.set()
    assert lobby.admit(thief) is None and thief.close_code == NAME_TAKEN
    first.says_goodbye.set()
    lobby.settle()
    assert list(lobby.server._tabs.values()) == [tab] and lobby.said == [("in", "ada"), ("in", "ada")]
    another = Connection("bob", "b1", "t3")
    another.says_goodbye.set()
    assert lobby.admit(another) is None and another.close_code == TAB_ELSEWHERE


def test_a_tab_that_comes_back_under_another_name_leaves_the_first_one(lobby: Lobby) -> None:
    first = Connection("ada", "b1", "t1")
    first.says_goodbye.set()
    lobby.admit(first)
    lobby.admit(Connection("eve", "b1", "t1"))
    assert lobby.said == [("in", "ada"), ("out", "ada"), ("in", "eve")] and list(lobby.server._tabs) == ["eve"]


def test_a_slow_tab_neither_delays_the_others_nor_piles_states_up(lobby: Lobby) -> None:
    slow, quick = Connection("ada", "b1", "t1"), Connection("bob", "b2", "t2")
    for connection in (slow, quick):
        lobby.admit(connection)
    slow.reads.clear()
    sending = []
    for number in range(1, 40):
        lobby.board.snapshot = {"number": number}
        sending.append(lobby.loop.create_task(lobby.server._send_state()))
        lobby.settle()
    assert [message["number"] for message in quick.heard[1:]] == list(range(1, 40))
    assert len(slow.heard) == 1 and sum(not task.done() for task in sending) == 1, "one state is under way to the slow one, not 39"
    slow.reads.set()
    lobby.settle()
    assert [message["number"] for message in slow.heard[1:]] == [1, 39], "what was on its way, then how things are"
    assert all(task.done() for task in sending)


def test_who_says_nothing_is_told_so(lobby: Lobby) -> None:
    with pytest.raises(BadMessage, match="nobody said hello within 10 s"):
        lobby.admit(Connection())


def test_reasons_fit_into_a_close_frame() -> None:
    """At most 123 bytes (RFC 6455), and whole characters: a browser drops a connection whose reason is not UTF-8."""
    assert close_reason("short") == b"short"
    assert close_reason("学" * 32 + " is here already; choose another name").decode() == "学" * 32 + " is here already; choose an"
    assert close_reason("x" * 122 + "学") == b"x" * 122
