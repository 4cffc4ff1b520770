"""The vLLM process: continues prompts given as embeddings, with weights that it is sent.

Run by the interpreter of vLLM's own environment as `python vllm_server.py FD SETTINGS`, with one end of a socket pair as descriptor
FD; it imports nothing of vla_rl, whose packages are not there. See `vllm_engine.py` for the other end, and for the messages.

Weights come through vLLM's weight-transfer interface (start, update, finish). The build's own transports need CUDA (`nccl`, `ipc`),
so this file registers one that works everywhere on one machine: safetensors in shared memory, named by path.
"""
# Neither torch's nor vLLM's versions are those of the environment that checks types:
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("<II")
"""Bytes of the JSON header, and of the payload behind it."""
SHARE_AT_START = 0.01
"""Part of the GPU that must be free at the start: vLLM's own 0.92 refuses a GPU on which the policy lives. The cache's size is given."""
TRANSPORT = "safetensors_file"
"""Name under which the weight transport is registered."""


class Server:
    """One language model, the version of its weights, and the requests that it answers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import vllm
        from vllm.config.weight_transfer import WeightTransferConfig

        _register_transport()
        self.version = -1
        self.width = settings["width"]
        self.release = vllm.__version__
        self._llm = vllm.LLM(
            model=settings["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prompt_embeds=True,
            enable_prefix_caching=False,
            enforce_eager=True,
            dtype=settings["dtype"],
            max_model_len=settings["max_length"],
            max_num_seqs=settings["max_rows"],
            kv_cache_memory_bytes=settings["cache_bytes"],
            gpu_memory_utilization=SHARE_AT_START,
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=TRANSPORT),
            disable_log_stats=True,
            seed=0,
        )
        self._llm.collective_rpc("init_weight_transfer_engine", args=({},))

    def load(self, path: str, version: int) -> dict[str, Any]:
        """Take over the weights in a safetensors file."""
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", args=({"path": path},))
        self._llm.collective_rpc("finish_weight_update")
        self.version = version
        return {"version": version}

    def write(self, request: dict[str, Any], payload: bytes) -> dict[str, Any]:
        """Continue prompts: tokens of the allowed range and their log-probabilities under it, at the request's temperature."""
        if self.version < 0:
            raise RuntimeError("no weights were loaded yet")
        if request["version"] != self.version:
            raise RuntimeError(f"tokens of weights version {request['version']} were asked for, and version {self.version} is loaded")
        prompts = [{"prompt_embeds": embeds} for embeds in self._prompts(request["lengths"], payload)]
        settings = [_sampling(request, seed) for seed in request["seeds"]]
        outputs = [output.outputs[0] for output in self._llm.generate(prompts, settings, use_tqdm=False)]
        return {
            "version": self.version,
            "tokens": [list(output.token_ids) for output in outputs],
            "log_probs": [
                [place[token].logprob for token, place in zip(output.token_ids, output.logprobs, strict=True)] for output in outputs
            ],
        }

    def _prompts(self, lengths: list[int], payload: bytes) -> list[Any]:
        import torch

        flat = torch.frombuffer(bytearray(payload), dtype=torch.float32).view(-1, self.width)
        return list(flat.split(lengths))


def _sampling(request: dict[str, Any], seed: int) -> Any:
    from vllm import SamplingParams

    fixed = request["end"] is None
    return SamplingParams(
        temperature=request["temperature"],
        seed=seed,
        max_tokens=request["length"],
        min_tokens=request["length"] if fixed else 0,
        ignore_eos=True,
        stop_token_ids=[] if fixed else [request["end"]],
        allowed_token_ids=list(range(request["first"], request["first"] + request["choices"])),
        logprobs=0,
        detokenize=False,
    )


def _register_transport() -> None:
    from safetensors.torch import load_file
    from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Nothing(WeightTransferInitInfo):
        """The transport needs no rendezvous."""

    @dataclass
    class File(WeightTransferUpdateInfo):
        """A whole set of weights."""

        path: str

    class FileTransport(WeightTransferEngine):
        """Full weights in checkpoint format, from a file."""

        init_info_cls, update_info_cls = Nothing, File

        def init_transfer_engine(self, init_info: Nothing) -> None:
            """Nothing to set up."""

        def start_weight_update(self) -> None:
            """vLLM's preparation for weights in checkpoint format."""
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """As the base class's, without its wait for an accelerator, which a CPU has not."""
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: File) -> None:
            """Read and load."""
            self.model.load_weights(load_file(update_info.path, device=str(self.device)).items())

        def finish_weight_update(self) -> None:
            """vLLM's processing of what was loaded."""
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Nothing is held."""

    WeightTransferEngineFactory.register_engine(TRANSPORT, FileTransport)


def send(connection: socket.socket, header: dict[str, Any], payload: bytes = b"") -> None:
    """One message."""
    encoded = json.dumps(header).encode()
    connection.sendall(_HEADER.pack(len(encoded), len(payload)) + encoded)
    connection.sendall(payload)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None where the other end is gone."""
    sizes = _read(connection, _HEADER.size)
    if sizes is None:
        return None
    header_bytes, payload_bytes = _HEADER.unpack(sizes)
    header, payload = _read(connection, header_bytes), _read(connection, payload_bytes)
    return None if header is None or payload is None else (json.loads(header), payload)


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def main() -> None:
    """Answer until the other end is gone, which a parent that was killed cannot announce; then its files go too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; its end of the socket then closes
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    server = Server(settings)
    send(connection, {"vllm": server.release, "pid": os.getpid()})
    while (message := receive(connection)) is not None:
        request, payload = message
        try:
            reply = server.load(request["path"], request["version"]) if request["do"] == "load" else server.write(request, payload)
        except Exception:  # noqa: BLE001 (whatever went wrong belongs to who asked; the process lives on)
            reply = {"error": traceback.format_exc()}
        send(connection, reply)
    shutil.rmtree(settings["model"], ignore_errors=True)


if __name__ == "__main__":
    main()
    os._exit(0)
