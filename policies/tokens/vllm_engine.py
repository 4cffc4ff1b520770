"""vLLM as a rollout engine: a process of its own that continues prompts which the policy embeds.

The policy embeds images, prompt and state with its own weights; the engine runs the language model, whose weights it is sent after
every update. Messages are a JSON header and raw bytes over a socket pair:

    {"do": "load", "path", "version"}                                                        -> {"version"}
    {"do": "write", "version", "lengths", "first", "choices", "end", "length", "temperature", "seeds"} + float32 embeddings
                                                                                             -> {"version", "tokens", "log_probs"}
    any -> {"error"}

A process that dies, or does not answer in time, is replaced; its successor gets the weights before it is asked again.

Shape legend: B rows;  S positions of a prompt;  M model width;  N tokens.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.config import ConfigError
from vla_rl.errors import UserError
from vla_rl.policies.tokens.vllm_server import receive, send

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)
_SERVER = Path(__file__).with_name("vllm_server.py")
CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of an attention head for which vLLM 0.32 has a kernel on a CPU."""
_SEED_BITS = 2**63
_LOG_LINES = 20
"""Lines of the process's output in an error."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
"""One process, which tells nobody, downloads nothing, and does not compile its sampler first (15 s on two idle cores)."""


class EngineLost(UserError):
    """The vLLM process cannot be started, keeps dying, or refuses what it is asked."""


@dataclass(frozen=True)
class VllmConfig:
    """The vLLM process of a rollout worker."""

    python: str = ".venv-vllm/bin/python"
    """Interpreter of the environment that vLLM is installed in; `make vllm` builds this one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of its weights and sums; `float32` is what the trainer computes in."""
    cache_gib: int = 1
    """Memory for keys and values (GiB), on the GPU of the policy where it has one; at least 1."""
    start_s: float = 300.0
    """Longest time until it is ready (s); above 0."""
    answer_s: float = 120.0
    """Longest time for one answer (s); above 0."""
    lives: int = 3
    """How often in a row it may be started without one answer in between; at least 1."""

    def __post_init__(self) -> None:
        for name, least in (("cache_gib", 1), ("lives", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"vllm.{name} is {getattr(self, name)}; it must be at least {least}")
        for name in ("start_s", "answer_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"vllm.{name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True)
class Completion:
    """What the engine wrote."""

    ids_BN: Tensor
    """int64[B, N]: the vocabulary's ids, padded with 0."""
    mask_BN: Tensor
    """bool[B, N]: real tokens, the end mark included."""
    log_prob_BN: Tensor
    """float32[B, N]: of each token among those allowed, at the temperature; 0 where padded."""


class VllmEngine:
    """The process, and the version of the weights that it answers with."""

    def __init__(self, config: VllmConfig, language: PreTrainedModel, rows: int, longest: int) -> None:
        """Start a process for models like `language`, up to `rows` prompts at a time, of at most `longest` positions with their answers.

        It answers nothing before `load`. Raises EngineLost where it does not come up.
        """
        self.config, self.version, self.starts = config, -1, 0
        """`starts` counts the processes so far."""
        self._folder = Path(tempfile.mkdtemp(prefix="vla_rl_vllm_", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        write_model_config(language, self._folder)
        self._settings = {
            "model": str(self._folder),
            "width": language.config.hidden_size,
            "dtype": config.dtype,
            "max_rows": rows,
            "max_length": longest,
            "cache_bytes": config.cache_gib << 30,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._since_answer = 0
        try:
            self._insist(None)
        except BaseException:
            self.close()
            raise

    def load(self, language: PreTrainedModel, version: int) -> None:
        """Hand over the weights of `version`. Raises ValueError unless it is newer than the last."""
        if version <= self.version:
            raise ValueError(f"weights version {version} was handed over after version {self.version}; versions only grow")
        path, old = self._weights(version), self._weights(self.version)
        write_weights(language, path)
        self.version = version
        self._insist({"do": "load", "path": str(path), "version": version})
        old.unlink(missing_ok=True)

    def write(
        self,
        prompts: Sequence[Tensor],
        choices: range,
        end: int | None,
        length: int,
        temperature: float | None,
        seeds: Sequence[int],
    ) -> Completion:
        """Continue prompts float32[S, M] by `length` tokens of `choices`, or until `end`.

        Without a temperature the likeliest tokens. Raises EngineLost where the process keeps dying, or refuses.
        """
        request = {
            "do": "write",
            "version": self.version,
            "lengths": [len(prompt) for prompt in prompts],
            "first": choices.start,
            "choices": len(choices),
            "end": end,
            "length": length,
            "temperature": 0.0 if temperature is None else temperature,
            "seeds": [int(seed) % _SEED_BITS for seed in seeds],
        }
        payload = torch.cat([prompt.detach().float().cpu() for prompt in prompts]).contiguous().numpy().tobytes()
        reply = self._insist(request, payload)
        if reply["version"] != self.version:
            raise EngineLost(f"vLLM answered with weights version {reply['version']}, and version {self.version} was asked for")
        return completion_of(reply["tokens"], reply["log_probs"], length, end)

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process and remove its files."""
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _insist(self, request: dict[str, Any] | None, payload: bytes = b"") -> dict[str, Any]:
        """The answer, from as many processes as it takes; with None, only start one."""
        while True:
            try:
                if self._connection is None:
                    self._start()
                if request is None:
                    return {}
                reply = self._ask(self.config.answer_s, request, payload)
            except (OSError, EOFError) as loss:
                self._give_up_or_go_on(loss)
                continue
            self._since_answer = 0
            return reply

    def _give_up_or_go_on(self, loss: BaseException) -> None:
        self._stop()
        if self._since_answer >= self.config.lives:
            raise EngineLost(
                f"vLLM was started {self._since_answer} times without an answer (last: {loss or type(loss).__name__}); "
                f"its output ends with\n{self._tail()}\ncheck it with `make test-vllm`, or set rollout_engine.kind to 'transformers'"
            ) from loss
        _LOG.warning("vLLM was lost (%s); starting it again with weights version %d", loss or type(loss).__name__, self.version)

    def _start(self) -> None:
        """A new process, with the weights that the last one had. Raises OSError or EOFError where it does not come up."""
        if not Path(self.config.python).is_file():
            raise EngineLost(f"vllm.python is {self.config.python!r}, which does not exist; `make vllm` builds .venv-vllm, or name another")
        self.starts += 1
        self._since_answer += 1
        ours, theirs = socket.socketpair()
        with theirs, open(self._folder / "output.txt", "ab") as output:
            self._process = subprocess.Popen(
                [self.config.python, str(_SERVER), str(theirs.fileno()), json.dumps(self._settings)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._connection = ours
        self._answer(self.config.start_s)
        if self.version >= 0:
            self._ask(self.config.answer_s, {"do": "load", "path": str(self._weights(self.version)), "version": self.version})

    def _ask(self, timeout_s: float, request: dict[str, Any], payload: bytes = b"") -> dict[str, Any]:
        assert self._connection is not None
        self._connection.settimeout(timeout_s)
        send(self._connection, request, payload)
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._connection is not None
        self._connection.settimeout(timeout_s)
        message = receive(self._connection)
        if message is None:
            raise EOFError("the process ended")
        if "error" in message[0]:
            raise EngineLost(f"vLLM refused a request:\n{message[0]['error']}")
        return message[0]

    def _stop(self) -> None:
        """End the process first: one whose connection closes takes its parent for dead and removes the folder."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _weights(self, version: int) -> Path:
        return self._folder / f"weights_{version}.safetensors"

    def _tail(self) -> str:
        lines = (self._folder / "output.txt").read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])


def write_model_config(language: PreTrainedModel, folder: Path) -> None:
    """transformers' `config.json`, by which an engine builds the model."""
    language.config.architectures = [type(language).__name__]
    language.config.save_pretrained(folder)


def write_weights(language: PreTrainedModel, path: Path) -> None:
    """All of its tensors as safetensors, under transformers' names."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in language.state_dict().items()}, path)


def completion_of(tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], length: int, end: int | None) -> Completion:
    """What an engine wrote, row by row, as tensors of `length` columns.

    Raises EngineLost for a row that stopped early where nothing ends one (`end` None): actions that nobody wrote would be the lowest bin.
    """
    shortest = min(map(len, tokens), default=length)
    if end is None and shortest < length:
        raise EngineLost(f"the engine wrote {shortest} of {length} tokens of a row; is its context or its memory for keys and values full?")
    rows = len(tokens)
    ids_BN, log_prob_BN = torch.zeros(rows, length, dtype=torch.int64), torch.zeros(rows, length)
    mask_BN = torch.zeros(rows, length, dtype=torch.bool)
    for row, (written, scores) in enumerate(zip(tokens, log_probs, strict=True)):
        ids_BN[row, : len(written)] = torch.tensor(written)
        log_prob_BN[row, : len(written)] = torch.tensor(scores)
        mask_BN[row, : len(written)] = True
    return Completion(ids_BN, mask_BN, log_prob_BN)
