"""Sessions as a process: two people, a page that is closed, a kill, and what is in the dataset afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from session_process import PATIENCE_S, drive, env_of, page, recipe, session, waits

from vla_rl.collection.journal import Journal
from vla_rl.datasets.hdf5 import read_episode
from vla_rl.episode import Outcome
from vla_rl.telemetry.files import read_jsonl


def test_a_verdict_its_undo_a_skip_and_a_discard(tmp_path: Path) -> None:
    """What a person says about takes, and what is in the files: the undone take goes on with everything it had."""

    async def play() -> None:
        async with session(recipe(tmp_path / "run", episodes_per_task=2), tmp_path) as (link, process), page(link) as tab:
            await drive(tab, 6)
            await tab.command("success")
            await tab.until(lambda state: state["episodes"])
            first = env_of(await tab.until(waits))["scene"]
            await tab.command("undo")
            await tab.until(lambda state: not state["episodes"] and waits(state) and env_of(state)["step"] >= 6)
            assert env_of(tab.state)["scene"] != first and env_of(tab.state)["holder"] == "ada"
            await drive(tab, 4)
            await tab.command("success")
            await tab.until(lambda state: state["progress"][0]["recorded"] == 1)
            await tab.until(waits)
            await tab.command("success")
            assert "nothing has happened in env 0 yet" in await tab.refused()
            await tab.command("next")
            await drive(tab, 3)
            await tab.command("success")
            await tab.until(lambda state: state["complete"])
            await tab.say("forget", number=0)
            await tab.until(lambda state: not state["complete"] and waits(state))
            await tab.say("finish")
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 1, "one of two is missing: the command says so"

    asyncio.run(play())
    rows = read_jsonl(tmp_path / "run" / "episodes.jsonl")
    assert [(row["number"], row["outcome"], row["kept"]) for row in rows] == [(0, "discarded", False), (1, "success", True)]
    (file,) = (tmp_path / "run" / "episodes").glob("*.hdf5")
    episode = read_episode(file)
    assert (episode.outcome, episode.reason) == (Outcome.SUCCESS, "operator") and file.name == "episode_000001.hdf5"
    assert all(step.intervention_E.all() for step in episode.steps) and len(episode.frames()) == -(-episode.num_steps // 2)
    provenance = episode.provenance
    assert provenance["operators"] == ["ada"] and len(provenance["seen_step"]) == episode.num_steps
    assert provenance["actor"] == {"name": "operator"} and not list((tmp_path / "run" / "unfinished").glob("*"))


def test_two_people_and_a_page_that_is_closed(tmp_path: Path) -> None:
    """One drives and the other watches; the driver's page goes away in the middle, comes back, and goes on."""

    async def play() -> None:
        async with session(recipe(tmp_path / "run", episodes_per_task=1), tmp_path) as (link, process), page(link, "bob") as bob:
            async with page(link) as ada:
                await drive(ada, 5)
                await bob.until(lambda state: env_of(state)["holder"] == "ada" and env_of(state)["step"] >= 5)
                await bob.command("take_over")
                assert await bob.refused() == "env 0 is held by ada; it is free again when ada hands it back"
                assert max(picture["step"] for picture in bob.pictures) > 0, "who watches sees"
                async with page(link, "eve", browser="browser of ada") as eve:
                    assert (await eve.socket.receive()).type is aiohttp.WSMsgType.CLOSE and eve.socket.close_code == 4001
                async with page(link, "bob", browser="another", tab="somewhere else") as other:
                    await other.socket.receive()
                    assert other.socket.close_code == 4002
            left = await bob.until(lambda state: env_of(state)["away"])
            assert env_of(left)["driver"] == "waiting" and env_of(left)["holder"] == "ada"
            async with page(link, tab="another tab of ada") as again:
                await drive(again, 4)
                await again.command("success")
                await again.until(lambda state: state["complete"])
                await again.say("finish")
                assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0

    asyncio.run(play())
    episode = read_episode(tmp_path / "run" / "episodes" / "episode_000000.hdf5")
    assert episode.num_steps >= 9 and episode.provenance["operators"] == ["ada", "ada"]


async def _status(link: str, path: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(link + path, headers=headers) as answer:
        return answer.status


def test_strangers_are_refused(tmp_path: Path) -> None:
    """Other hosts, other origins, and messages that are none of ours; the session does not notice."""

    async def play() -> None:
        async with session(recipe(tmp_path / "run"), tmp_path) as (link, process):
            assert await _status(link, "") == 200 and await _status(link, "", Host="evil.example:80") == 403
            assert await _status(link, "episodes/0/film") == 404
            async with aiohttp.ClientSession() as client:
                with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                    await client.ws_connect(link + "socket", headers={"Origin": "http://evil.example"})
            for nonsense in ('{"kind": "ping", "sent_ms": 1}', "[]", "x" * 5000):
                async with aiohttp.ClientSession() as client, client.ws_connect(link + "socket") as socket:
                    await socket.send_str(nonsense)
                    assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
                    assert socket.close_code in (1008, 1009)
            async with page(link) as tab:
                await tab.until(waits)
            assert process.returncode is None

    asyncio.run(play())


@pytest.mark.faults
def test_a_killed_session_loses_at_most_the_running_take(tmp_path: Path) -> None:
    """SIGKILL as soon as the take is judged, before its pictures can be filled in; the next start writes it."""

    async def until_judged() -> None:
        async with session(recipe(tmp_path / "run", episodes_per_task=2), tmp_path) as (link, process), page(link) as tab:
            await drive(tab, 5)
            await tab.command("success")
            await tab.until(lambda state: env_of(state)["last"])
            process.kill()
            await process.wait()

    async def again() -> None:
        async with session(recipe(tmp_path / "run", episodes_per_task=2), tmp_path) as (link, process), page(link) as tab:
            await tab.until(lambda state: state["progress"][0]["recorded"] == 1)
            await tab.say("finish")
            await asyncio.wait_for(process.wait(), PATIENCE_S)

    asyncio.run(until_judged())
    journal = Journal(tmp_path / "run" / "unfinished")
    assert journal.numbers() == [0] and not list((tmp_path / "run" / "episodes").glob("[!.]*"))
    kept = journal.load(0)
    asyncio.run(again())
    written = read_episode(tmp_path / "run" / "episodes" / "episode_000000.hdf5")
    np.testing.assert_array_equal(written.actions_NA(), kept.actions_NA())
    assert written.spec == kept.spec and written.num_steps >= 5 and written.reason == "operator" and not journal.numbers()
    assert [row["number"] for row in read_jsonl(tmp_path / "run" / "episodes.jsonl")] == [0]
