"""Reinforcement learning on a Ray cluster of two nodes (on this machine): driver, workers and trainer rank in different processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from cluster_run import RUN
from ray.cluster_utils import Cluster
from rl_recipe import metrics_of, rl_recipe, same_weights
from small_roles import Echo

from vla_rl.cluster.config import ClusterConfig
from vla_rl.cluster.errors import RoleHung, RoleLost
from vla_rl.cluster.liveness import Counts
from vla_rl.cluster.ray_backend import RayBackend, RayMember, RayParcel
from vla_rl.config import ConfigError
from vla_rl.phases import rl
from vla_rl.phases.rl_collect import Collector
from vla_rl.phases.rl_config import RlConfig

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}
TWO_NODES = ClusterConfig(backend="ray", rollout_workers=2, nodes=2, torch_threads=1)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.faults
def test_two_nodes_give_the_bits_of_one_process_also_when_both_workers_are_killed(
    two_nodes: Cluster, inline: RlConfig, initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, parcels, places, killed = Collector._take, list[RayParcel](), set[tuple[str, str]](), list[int]()

    def take(self: Any, worker: int, post: Any, *arguments: Any) -> None:
        places.update((str(member.name.node), member.name.log) for member in (*self._crew.trainers, *self._crew.workers))
        plain(self, worker, post, *arguments)
        parcels.extend(rolled.parcel for rolled in self._rolled.values() if rolled.parcel not in parcels)
        if self._crew._version == 1 and not killed:
            killed.extend(int(Path(member.name.log).stem.rpartition("-")[2]) for member in self._crew.workers)
            for process in killed:
                os.kill(process, signal.SIGKILL)

    monkeypatch.setattr(Collector, "_take", take)
    config = rl_recipe(tmp_path / "run", initial, **RUN, cluster=TWO_NODES)
    assert rl.run_rl(config) == 0
    assert same_weights(config, inline)
    assert len({node for node, _ in places}) == 2 and len({log for _, log in places}) == 5, "rank, two workers, and another life of both"
    assert len(killed) == 2 and not any(psutil.pid_exists(process) for process in killed)
    located = ray.experimental.get_object_locations([parcel.reference for parcel in parcels])
    sizes = [place["object_size"] for place in located.values()]
    assert len(sizes) == 12 and min(sizes) > 200_000, "every episode lies in an object store, once"
    assert metrics_of(config)[-1]["driver_megabytes"] * 1e6 < sum(sizes) / 20


@pytest.mark.faults
def test_a_lost_actor_is_a_typed_error(two_nodes: Cluster) -> None:
    with closing(RayBackend(ClusterConfig(backend="ray", torch_threads=1), None)) as backend:
        member = backend.start("trainer", 0, Echo, "hello")
        assert member.call("greet", "Ada").result() == "hello, Ada"
        with pytest.raises(ConfigError, match="this was asked for"):
            member.call("fail").result()
        assert backend.loss_of(member) is None
        with pytest.raises(RoleLost, match=r"trainer 0 on .* \(node .*\(log: .*worker-.*was lost") as caught:
            member.call("shout").result()
        assert caught.value.name.rank == 0 and Path(caught.value.name.log).exists()
        assert backend.loss_of(member) is not None


@pytest.mark.faults
def test_a_stopped_actor_is_a_typed_error_and_its_place_is_free_again(two_nodes: Cluster) -> None:
    with closing(RayBackend(ClusterConfig(backend="ray", torch_threads=1, heartbeat_deadline_s=15.0), None)) as backend:
        member = backend.start("worker", 0, Echo, "hello")
        process = psutil.Process(member.call("process").result())
        process.suspend()
        with pytest.raises(RoleHung, match=r"worker 0 on .* \(node .*\(log: .*worker-.*no sign of life for 1\d s"):
            member.call("greet", "Ada").result()
        again = backend.start("worker", 0, Echo, "hello again")
        assert again.call("greet", "Ada").result() == "hello again, Ada"
        gone, _ = psutil.wait_procs([process], timeout=60)
        assert gone == [process]


def test_an_actor_that_answered_is_up_also_before_its_first_beat(two_nodes: Cluster) -> None:
    """One that stops right after its first answer was never missed: the watch took it for one that still starts."""
    with closing(RayBackend(ClusterConfig(backend="ray", torch_threads=1), None)) as backend:
        actor = backend.start("worker", 0, Echo, "hello").actor
        never = ray.remote(num_cpus=1000)(lambda: 0).remote()  # no machine is that large
        without_beats = SimpleNamespace(make=actor.make, where=actor.where, pulse=SimpleNamespace(remote=lambda: never))
        member = RayMember("worker", 0, without_beats, Echo, ("hello",))
        member.ready.result()
        assert [member.counts(), member.counts()] == [Counts(1, 0), Counts(1, 0)]


def test_a_cluster_that_is_too_small_says_so(two_nodes: Cluster) -> None:
    with pytest.raises(ConfigError, match="need 6 CPUs and the Ray cluster has 4"):
        RayBackend(ClusterConfig(backend="ray", rollout_workers=5, torch_threads=1), None)
