"""`vla-rl bench serve`: round trips to a policy server, against openpi's own client and server loop.

Regime: a policy that computes nothing, two 224-pixel pictures a request (301 kB), server and client in a process each, on one machine.
Round trips: openpi-client against a server loop like openpi's, and our client against our server, interleaved; the ratio is of medians.
Throughput: 1, 4 and 16 of openpi's own clients against either server, so that the server alone makes the difference.
Ours batches over clients and answers health checks while it computes; openpi's computes in its event loop. The bar is 1 for the round trip:
that must cost nothing. Throughput is shown beside it. No physical limit is claimed: both sides are Python and the loopback.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.bench.common import benchmark_parser, finish, median_iqr
from vla_rl.bench.openpi_environment import openpi_python
from vla_rl.episode import ACTION_DIM, STATE_DIM, VIEWS, Float32, Observation
from vla_rl.policies.base import PolicyOutput, PolicySpec
from vla_rl.policies.flow_stochastic import Exploration
from vla_rl.policies.remote.client import open_client
from vla_rl.policies.remote.served import ServedPolicy
from vla_rl.serving import ServeConfig, serve_in_foreground

PEER = Path(__file__).with_name("openpi_peer.py")
PIXELS, CHUNK = 224, 10
CLIENTS = (1, 4, 16)
BAR = 1.0


class NullPolicy:
    """Answers zeros; what remains of a round trip is the protocol's."""

    spec = PolicySpec(CHUNK, CHUNK, resolution=PIXELS)

    def preprocess(self, observations: Sequence[Observation]) -> Tensor:
        """One row of nothing for each."""
        return torch.zeros(len(observations), CHUNK, ACTION_DIM)

    def act(self, batch: Tensor, noise_seeds: Sequence[int], exploration: Exploration | None = None) -> PolicyOutput:
        """The same zeros."""
        return PolicyOutput(batch)

    def postprocess(self, actions_BCA: Tensor) -> Float32:
        """The same zeros."""
        return actions_BCA.numpy()


def main(argv: list[str]) -> int:
    """Run the pairs; prints the closing JSON line and returns 0 when the bar is reached."""
    parser = benchmark_parser("serve", __doc__)
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs of fresh clients, at least 1")
    parser.add_argument("--requests", type=int, default=300, help="round trips of each client, at least 10")
    arguments = parser.parse_args(argv)
    python = str(openpi_python())
    with _process(python, "-P", str(PEER), "server") as theirs, _process(sys.executable, "-m", __name__, "server") as ours:
        trips = [(_ask(_peer(python, theirs, 1, arguments)), _ask(_own(ours, arguments))) for _ in range(arguments.pairs)]
        rates = {clients: _rates(python, theirs, ours, clients, arguments) for clients in CLIENTS}
    return report(trips, rates, arguments)


def report(trips: Sequence[tuple[dict[str, Any], dict[str, Any]]], rates: dict[int, tuple[list[float], list[float]]], options: Any) -> int:
    """Print rows and the closing line; the ratio is the round trip's."""
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(("openpi-client and its server loop", "vla-rl client and server")):
        medians = [1000 * statistics.median(pair[number]["times"]) for pair in trips]
        p99 = [1000 * float(np.quantile(pair[number]["times"], 0.99)) for pair in trips]
        rows.append(
            {"what": f"round trip, {name}", "p50_ms": round(statistics.median(medians), 4), "p99_ms": round(statistics.median(p99), 4)}
        )
    ratio, low, high = median_iqr([_median(theirs) / _median(ours) for theirs, ours in trips])
    rows.append({"what": "round trip ratio", "ratio": round(ratio, 4), "iqr": [round(low, 4), round(high, 4)]})
    for clients, (theirs, ours) in rates.items():
        served, low, high = median_iqr([mine / other for other, mine in zip(theirs, ours)])
        values = {"openpi_per_s": round(statistics.median(theirs), 1), "vla_rl_per_s": round(statistics.median(ours), 1)}
        rows.append(
            {"what": f"requests, {clients} openpi clients", **values, "ratio": round(served, 4), "iqr": [round(low, 4), round(high, 4)]}
        )
    for row in rows:
        print(json.dumps(row), flush=True)
    return finish("serve", ratio, BAR, None, rows, options)


def _median(measured: dict[str, Any]) -> float:
    return statistics.median(measured["times"])


def _rates(python: str, theirs: str, ours: str, clients: int, arguments: Any) -> tuple[list[float], list[float]]:
    """Requests per second of either server, in interleaved pairs."""
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(arguments.pairs):
        for url, found in zip((theirs, ours), rates):
            measured = _ask(_peer(python, url, clients, arguments, max(10, arguments.requests // clients)))
            found.append(len(measured["times"]) / measured["seconds"])
    return rates


def _peer(python: str, url: str, clients: int, arguments: Any, requests: int | None = None) -> list[str]:
    return [python, "-P", str(PEER), "client", url, str(clients), str(requests or arguments.requests)]


def _own(url: str, arguments: Any) -> list[str]:
    return [sys.executable, "-m", __name__, "client", url, str(arguments.requests)]


def _ask(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def _process(*command: str) -> Iterator[str]:
    """A server process; gives the URL that it prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"{' '.join(command)} ended before it served")
            yield url
        finally:
            process.terminate()


def _serve() -> None:
    policy = NullPolicy()
    config = ServeConfig("null", port=0)
    serve_in_foreground(config, policy, ServedPolicy("null", "", policy.spec), "cpu", lambda url: print(url, flush=True))


def _client(url: str, requests: int) -> None:
    picture = np.zeros((PIXELS, PIXELS, 3), np.uint8)
    observation = Observation({view: picture.copy() for view in VIEWS}, np.zeros(STATE_DIM, np.float32), "pick up the milk")
    times: list[float] = []
    with closing(open_client(url, timeout_s=30.0)) as client:
        client.ask(observation, 0)
        for seed in range(requests):
            began = time.perf_counter()
            client.ask(observation, seed)
            times.append(time.perf_counter() - began)
    print(json.dumps({"seconds": sum(times), "times": times}))


if __name__ == "__main__":
    # Only `main` starts this, in fresh processes: `server`, or `client URL REQUESTS`.
    if sys.argv[1] == "server":
        _serve()
    else:
        _client(sys.argv[2], int(sys.argv[3]))
