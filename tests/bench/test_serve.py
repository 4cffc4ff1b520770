"""The serving benchmark: its null policy is really served, and the ratio is the round trip's."""

from __future__ import annotations

import argparse
import json
from contextlib import closing

import numpy as np
import pytest

from vla_rl.bench import serve
from vla_rl.episode import STATE_DIM, VIEWS, Observation
from vla_rl.policies.remote.client import open_client
from vla_rl.policies.remote.served import ServedPolicy
from vla_rl.serving import ServeConfig, served_in_background

OPTIONS = argparse.Namespace(record=None)


def test_the_null_policy_is_served() -> None:
    policy = serve.NullPolicy()
    observation = Observation({view: np.zeros((8, 8, 3), np.uint8) for view in VIEWS}, np.zeros(STATE_DIM, np.float32), "reach")
    served = ServedPolicy("null", "", policy.spec)
    with served_in_background(ServeConfig("null", port=0), policy, served) as url, closing(open_client(url, 20.0)) as client:
        assert client.ask(observation, 0).tolist() == [[0.0] * 7] * serve.CHUNK


def test_the_ratio_is_the_round_trips_and_throughput_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    trips = [({"times": [0.002, 0.003, 0.9]}, {"times": [0.001, 0.0015, 0.5]})] * 3
    assert serve.report(trips, {4: ([100.0, 110.0], [200.0, 220.0])}, OPTIONS) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["name"], result["ratio"], result["bar"]) == ("serve", 2.0, 1.0)
    assert result["rows"][0]["p50_ms"] == 3.0 and result["rows"][-1]["ratio"] == 2.0
    slower = [({"times": [0.001]}, {"times": [0.002]})]
    assert serve.report(slower, {}, OPTIONS) == 1
