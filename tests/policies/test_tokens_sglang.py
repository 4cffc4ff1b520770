"""The client of SGLang against answers in the form of its sources: what it asks, what it makes of them, and a server that was restarted."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokens_setup import AUTOREGRESSIVE

from vla_rl.config import ConfigError
from vla_rl.policies.tokens.backbone import build_language
from vla_rl.policies.tokens.sglang_engine import BIAS, SglangConfig, SglangEngine
from vla_rl.policies.tokens.vllm_engine import EngineLost
from vla_rl.policies.tokens.vocabulary import Vocabulary

WIDTH = AUTOREGRESSIVE.language.width
ROW = {
    "output_ids": [24, 25],
    "meta_info": {
        "id": "8c1f",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "weight_version": "default",
        "output_token_logprobs": [[-0.5, 24, None], [-0.25, 25, None]],
        "completion_tokens": 2,
        "e2e_latency": 0.03,
    },
}
"""One row of an answer of `/generate`, in the form of SGLang 0.5."""


class Server:
    """Answers as SGLang does; `deeds` says what the next generations do instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.version, self.deeds = "default", list[str]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body))
                status, reply = outer.answer(self.path, body)
                if status:
                    self._answer(status, reply)

            def _answer(self, status: int, reply: Any) -> None:
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Silence."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/update_weights_from_disk":
            self.version = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        deed = self.deeds.pop(0) if self.deeds else ""
        if deed == "vanish":  # as a server that dies: no answer, and its successor has other weights
            self.version = "default"
            return 0, None
        if deed == "refuse":
            return 400, {"error": {"message": "The input is longer than the model's context length."}}
        tokens = [[-0.1, 3, None]] if deed == "stray" else ROW["meta_info"]["output_token_logprobs"]  # type: ignore[index]
        meta = {**ROW["meta_info"], "weight_version": self.version, "output_token_logprobs": tokens}  # type: ignore[dict-item]
        return 200, [{**ROW, "meta_info": meta} for _ in body["input_embeds"]]

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def engine(server: Server, tmp_path: Path) -> SglangEngine:
    return SglangEngine(SglangConfig(url=server.url, folder=str(tmp_path / "model")), language())


def language():
    return build_language(AUTOREGRESSIVE.language, Vocabulary(text=20, actions=4))


def write(engine: SglangEngine, **changes: Any):
    values: dict[str, Any] = {"choices": range(24, 28), "end": None, "length": 2, "temperature": 1.5, "seeds": [7, 2**31 + 5]}
    return engine.write([torch.zeros(3, WIDTH), torch.ones(5, WIDTH)], **(values | changes))


def test_what_is_asked_and_what_is_answered(engine: SglangEngine, server: Server, tmp_path: Path) -> None:
    engine.load(language(), 4)
    completion = write(engine, end=23, length=3)
    (load_path, load), (path, asked) = server.asked
    assert (load_path, load["model_path"], load["weight_version"]) == ("/update_weights_from_disk", str(tmp_path / "model"), "4")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as weights:
        assert set(weights.keys()) == set(language().state_dict())
    assert path == "/generate" and asked["return_logprob"] and "pickle" not in json.dumps(asked)
    assert [len(rows) for rows in asked["input_embeds"]] == [3, 5] and asked["input_embeds"][1] == torch.ones(5, WIDTH).tolist()
    first, second = asked["sampling_params"]
    assert first["logit_bias"] == {str(token): 1.5 * BIAS for token in range(24, 28)} and first["temperature"] == 1.5
    assert (first["sampling_seed"], second["sampling_seed"]) == (7, 5), "seeds fit 31 bits"
    assert (first["stop_token_ids"], first["max_new_tokens"], first["no_stop_trim"]) == ([23], 3, True)
    assert completion.ids_BN.tolist() == [[24, 25, 0]] * 2 and completion.mask_BN.tolist() == [[True, True, False]] * 2
    assert completion.log_prob_BN.tolist() == [[-0.5, -0.25, 0.0]] * 2
    write(engine, temperature=None)
    assert server.asked[-1][1]["sampling_params"][0]["temperature"] == 0.0


def test_a_successor_has_the_weights_before_it_is_asked_again(engine: SglangEngine, server: Server) -> None:
    engine.load(language(), 1)
    server.deeds = ["vanish"]
    assert write(engine).ids_BN[0].tolist() == [24, 25]
    assert [path for path, _ in server.asked] == ["/update_weights_from_disk", "/generate"] * 2
    server.deeds = ["vanish"] * 3
    with pytest.raises(EngineLost, match="failed 3 times in a row"):
        write(engine)


def test_what_does_not_fit_is_an_error(engine: SglangEngine, server: Server, tmp_path: Path) -> None:
    with pytest.raises(EngineLost, match="no weights yet"):
        write(engine)
    engine.load(language(), 2)
    with pytest.raises(ValueError, match="versions only grow"):
        engine.load(language(), 2)
    for deed, said in (("refuse", r"refused a request \(400\).*longer than"), ("stray", "ignores logit_bias")):
        server.deeds = [deed]
        with pytest.raises(EngineLost, match=said):
            write(engine)
    with pytest.raises(EngineLost, match="wrote 2 of 3 tokens of a row"):
        write(engine, length=3)
    server.version = "default"
    with pytest.raises(EngineLost, match="weights version default, and version 2 was asked for"):
        write(engine)
    nobody = SglangConfig(url="http://127.0.0.1:9", folder=str(tmp_path / "other"), start_s=0.01)
    with pytest.raises(EngineLost, match=r"no SGLang server answers.*sglang\.launch_server --model-path"):
        SglangEngine(nobody, language())


def test_what_listens_there_and_is_no_server_is_named(tmp_path: Path) -> None:
    """Something that answers with other bytes than HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(b"220 ready\r\n")

        greeting = threading.Thread(target=greet)
        greeting.start()
        with pytest.raises(EngineLost, match=r"no SGLang server answers at http://127"):
            SglangEngine(SglangConfig(url=url, folder=str(tmp_path), start_s=1e-9), language())
        greeting.join()


@pytest.mark.parametrize(
    "changes", [{"url": "127.0.0.1:30000"}, {"url": "http://host:port"}, {"url": "http://"}, {"start_s": 0.0}, {"lives": 0}]
)
def test_settings_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"sglang.{next(iter(changes))} is"):
        SglangConfig(**changes)
