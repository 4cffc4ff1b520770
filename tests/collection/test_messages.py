"""What a page may say, and who may open it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.collection.browser.access import Access, is_loopback, same_origin
from vla_rl.collection.browser.messages import MAX_BYTES, BadMessage, Command, Push, parse
from vla_rl.collection.devices.base import Event
from vla_rl.collection.operators import DEFAULT_BINDINGS, PageOperator


def test_messages_that_the_page_sends() -> None:
    assert parse('{"kind": "push", "raw": [0, 1, -1, 0.5, 0, 0], "pressed_ms": 12.5}') == Push((0.0, 1.0, -1.0, 0.5, 0.0, 0.0), 12.5)
    assert parse('{"kind": "command", "event": "take_over", "env": 1}') == Command(Event.TAKE_OVER, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "a list"),
        ('{"kind": "pushh", "raw": []}', "did you mean 'push'"),
        ('{"kind": "push", "raw": [1, 2]}', "must be 6 numbers from -1 to 1"),
        ('{"kind": "push", "raw": [0, 0, 0, 0, 0, NaN]}', "must be 6 numbers"),
        ('{"kind": "push", "raw": [0, 0, 0, 0, 0, "x"]}', "must be a float"),
        ('{"kind": "push", "raw": [0, 0, 0, 0, 0, 0], "extra": 1}', "unknown key 'extra'"),
        ('{"kind": "gripper", "pressed_ms": Infinity}', "must be a finite number"),
        ('{"kind": "command", "event": "explode", "env": 0}', "explode"),
        ('{"kind": "command", "event": "success", "env": "0"}', "env"),
        ('{"kind": "hello", "operator": "<b>", "browser": "a", "tab": "b"}', "letters, digits"),
        ('{"kind": "ping"}', "missing key 'sent_ms'"),
        ("[" * 900, "JSON"),
        ('{"kind": "ping", "sent_ms": 1' + " " * MAX_BYTES + "}", "at most 2048 are read"),
    ],
)
def test_everything_else_is_refused_with_a_reason(text: str, complaint: str) -> None:
    with pytest.raises(BadMessage, match=complaint):
        parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(["push", "command", "hello", "seen"]),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.sampled_from(["kind", "raw", "env", "event", "step"]), inner),
    max_leaves=12,
)


@given(JSON)
def test_nothing_that_is_json_does_more_than_be_refused(value: object) -> None:
    try:
        parse(json.dumps(value))
    except BadMessage as refusal:
        assert str(refusal)


def test_this_machine_needs_no_token_and_others_need_one_that_works_once() -> None:
    assert Access("127.0.0.1").admits(None) and Access("localhost").link("http://localhost:1/") == "http://localhost:1/"
    access = Access("0.0.0.0")
    token = access.link("http://box:1/").partition("?token=")[2]
    assert len(token) > 20 and not access.admits(None) and not access.admits(token)
    assert access.redeem("guess") is None
    cookie = access.redeem(token)
    assert cookie is not None and access.admits(cookie)
    assert access.redeem(token) is None, "the same link a second time"
    assert access.link("http://box:1/").partition("?token=")[2] not in ("", token)


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost:8765", True),
        ("127.0.0.1:8765", True),
        ("[::1]:8765", True),
        ("evil.example:8765", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_a_local_page_answers_only_to_its_own_names(host: str, own: bool) -> None:
    assert Access("127.0.0.1").own_host(host) is own


def test_loopback_and_origins() -> None:
    assert is_loopback("::1") and is_loopback("127.3.4.5") and not is_loopback("0.0.0.0") and not is_loopback("localhost.evil.example")
    assert same_origin("http://localhost:8765", "localhost:8765") and same_origin(None, "localhost:8765")
    assert not same_origin("http://evil.example", "localhost:8765") and not same_origin("null", "localhost:8765")


def test_bindings() -> None:
    assert PageOperator("page", bindings=("up=ArrowUp",)).keys() == {**DEFAULT_BINDINGS, "up": "ArrowUp"}
    with pytest.raises(ValueError, match="did you mean 'forward'"):
        PageOperator("page", bindings=("foward=KeyP",))
    with pytest.raises(ValueError, match="KeyW to two commands"):
        PageOperator("page", bindings=("up=KeyW",))
    with pytest.raises(ValueError, match="needs its type name"):
        PageOperator("page", device="lerobot")
