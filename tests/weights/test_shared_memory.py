"""Weights through shared memory: whole, newest, in order, and freed by whoever dies."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import pytest
import torch
from synced_policy import SyncedPolicy, change
from weight_jobs import Uniform, act, act_while_written, hold_buffer, receive, start, write_and_hang

from vla_rl.engine.config import EngineConfig
from vla_rl.engine.engine import Engine
from vla_rl.engine.world import World
from vla_rl.weights.digest import weights_digest
from vla_rl.weights.errors import BufferHeldError, LayoutMismatch, NotPulledError, VersionError, WeightSyncError
from vla_rl.weights.in_place import InPlaceSync
from vla_rl.weights.layout import TensorEntry, WeightLayout, engine_layout, held_weights, synced_weights
from vla_rl.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender


def uniform_layout() -> WeightLayout:
    return WeightLayout(tuple(TensorEntry(name, tuple(p.shape), p.dtype) for name, p in Uniform().named_parameters()))


def engine_of(world: World, trainable: str = "all") -> Engine:
    return Engine(SyncedPolicy(), EngineConfig(trainable=trainable), 1, world)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("trainable", ["all", "expert"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_worker_holds_the_trainers_bits(world: World, mapped: bool, trainable: str, dtype: torch.dtype | None) -> None:
    engine = engine_of(world, trainable)
    sender = SharedMemorySender(engine_layout(engine, dtype))
    policy = SyncedPolicy().to(dtype)
    receiver = SharedMemoryReceiver(sender.address, policy, mapped)
    for version in (1, 2, 5):
        change(engine.policy, version)  # pyright: ignore[reportArgumentType]
        sender.push(synced_weights(engine), version)
        assert receiver.pull(policy) == receiver.pull(policy) == version
        wanted = {name: tensor.to(held_weights(policy)[name].dtype) for name, tensor in engine.named_weights()}
        assert weights_digest(held_weights(policy)) == weights_digest(wanted)
        assert receiver.verify(policy) == sender.verify()
    assert policy.reading.weight is policy.writing.weight
    receiver.close()
    sender.close()


def test_in_place_and_shared_memory_are_interchangeable(world: World) -> None:
    """The same calls, the same actions."""
    engine = engine_of(world)
    sender, in_place = SharedMemorySender(engine_layout(engine)), InPlaceSync()
    one, two = SyncedPolicy(), SyncedPolicy()
    receiver = SharedMemoryReceiver(sender.address, one, mapped=True)
    change(engine.policy, 1)  # pyright: ignore[reportArgumentType]
    sender.push(synced_weights(engine), 1)
    in_place.push(engine.named_weights(), 1)
    assert receiver.pull(one) == in_place.pull(two) == 1
    assert receiver.verify(one) == in_place.verify(two)
    assert torch.equal(act(one), act(two))


def test_mapped_parameters_are_the_arena_and_copies_are_not() -> None:
    sender = SharedMemorySender(uniform_layout())
    mapped, copied = Uniform(), Uniform()
    receivers = [SharedMemoryReceiver(sender.address, policy, policy is mapped) for policy in (mapped, copied)]
    sender.push(Uniform().fill(1).named_parameters(), 1)
    for receiver, policy in zip(receivers, (mapped, copied)):
        receiver.pull(policy)
    sender._block.tensors[0][0][7] = 42.0
    assert mapped.parts[0][7] == 42.0
    assert copied.parts[0][7] == 1.0
    receivers[0].close()
    sender._block.tensors[0][0][7] = 43.0
    assert mapped.parts[0][7] == 42.0  # a closed receiver leaves the policy with a copy


def test_nothing_acts_before_its_first_pull() -> None:
    sender = SharedMemorySender(uniform_layout())
    sender.push(Uniform().fill(1).named_parameters(), 1)
    policy = Uniform().fill(9)  # a restarted worker: whatever it was built with
    receiver = SharedMemoryReceiver(sender.address, policy, mapped=False)
    with pytest.raises(NotPulledError, match="no weights were pulled since this worker started; pull first"):
        policy.act()
    receiver.pull(policy)
    assert policy.act() == {1.0}


def test_pull_before_push_is_an_error() -> None:
    sender = SharedMemorySender(uniform_layout())
    policy = Uniform()
    receiver = SharedMemoryReceiver(sender.address, policy, mapped=False)
    with pytest.raises(WeightSyncError, match="before the first push"):
        receiver.pull(policy)
    with pytest.raises(NotPulledError):
        policy.act()


def test_versions_only_grow_also_over_a_resume() -> None:
    first = SharedMemorySender(uniform_layout())
    first.push(Uniform().fill(7).named_parameters(), 7)
    for version in (7, 6):
        with pytest.raises(VersionError, match=f"version {version} were pushed after version 7"):
            first.push(Uniform().named_parameters(), version)
    policy = Uniform()
    assert SharedMemoryReceiver(first.address, policy, mapped=False).pull(policy) == 7
    resumed = SharedMemorySender(uniform_layout())  # from a checkpoint of step 5, while the worker lived on
    resumed.push(Uniform().fill(5).named_parameters(), 5)
    receiver = SharedMemoryReceiver(resumed.address, policy, mapped=False, version=7)
    with pytest.raises(VersionError, match="offers version 5, this worker acted with version 7"):
        receiver.pull(policy)
    with pytest.raises(NotPulledError):
        policy.act()
    resumed.push(Uniform().fill(8).named_parameters(), 8)
    assert receiver.pull(policy) == 8
    assert policy.act() == {8.0}


def test_unlike_policies_are_refused_at_connect(world: World) -> None:
    sender = SharedMemorySender(engine_layout(engine_of(world)))
    with pytest.raises(LayoutMismatch, match=r"value_head.weight: torch.bfloat16 \[1, 24\] in the worker's policy, torch.float32"):
        SharedMemoryReceiver(sender.address, SyncedPolicy().to(torch.bfloat16), mapped=True)


def test_a_trainer_that_is_gone_is_named() -> None:
    sender = SharedMemorySender(uniform_layout())
    address = sender.address
    sender.close()
    with pytest.raises(WeightSyncError, match="has ended, or closed its sender"):
        SharedMemoryReceiver(address, Uniform(), mapped=True)


def test_a_wrong_bit_is_found_at_the_first_sync_and_on_demand() -> None:
    sender = SharedMemorySender(uniform_layout())
    policy = Uniform()
    receiver = SharedMemoryReceiver(sender.address, policy, mapped=False)
    sender.push(Uniform().fill(1).named_parameters(), 1)
    sender._block.tensors[0][3][11] = 1.0000001  # the transport's fault, planted
    with pytest.raises(WeightSyncError, match=r"1 of 8 tensors differ from what was pushed as version 1: parts\.3"):
        receiver.pull(policy)
    with pytest.raises(NotPulledError, match="did not arrive as it was sent"):
        policy.act()
    sender.push(Uniform().fill(2).named_parameters(), 2)
    receiver.pull(policy)
    with torch.no_grad():
        policy.parts[5][0] = 3.0
    with pytest.raises(WeightSyncError, match=r"parts\.5"):
        receiver.verify(policy)
    sender.request_digest()
    sender.push(Uniform().fill(3).named_parameters(), 3)
    sender._block.tensors[0][1][0] = 0.0
    with pytest.raises(WeightSyncError, match=r"parts\.1"):
        receiver.pull(policy)


def test_a_push_of_other_tensors_leaves_the_front_as_it_was() -> None:
    sender = SharedMemorySender(uniform_layout())
    policy = Uniform()
    receiver = SharedMemoryReceiver(sender.address, policy, mapped=True)
    sender.push(Uniform().fill(1).named_parameters(), 1)
    with pytest.raises(LayoutMismatch):
        sender.push(list(Uniform().fill(2).named_parameters())[:5], 2)
    assert receiver.pull(policy) == 1
    assert policy.act() == {1.0}
    sender.push(Uniform().fill(2).named_parameters(), 2)
    assert receiver.pull(policy) == 2


def race(mapped: bool, careless: bool, pushes: int) -> tuple[int, int]:
    """A writer that pushes as fast as it can against a reader that acts as fast as it can, in two processes."""
    sender = SharedMemorySender(uniform_layout())
    process, reader = start(act_while_written, sender.address, mapped, pushes, careless)
    assert receive(reader) == "connected"
    model = Uniform()
    sender.push(model.fill(1).named_parameters(), 1)
    reader.send("go")
    for version in range(2, pushes + 1):
        sender.push(model.fill(version).named_parameters(), version)
    torn, versions = receive(reader)
    process.join()
    return torn, versions


@pytest.mark.parametrize("mapped", [True, False])
def test_a_forward_never_sees_a_half_written_model(mapped: bool) -> None:
    torn, versions = race(mapped, careless=False, pushes=400)
    assert torn == 0
    assert versions > 20  # they did race: the reader met many versions, each while others were being written


def test_the_race_would_show_a_torn_model() -> None:
    """The same race, with a reader that lets go of its buffer before it acts."""
    torn, _ = race(mapped=True, careless=True, pushes=400)
    assert torn > 0


def holder(sender: SharedMemorySender) -> tuple[int, Connection]:
    """A process that maps version 1 and keeps it."""
    process, connection = start(hold_buffer, sender.address)
    assert receive(connection) == 1
    assert process.pid is not None
    return process.pid, connection


def test_a_reader_that_holds_a_buffer_delays_the_trainer_until_an_error_names_it() -> None:
    sender = SharedMemorySender(uniform_layout(), deadline_s=0.2)
    sender.push(Uniform().fill(1).named_parameters(), 1)
    pid, connection = holder(sender)
    sender.push(Uniform().fill(2).named_parameters(), 2)  # into the other buffer
    with pytest.raises(BufferHeldError, match=f"version 3 was not pushed: process {pid} has held the weights of version 1 for more than"):
        sender.push(Uniform().fill(3).named_parameters(), 3)
    connection.send("pull")
    assert receive(connection) == 2
    sender.push(Uniform().fill(3).named_parameters(), 3)
    connection.send("pull")
    assert receive(connection) == 3


@pytest.mark.faults
def test_a_killed_reader_lets_go() -> None:
    sender = SharedMemorySender(uniform_layout(), deadline_s=30)
    sender.push(Uniform().fill(1).named_parameters(), 1)
    pid, connection = holder(sender)
    sender.push(Uniform().fill(2).named_parameters(), 2)
    os.kill(pid, signal.SIGKILL)
    sender.push(Uniform().fill(3).named_parameters(), 3)
    connection.close()


@pytest.mark.faults
def test_a_trainer_killed_in_the_middle_of_a_push_leaves_the_last_whole_version() -> None:
    process, trainer = start(write_and_hang, uniform_layout())
    address = receive(trainer)
    policies = Uniform(), Uniform()
    receivers = [SharedMemoryReceiver(address, policy, mapped) for policy, mapped in zip(policies, (True, False))]
    assert receive(trainer) == "half"
    process.kill()
    process.join()
    for receiver, policy in zip(receivers, policies):
        assert receiver.pull(policy) == 1
        assert policy.act() == {1.0}
