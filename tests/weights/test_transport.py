"""One pair of calls over every transport; and the standby copy that takes a push while the policy acts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from synced_policy import INPUT_BI, SyncedPolicy, change
from torch import Tensor

from vla_rl.cluster.rendezvous import MeetingPlace
from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import World
from vla_rl.weights import shared_memory
from vla_rl.weights.collective import CollectiveReceiver
from vla_rl.weights.digest import weights_digest
from vla_rl.weights.errors import VersionError, WeightSyncError
from vla_rl.weights.layout import held_weights
from vla_rl.weights.transport import CollectiveAddress, Receiver, Sender, Transport, open_receiver

plain_unpack = CollectiveReceiver._unpack


def digest(engine: Engine) -> str:
    return weights_digest(dict(engine.named_weights()))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("transport", ["in_place", "shared_memory"])
def test_a_pull_brings_what_was_pushed(world: World, transport: Transport) -> None:
    engine, policy = Engine(SyncedPolicy(), EngineConfig(), 1, world), SyncedPolicy()
    sender = Sender(engine, transport)
    receiver = open_receiver(sender.address, policy, 0, None)
    with closing(sender), closing(receiver):
        for version in (3, 4):
            change(engine.policy, version)  # type: ignore[arg-type]
            before = weights_digest(held_weights(policy))
            sender.push(version)
            receiver.receive()
            assert weights_digest(held_weights(policy)) == before, "the policy acts with what it has until it pulls"
            assert receiver.pull(policy) == receiver.version == version
            receiver.verify(policy)
            assert weights_digest(held_weights(policy)) == digest(engine)


@pytest.mark.parametrize("transport", ["in_place", "shared_memory"])
def test_weights_arrive_in_the_precision_that_who_acts_holds(world: World, transport: Transport) -> None:
    """Rollouts of a bfloat16 trainer: as FSDP rounds what it gathers, and half the bytes."""
    engine, policy = Engine(SyncedPolicy(), EngineConfig(precision="bf16"), 1, world), SyncedPolicy().to(torch.bfloat16)
    sender = Sender(engine, transport, dtype=torch.bfloat16)
    receiver = open_receiver(sender.address, policy, 0, None)
    with closing(sender), closing(receiver):
        change(engine.policy, 3)  # type: ignore[arg-type]
        sender.push(3)
        assert receiver.pull(policy) == 3
        receiver.verify(policy)
        rounded = {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for name, tensor in engine.named_weights()}
        held = held_weights(policy)
        assert all(torch.equal(held[name], tensor) for name, tensor in rounded.items())


def test_a_push_in_the_middle_of_a_checked_pull_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a rollout worker is replaced beside an update: what it pulled is compared, not what came meanwhile."""
    engine, policy = Engine(SyncedPolicy(), EngineConfig(), 1, world), SyncedPolicy()
    sender = Sender(engine, "shared_memory")
    receiver = open_receiver(sender.address, policy, 0, None)
    with closing(sender), closing(receiver):
        sender.push(3)
        write = shared_memory.write

        def push_and_write(target: Tensor, source: Tensor) -> None:
            monkeypatch.setattr(shared_memory, "write", write)
            change(engine.policy, 4)  # type: ignore[arg-type]
            sender.push(4)
            write(target, source)

        monkeypatch.setattr(shared_memory, "write", push_and_write)
        assert receiver.pull(policy, verify=True) == 3
        assert receiver.pull(policy, verify=True) == 4, "a version without digests is compared with the trainer's memory"
        with torch.no_grad():
            next(policy.parameters()).add_(1.0)
        with pytest.raises(WeightSyncError, match=r"1 of .* tensors differ from what was pushed as version 4"):
            receiver.pull(policy, verify=True)


def connected(threads: ThreadPoolExecutor, engine: Engine, policy: SyncedPolicy, address: CollectiveAddress) -> tuple[Sender, Receiver]:
    """Both sides of a collective in this process; each waits for the other."""
    acted_with = None if address.generation == 0 else 1
    receiver = threads.submit(open_receiver, address, policy, 0, acted_with)
    return Sender(engine, "collective", address), receiver.result()


def unpack_and_lose(receiver: CollectiveReceiver) -> None:
    """One tensor of the new version has arrived when the connection breaks."""
    plain_unpack(receiver)
    for tensor in receiver._tensors[1:]:
        tensor.zero_()
    raise WeightSyncError("a member was lost")


def test_nothing_is_pulled_of_a_push_that_broke_off(world: World, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker died in it: what lies in the standby copy is of two versions, and was taken for the one before."""
    place = MeetingPlace("127.0.0.1")
    engine, policy = Engine(SyncedPolicy(), EngineConfig(), 1, world), SyncedPolicy(seed=1)
    sender, receiver = connected(threads, engine, policy, CollectiveAddress(place.address, 0, 1, "gloo"))
    for version in (1, 2):
        change(engine.policy, version)  # type: ignore[arg-type]
        arrived = threads.submit(receiver.receive)
        sender.push(version)
        if version == 1:
            arrived.result()
            assert receiver.pull(policy) == 1
            monkeypatch.setattr(CollectiveReceiver, "_unpack", unpack_and_lose)
    with pytest.raises(WeightSyncError, match="member was lost"):
        arrived.result()
    before = weights_digest(held_weights(policy))
    with pytest.raises(WeightSyncError, match="the push after version 1 broke off"):
        receiver.pull(policy)
    assert weights_digest(held_weights(policy)) == before
    place.close()


def test_a_push_arrives_beside_the_policy_and_again_after_a_reconnect(world: World, threads: ThreadPoolExecutor) -> None:
    place = MeetingPlace("127.0.0.1")
    engine, policy = Engine(SyncedPolicy(), EngineConfig(), 1, world), SyncedPolicy(seed=1)
    for generation in (0, 1):  # in the second, the trainer sends the version that the policy acts with once more
        sender, receiver = connected(threads, engine, policy, CollectiveAddress(place.address, generation, 1, "gloo"))
        if generation == 0:
            with pytest.raises(WeightSyncError, match="before the first push"):
                receiver.pull(policy)
        change(engine.policy, 1)  # type: ignore[arg-type]
        arrived = threads.submit(receiver.receive)
        times = sender.push(1)
        arrived.result()
        assert times["nbytes"] == sum(-(-tensor.nbytes // 64) * 64 for tensor in held_weights(SyncedPolicy()).values())
        assert torch.isfinite(policy.act(INPUT_BI)).all(), "it can act meanwhile"
        assert receiver.pull(policy) == 1
        receiver.verify(policy)
        assert weights_digest(held_weights(policy)) == digest(engine)
    with pytest.raises(VersionError):
        sender.push(1)
    arrived = threads.submit(receiver.receive)
    sender.push(2)
    arrived.result()
    with pytest.raises(WeightSyncError, match="version 2 has come: pull first"):
        receiver.verify(policy)
    assert receiver.pull(policy, verify=True) == 2, "only the first push of a sender has digests"
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    with pytest.raises(WeightSyncError, match=r"1 of .* tensors differ"):
        receiver.verify(policy)
    place.close()
