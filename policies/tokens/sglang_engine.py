"""SGLang as a rollout engine: a client of a server that somebody else runs, with the interface of `VllmEngine`.

Written from SGLang's sources (`srt/managers/io_struct.py`, `srt/sampling/sampling_params.py`) and tested against answers in their form,
never against a server. What is asked, as JSON over HTTP:

    GET  /health
    POST /update_weights_from_disk {"model_path", "weight_version", "flush_cache"}                   -> {"success", "message"}
    POST /generate {"input_embeds", "sampling_params": [...], "return_logprob"}  -> [{"output_ids", "meta_info": {...}}, ...]

The server is started on this machine, or on one that shares `folder`, as the error of one that is not there says.

Shape legend: B rows;  S positions of a prompt;  M model width;  N tokens.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torch import Tensor

from vla_rl.config import ConfigError
from vla_rl.policies.tokens.vllm_engine import Completion, EngineLost, completion_of, write_model_config, write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
BIAS = 60.0
"""Added to the logits of the tokens that may be chosen, at temperature 1: the others' share is below e^-40, and float32 still tells
logits apart by 4e-6. (SGLang has no list of allowed tokens without code that is sent to it pickled.)"""
_SEED_BITS = 2**31
_POLL_S = 0.5
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class SglangConfig:
    """The SGLang server of a rollout worker."""

    url: str = "http://127.0.0.1:30000"
    """Where it listens."""
    folder: str = "runs/sglang"
    """The model's folder, which the server reads and the worker writes; one per server."""
    start_s: float = 600.0
    """Longest wait for a server that is not there (s); above 0."""
    answer_s: float = 120.0
    """Longest time for one answer (s); above 0."""
    lives: int = 3
    """How often in a row an answer may fail; at least 1."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"sglang.url is {self.url!r}; it must begin with http:// or https://")
        try:
            complete = bool(urlsplit(self.url).hostname) and urlsplit(self.url).port != 0
        except ValueError:
            complete = False
        if not complete:
            raise ConfigError(f"sglang.url is {self.url!r}, which is no address; write http://HOST:PORT")
        for name in ("start_s", "answer_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"sglang.{name} is {getattr(self, name)}; it must be above 0")
        if self.lives < 1:
            raise ConfigError(f"sglang.lives is {self.lives}; it must be at least 1")


class SglangEngine:
    """A server's client, and the version of the weights that it answers with."""

    def __init__(self, config: SglangConfig, language: PreTrainedModel) -> None:
        """Write the model's config where the server looks for it, and wait until it answers. Raises EngineLost where none does."""
        self.config, self.version, self.starts = config, -1, 1
        """`starts` counts the servers so far, as far as anybody noticed."""
        self._folder = Path(config.folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        write_model_config(language, self._folder)
        self._wait()

    def load(self, language: PreTrainedModel, version: int) -> None:
        """Hand over the weights of `version`. Raises ValueError unless it is newer than the last."""
        if version <= self.version:
            raise ValueError(f"weights version {version} was handed over after version {self.version}; versions only grow")
        write_weights(language, self._folder / _WEIGHTS)
        self.version = version
        self._insist(None)

    def write(
        self,
        prompts: Sequence[Tensor],
        choices: range,
        end: int | None,
        length: int,
        temperature: float | None,
        seeds: Sequence[int],
    ) -> Completion:
        """See `VllmEngine.write`."""
        if self.version < 0:
            raise EngineLost("the SGLang server has no weights yet; call `load` first")
        settings = [_sampling(choices, end, length, temperature, seed) for seed in seeds]
        embeds = [prompt.detach().float().cpu().tolist() for prompt in prompts]
        rows = self._insist({"input_embeds": embeds, "sampling_params": settings, "return_logprob": True})
        versions = {str(row["meta_info"].get("weight_version")) for row in rows}
        if versions != {str(self.version)}:
            raise EngineLost(f"SGLang answered with weights version {', '.join(versions)}, and version {self.version} was asked for")
        tokens = [[int(token) for _, token, *_ in row["meta_info"]["output_token_logprobs"]] for row in rows]
        if any(token not in choices for row in tokens for token in row):
            raise EngineLost(f"SGLang wrote a token outside {choices.start} to {choices.stop - 1}: its server ignores logit_bias")
        log_probs = [[float(log_prob) for log_prob, *_ in row["meta_info"]["output_token_logprobs"]] for row in rows]
        return completion_of(tokens, log_probs, length, end)

    def close(self) -> None:
        """Nothing is held: the server is somebody else's."""

    def _insist(self, request: dict[str, Any] | None) -> list[dict[str, Any]]:
        """The answer to a generation; with None only the weights. A server that was lost gets the weights before it is asked again."""
        failures, loaded = 0, request is not None
        while True:
            try:
                if not loaded:
                    self._update()
                    loaded = True
                return [] if request is None else self._post("/generate", request)
            except (OSError, HTTPException, json.JSONDecodeError) as loss:
                failures, loaded = failures + 1, False
                if failures >= self.config.lives:
                    raise EngineLost(f"SGLang at {self.config.url} failed {failures} times in a row (last: {loss})") from loss
                _LOG.warning("SGLang was lost (%s); it gets weights version %d again", loss, self.version)
                self.starts += 1
                self._wait()

    def _update(self) -> None:
        order = {"model_path": str(self._folder), "weight_version": str(self.version), "flush_cache": True}
        reply = self._post("/update_weights_from_disk", order)
        if not reply.get("success"):
            raise EngineLost(f"SGLang refused weights version {self.version}: {reply.get('message', reply)}")

    def _wait(self) -> None:
        deadline = time.monotonic() + self.config.start_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.config.url}/health", timeout=self.config.answer_s):
                    return
            except (OSError, HTTPException, UnicodeError) as error:  # whatever listens there, and names that are none
                if time.monotonic() >= deadline:
                    raise EngineLost(
                        f"no SGLang server answers at {self.config.url} ({error}); start one with `python -m sglang.launch_server "
                        f"--model-path {self._folder} --load-format dummy --skip-tokenizer-init --disable-radix-cache --dtype float32`"
                    ) from error
                time.sleep(_POLL_S)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer. Raises EngineLost for a refused request; OSError, HTTPException or JSONDecodeError where it is lost."""
        request = urllib.request.Request(self.config.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.config.answer_s) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise EngineLost(f"SGLang refused a request ({error.code}): {error.read().decode(errors='replace')[:500]}") from error


def _sampling(choices: range, end: int | None, length: int, temperature: float | None, seed: int) -> dict[str, Any]:
    bias = BIAS * max(1.0, temperature or 1.0)
    return {
        "temperature": 0.0 if temperature is None else temperature,
        "sampling_seed": int(seed) % _SEED_BITS,
        "max_new_tokens": length,
        "ignore_eos": True,
        "stop_token_ids": [] if end is None else [end],
        "no_stop_trim": True,
        "logit_bias": {str(token): bias for token in choices},
    }
