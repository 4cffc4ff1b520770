"""Sessions that are interrupted, killed, left alone or out of room: the real process, and what is in both formats afterwards."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from session_process import PATIENCE_S, Page, drive, env_of, page, recipe, session, waits

from vla_rl.datasets.episodes import load_episode
from vla_rl.datasets.store import list_episodes
from vla_rl.episode import Episode
from vla_rl.telemetry.files import read_jsonl

SERIAL = {"backend": "serial", "workers": 1}
"""Where no process but the session's own matters."""
FEW_KIB = 8 * 1024
"""A limit on file sizes that logs keep and episodes exceed: what a full disk looks like, for one process and as long as the test wants."""


def both(run: Path, **changes: Any) -> dict[str, Any]:
    return recipe(run, episodes_per_task=2, frame_every=1, format="both", **changes)


def recorded(run: Path) -> list[Episode]:
    """The episodes, which are the same in both formats."""
    hdf5, lerobot = ([load_episode(info) for info in list_episodes([run / name])] for name in ("episodes", "lerobot"))
    assert [episode.spec for episode in hdf5] == [episode.spec for episode in lerobot]
    for one, other in zip(hdf5, lerobot):
        np.testing.assert_array_equal(one.actions_NA(), other.actions_NA())
        assert len(one.frames()) == len(other.frames()) == one.num_steps
        assert all(step.intervention_E.all() for episode in (one, other) for step in episode.steps)
    return hdf5


async def show_one(tab: Page, steps: int = 6) -> None:
    """Drive, and call it a success."""
    await drive(tab, steps)
    await tab.command("success")


@pytest.mark.faults
def test_killed_then_interrupted_in_the_middle_of_an_intervention(tmp_path: Path) -> None:
    """SIGKILL, then Ctrl-C in the next start, while somebody drives the second take: the first one stays, the second is shown again."""
    run = tmp_path / "run"

    async def until_the_second_take_runs(tab: Page) -> None:
        if env_of(await tab.until(waits))["scene"] == "0":
            await show_one(tab)
        await tab.until(lambda state: waits(state) and env_of(state)["scene"] == "1")
        await drive(tab, 4)

    async def play() -> None:
        async with session(both(run), tmp_path) as (link, process), page(link) as tab:
            await until_the_second_take_runs(tab)
            process.kill()
            await process.wait()
        async with session(both(run), tmp_path) as (link, process), page(link) as tab:
            await until_the_second_take_runs(tab)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 130
        assert "interrupted; start the same command again to go on" in (tmp_path / "errors.txt").read_text()
        assert "Traceback" not in (tmp_path / "errors.txt").read_text()
        assert [episode.spec.init for episode in recorded(run)] == ["sampled:0"] and not list((run / "unfinished").glob("*"))
        async with session(both(run), tmp_path) as (link, process), page(link) as tab:
            await tab.until(lambda state: state["progress"][0]["recorded"] == 1)
            await show_one(tab)
            await tab.until(lambda state: state["complete"])
            await tab.say("finish")
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0

    asyncio.run(play())
    assert [episode.spec.init for episode in recorded(run)] == ["sampled:0", "sampled:1"]
    assert sorted(row["number"] for row in read_jsonl(run / "episodes.jsonl")) == [0, 1]


async def show_and_fill_the_disk(tab: Page, process: asyncio.subprocess.Process) -> None:
    """One take is written; then the disk is full for the session's process (not for the worker that fills in pictures), and one is not."""
    await show_one(tab)
    await tab.until(lambda state: state["progress"][0]["recorded"] == 1 and waits(state))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FEW_KIB, resource.RLIM_INFINITY))
    await show_one(tab)
    await tab.until(lambda state: state["trouble"])


@pytest.mark.faults
def test_a_full_disk_stops_new_takes_until_there_is_room(tmp_path: Path) -> None:
    """The take that ended is kept, the page and the terminal say why nothing begins, and with room it goes on by itself."""
    run = tmp_path / "run"

    async def play() -> None:
        values = both(run, pool=SERIAL) | {"episodes_per_task": 3}
        async with session(values, tmp_path) as (link, process), page(link) as tab:
            await show_and_fill_the_disk(tab, process)
            assert "cannot write" in tab.state["trouble"] and "File too large" in tab.state["trouble"]
            await tab.until(waits)
            await tab.command("next")
            state = await tab.until(lambda state: not env_of(state)["running"])
            assert state["progress"][0]["recorded"] == 1 and state["writing"] == 1 and state["trouble"]
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            await tab.until(lambda state: not state["trouble"] and state["progress"][0]["recorded"] == 2)
            await show_one(tab, steps=9)
            await tab.until(lambda state: state["complete"])
            await tab.say("finish")
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0

    asyncio.run(play())
    assert [episode.spec.init for episode in recorded(run)] == ["sampled:0", "sampled:1", "sampled:2"]
    said = (tmp_path / "errors.txt").read_text()
    assert "File too large" in said and "there is room again; recording goes on" in said and "Traceback" not in said


@pytest.mark.faults
def test_finishing_on_a_full_disk_fails_with_the_reason(tmp_path: Path) -> None:
    async def play() -> None:
        async with session(both(tmp_path / "run", pool=SERIAL), tmp_path) as (link, process), page(link) as tab:
            await show_and_fill_the_disk(tab, process)
            await tab.say("finish")
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 2

    asyncio.run(play())
    assert [episode.spec.init for episode in recorded(tmp_path / "run")] == ["sampled:0"], "what was written before stays whole"
    said = (tmp_path / "errors.txt").read_text().splitlines()
    assert said[-1].startswith("vla-rl collect: ") and "cannot write" in said[-1] and "Make room" in said[-1]


def test_a_take_whose_operator_left_is_discarded_and_shown_again(tmp_path: Path) -> None:
    """The page is closed in the middle of an intervention, with `absence: {then: discard}`."""
    absence = {"absence": {"wait_s": 0.0, "then": "discard"}}

    async def play() -> None:
        values = both(tmp_path / "run", pool=SERIAL, operator=absence)
        async with session(values, tmp_path) as (link, process), page(link, "bob") as bob:
            async with page(link) as ada:
                await drive(ada, 5)
            state = await bob.until(lambda state: env_of(state)["last"] and waits(state))
            assert env_of(state)["last"] == {"outcome": "discarded", "reason": "operator left"}
            assert env_of(state)["scene"] == "0" and env_of(state)["step"] == 0 and not env_of(state)["holder"]
            await show_one(bob)
            await bob.until(lambda state: state["progress"][0]["recorded"] == 1)
            await bob.say("finish")
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 1, "one of two is missing"

    asyncio.run(play())
    (episode,) = recorded(tmp_path / "run")
    assert episode.provenance["operators"] == ["bob"]


async def ask(client: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with client.get(url) as answer:
        return answer.status, await answer.text()


def test_others_come_in_with_a_link_that_works_once(tmp_path: Path) -> None:
    """`--operator.host 0.0.0.0`: no token, the printed one, the same one again from elsewhere, and the next one."""

    async def play() -> None:
        values = both(tmp_path / "run", pool=SERIAL, operator={"host": "0.0.0.0"})
        async with session(values, tmp_path) as (link, process):
            assert process.stdout is not None
            _, _, token = link.partition("?token=")
            here = "http://127.0.0.1:" + link.split("/?")[0].rpartition(":")[2] + "/"
            jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address without a name
            async with aiohttp.ClientSession(cookie_jar=jar) as ada, aiohttp.ClientSession() as eve:
                for path in ("", "socket", "episodes/0/film"):
                    status, text = await ask(eve, here + path)
                    assert status == 401 and "it holds a token, which works once" in text
                status, text = await ask(ada, f"{here}?token={token}")
                assert status == 200 and "<title>vla-rl" in text
                next_link = (await process.stdout.readline()).decode()
                assert next_link.startswith("Someone opened the page. For the next person: http") and token not in next_link
                status, text = await ask(eve, f"{here}?token={token}")
                assert status == 401 and "This link was used already" in text
                assert (await ask(ada, here))[0] == 200, "a reload comes in with the cookie"
                async with ada.ws_connect(here + "socket", max_msg_size=0) as socket:
                    tab = Page(socket)
                    await tab.say("hello", operator="ada", browser="a", tab="t")
                    await tab.until(waits)
                    await tab.say("finish")
                    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 1

    asyncio.run(play())
