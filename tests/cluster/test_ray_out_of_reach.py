"""A cluster that does not answer, and an actor that Ray cannot reach but that lives, where connections are given up after seconds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest
import ray
from small_roles import Echo

from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleHung
from vla_rl.cluster.ray_backend import RayBackend
from vla_rl.config import ConfigError

GIVEN_UP_AFTER_MS = 5000


@pytest.fixture(scope="module")
def impatient() -> Iterator[None]:
    settings = {f"grpc_client_keepalive_{part}_ms": GIVEN_UP_AFTER_MS for part in ("time", "timeout")}
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _system_config=settings)
    yield
    ray.shutdown()


def test_an_address_where_nobody_answers_is_refused_at_once() -> None:
    """Ray would try for minutes, and then end the process from C++."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and not listening
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=rf"cluster\.ray_address is '{address}', and no Ray cluster answers there .*`ray start --head`"
        ):
            RayBackend(ClusterConfig(backend="ray", ray_address=address), None)


@pytest.mark.faults
def test_an_actor_out_of_reach_is_ended_so_that_its_place_is_free(impatient: None) -> None:
    """The watch has 300 s; Ray loses the connection long before."""
    with closing(RayBackend(ClusterConfig(backend="ray", torch_threads=1, heartbeat_deadline_s=300.0), None)) as backend:
        member = backend.start("worker", 0, Echo, "hello")
        process = psutil.Process(member.call("process").result())
        process.suspend()
        with pytest.raises(
            RoleHung, match=r"worker 0 on .* was lost: out of reach: The actor .* unavailable: .*; it was killed\. Start the same"
        ):
            member.call("greet", "Ada").result()
        gone, _ = psutil.wait_procs([process], timeout=60)
        assert gone == [process]
        again = backend.start("worker", 0, Echo, "hello again")
        assert again.call("greet", "Ada").result() == "hello again, Ada"
        assert isinstance(backend.loss_of(member), RoleHung)
