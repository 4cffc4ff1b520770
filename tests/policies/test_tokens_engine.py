"""The client of the vLLM process against a process that dies, hangs and lies on command, speaking the same messages."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokens_setup import AUTOREGRESSIVE

from vla_rl.policies.tokens.backbone import build_language
from vla_rl.policies.tokens.vllm_engine import EngineLost, VllmConfig, VllmEngine
from vla_rl.policies.tokens.vocabulary import Vocabulary

PROGRAM = """#!{python}
import importlib.util, json, os, pathlib, socket, sys, time
spec = importlib.util.spec_from_file_location("server", sys.argv[1])
server = importlib.util.module_from_spec(spec)
sys.modules["server"] = server
spec.loader.exec_module(server)
folder = pathlib.Path({folder!r})
life = len(list(folder.glob("life_*")))
(folder / f"life_{{life}}").touch()
plan = json.loads((folder / "plan.json").read_text())
deeds = plan[life] if life < len(plan) else []
print("life", life, "begins")
connection = socket.socket(fileno=int(sys.argv[2]))
server.send(connection, {{"vllm": "none", "pid": os.getpid()}})
while (message := server.receive(connection)) is not None:
    request, payload = message
    weights = pathlib.Path(request["path"]).stat().st_size if request["do"] == "load" else 0
    with open(folder / "seen.jsonl", "a") as seen:
        seen.write(json.dumps(request | {{"life": life, "bytes": len(payload), "weights": weights}}) + "\\n")
    deed = deeds.pop(0) if deeds else "answer"
    if deed == "die":
        os._exit(1)
    if deed == "hang":
        time.sleep(60)
    if deed == "refuse":
        server.send(connection, {{"error": "no such thing"}})
    elif request["do"] == "load":
        server.send(connection, {{"version": request["version"]}})
    else:
        rows, first = len(request["lengths"]), request["first"]
        tokens = [[first, first + 1][: request["length"]]] * rows
        version = request["version"] - (deed == "lie")
        server.send(connection, {{"version": version, "tokens": tokens, "log_probs": [[-0.5, -0.25][: request["length"]]] * rows}})
"""
WIDTH = AUTOREGRESSIVE.language.width


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., VllmEngine]]:
    """`start(plan, **config)`: an engine whose processes do, message by message, what the lists of `plan` say, one list per life."""
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    made: list[VllmEngine] = []

    def make(plan: list[list[str]], **config: Any) -> VllmEngine:
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        made.append(VllmEngine(VllmConfig(python=str(program), **config), language(), rows=4, longest=64))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def language():
    return build_language(AUTOREGRESSIVE.language, Vocabulary(text=20, actions=4))


def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def write(engine: VllmEngine, **changes: Any):
    values: dict[str, Any] = {"choices": range(24, 28), "end": None, "length": 2, "temperature": 1.3, "seeds": [7, 2**63 + 5]}
    return engine.write([torch.zeros(3, WIDTH), torch.ones(5, WIDTH)], **(values | changes))


def test_what_is_asked_and_what_is_answered(start: Callable[..., VllmEngine], tmp_path: Path) -> None:
    engine = start([])
    engine.load(language(), 4)
    completion = write(engine, end=23, length=3)
    load, asked = seen(tmp_path)
    assert (load["do"], load["version"]) == ("load", 4) and load["weights"] > 1000
    assert asked["lengths"] == [3, 5] and asked["bytes"] == 8 * WIDTH * 4 and asked["version"] == 4
    assert (asked["first"], asked["choices"], asked["end"], asked["temperature"]) == (24, 4, 23, 1.3)
    assert asked["seeds"] == [7, 5], "seeds fit 63 bits"
    assert completion.ids_BN.tolist() == [[24, 25, 0]] * 2 and completion.mask_BN.tolist() == [[True, True, False]] * 2
    assert completion.log_prob_BN.tolist() == [[-0.5, -0.25, 0.0]] * 2


def test_actions_that_nobody_wrote_are_not_taken_for_the_lowest_bin(start: Callable[..., VllmEngine]) -> None:
    engine = start([])
    engine.load(language(), 0)
    with pytest.raises(EngineLost, match="wrote 2 of 3 tokens of a row"):
        write(engine, length=3)


@pytest.mark.faults
@pytest.mark.parametrize("deed", ["die", "hang"])
def test_a_successor_has_the_weights_before_it_is_asked_again(deed: str, start: Callable[..., VllmEngine], tmp_path: Path) -> None:
    engine = start([["answer", deed]], answer_s=3.0)
    engine.load(language(), 1)
    assert write(engine).ids_BN.tolist() == [[24, 25]] * 2
    assert engine.starts == 2
    told = [(message["life"], message["do"], message["version"]) for message in seen(tmp_path)]
    assert told == [(0, "load", 1), (0, "write", 1), (1, "load", 1), (1, "write", 1)]


@pytest.mark.faults
def test_a_process_that_dies_while_it_loads_is_replaced_too(start: Callable[..., VllmEngine], tmp_path: Path) -> None:
    engine = start([["answer", "die"]])
    engine.load(language(), 1)
    engine.load(language(), 2)
    write(engine)
    assert engine.starts == 2 and next(message["version"] for message in seen(tmp_path) if message["life"] == 1) == 2


@pytest.mark.faults
def test_one_that_keeps_dying_ends_the_run_with_its_output(start: Callable[..., VllmEngine]) -> None:
    engine = start([["answer", "die"], ["answer", "die"], ["answer", "die"]], lives=2)
    engine.load(language(), 1)
    with pytest.raises(EngineLost, match=r"started 2 times without an answer(.|\n)*life 2 begins"):
        write(engine)


def test_weights_of_another_version_are_not_accepted(start: Callable[..., VllmEngine]) -> None:
    engine = start([["answer", "lie"]])
    engine.load(language(), 5)
    with pytest.raises(EngineLost, match="answered with weights version 4, and version 5 was asked for"):
        write(engine)
    with pytest.raises(ValueError, match="versions only grow"):
        engine.load(language(), 5)


def test_a_refusal_carries_the_reason(start: Callable[..., VllmEngine]) -> None:
    engine = start([["answer", "refuse"]])
    engine.load(language(), 0)
    with pytest.raises(EngineLost, match=r"refused a request:\nno such thing"):
        write(engine)
    assert write(engine).mask_BN.all() and engine.starts == 1


def test_closing_removes_the_process_and_its_files(start: Callable[..., VllmEngine]) -> None:
    engine = start([])
    engine.load(language(), 0)
    folder, pid = engine._folder, engine.pid
    engine.close()
    engine.close()
    assert not folder.exists() and not Path(f"/proc/{pid}").exists()
