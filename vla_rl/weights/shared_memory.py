"""Weight sync on one host: two buffers in shared memory that take turns, and a version.

The trainer writes the back buffer, one flat copy per tensor, and then makes it the front. A worker either copies the front into its
policy, or makes its parameters views into it and so copies nothing. It holds the front buffer's lock meanwhile, shared; the trainer
takes the back buffer's lock alone. So a forward never sees a half-written model: a worker that is behind delays the trainer, and one
that stays behind ends the push with an error that names its process. Locks of a process that dies are released by the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from vla_rl.sim.shared_memory import SharedArena
from vla_rl.weights.block import Copiers, WeightBlock, block_size, write
from vla_rl.weights.buffer_lock import BufferLock
from vla_rl.weights.digest import combined_digest, require_same_digests, tensor_digest
from vla_rl.weights.errors import BufferHeldError, VersionError, WeightSyncError
from vla_rl.weights.gate import close_gate, open_gate
from vla_rl.weights.layout import WeightLayout, held_weights, policy_layout, require_contiguous
from vla_rl.weights.times import PushTimes, require_newer, timed

DEADLINE_S = 60.0
"""How long a side waits for a buffer that the other holds."""
NONE = -1
"""In the header: no front buffer yet, or a buffer without a complete version."""


@dataclass(frozen=True)
class SharedWeights:
    """What a worker needs to attach; small, and can be pickled."""

    arena: str
    locks: tuple[str, str]
    layout: WeightLayout


class SharedMemorySender:
    """The trainer's side, on rank 0; the other ranks use `Follower`."""

    def __init__(self, layout: WeightLayout, deadline_s: float = DEADLINE_S) -> None:
        """Lay out both buffers and touch every page. Raises OSError when the memory is not there."""
        self.layout = layout
        self.version = NONE
        """Version of the last complete push."""
        self.times = PushTimes()
        """Of the last push."""
        self._deadline_s = deadline_s
        self._arena = SharedArena.create(block_size(layout), "vla-rl-weights")
        self._arena.prefault()
        self._locks = (BufferLock.create(), BufferLock.create())
        self._block = WeightBlock(self._arena, layout)
        self._block.front[:] = NONE
        self._block.versions[:] = NONE
        self._copiers = Copiers()
        self._digest_next = True

    @property
    def address(self) -> SharedWeights:
        """For `SharedMemoryReceiver`, in any process of the same user while this one lives."""
        return SharedWeights(self._arena.path, (self._locks[0].path, self._locks[1].path), self.layout)

    def request_digest(self) -> None:
        """The next push carries digests, as the first one does; workers check them when they pull."""
        self._digest_next = True

    def push(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write full tensors in the order of the layout, cast to its dtypes, and make them the front.

        Raises VersionError unless `version` is newer than the last, BufferHeldError where a worker holds the back buffer beyond the
        deadline (nothing is written then), and LayoutMismatch for other tensors (the front stays what it was).
        """
        require_newer(version, self.version)
        back = (int(self._block.front[0]) + 1) % 2
        self._take(back, version)
        try:
            self._block.versions[back] = NONE
            self.times = PushTimes(nbytes=self.layout.nbytes)
            walk = timed(named_weights, self.times)
            self._copiers.write_all(self._targets(back, walk))
            self._block.has_digests[back] = self._digest_next
            self._block.versions[back] = version
        finally:
            self._locks[back].release()
        self._block.front[0] = back
        self.version, self._digest_next = version, False
        self.times.finish()

    def verify(self) -> str:
        """Digest (hex) of the front buffer as it lies in memory. Raises WeightSyncError before the first push."""
        front = int(self._block.front[0])
        if front == NONE:
            raise WeightSyncError("nothing was pushed yet, so there is nothing to verify; push first")
        return combined_digest({e.name: tensor_digest(t) for e, t in zip(self.layout.synced, self._block.tensors[front])})

    def close(self) -> None:
        """Give the memory back; workers that map it keep it until they let go."""
        self._copiers.close()
        self._arena.close()
        for lock in self._locks:
            lock.close()

    def _targets(self, back: int, named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """(place in the back buffer, tensor) in the order of the layout; leaves digests on the way where they are wanted."""
        for index, (entry, _, tensor) in enumerate(self.layout.matched(named_weights)):
            if self._digest_next:
                self._block.digests[back, index] = np.frombuffer(tensor_digest(tensor.to(entry.dtype)), np.uint8)
            yield self._block.tensors[back][index], tensor

    def _take(self, back: int, version: int) -> None:
        if not self._locks[back].take(shared=False, deadline_s=self._deadline_s):
            raise BufferHeldError(
                f"version {version} was not pushed: process {', '.join(map(str, self._locks[back].holders()))} has held the weights of "
                f"version {int(self._block.versions[back])} for more than {self._deadline_s:g} s; it must pull between forwards "
                "(or copy: SharedMemoryReceiver(..., mapped=False))"
            )


class SharedMemoryReceiver:
    """A worker's side, for one policy. Not for threads: pull where no forward runs."""

    def __init__(
        self, address: SharedWeights, policy: nn.Module, mapped: bool, version: int = NONE, deadline_s: float = DEADLINE_S
    ) -> None:
        """Attach, and compare layouts; `policy` cannot act before the first pull.

        `mapped` makes the parameters (on the CPU) views into shared memory: nothing is copied, and the worker holds a buffer until its
        next pull. Without it the weights are copied, to any device. `version` is what the policy acted with before a reconnect.
        Raises LayoutMismatch, and WeightSyncError where the trainer is gone or the policy cannot be mapped.
        """
        policy_layout(policy, address.layout).require_equal(address.layout, "the worker's policy", "the trainer")
        require_contiguous(policy)
        elsewhere = [name for name, tensor in held_weights(policy).items() if tensor.device.type != "cpu"]
        if mapped and elsewhere:
            raise WeightSyncError(f"mapped weights lie in host memory, but these are on a device: {', '.join(elsewhere)}; use mapped=False")
        self.version = version
        self._policy, self._mapped, self._deadline_s, self._layout = policy, mapped, deadline_s, address.layout
        live = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
        self._tensors = [live[entry.name] for entry in address.layout.synced]
        self._arena, self._locks = _attach(address)
        self._block = WeightBlock(self._arena, address.layout)
        self._block.touch()
        self._held = NONE
        self._whole = False
        close_gate(policy, "no weights were pulled since this worker started")

    def pull(self, policy: nn.Module, verify: bool = False) -> int:
        """Bring `policy` to the newest version and return it; does nothing where it has that already. Checks digests where there are any.

        `verify` compares in any case, before another push can make this version the older one. Raises WeightSyncError before the first
        push and for weights that differ, and VersionError where the trainer is behind what this policy acted with.
        """
        self._require_own(policy)
        front = self._take_front()
        version = int(self._block.versions[front])
        if version < self.version:
            self._let_go(front)
            raise VersionError(f"the trainer offers version {version}, this worker acted with version {self.version}; versions must grow")
        try:
            if not self._whole or version > self.version:
                self._bring(front, version)
            if verify:
                self._compare(front)
        finally:
            if not self._mapped:
                self._let_go(front)
        return version

    def verify(self, policy: nn.Module) -> str:
        """The digest (hex) of `policy`. Raises WeightSyncError unless it is the digest of this version in the trainer's memory."""
        self._require_own(policy)
        front = self._take_front()
        try:
            version = int(self._block.versions[front])
            if version != self.version:
                raise WeightSyncError(f"the policy holds version {self.version}, the trainer offers {version}: pull first")
            return self._compare(front)
        finally:
            if self._held != front:
                self._let_go(front)

    def close(self) -> None:
        """Let go of the memory. A mapped policy gets a copy of its weights, so that it can outlive the trainer."""
        if self._mapped and self._held != NONE:
            for tensor in self._tensors:
                tensor.data = tensor.data.clone()
        for lock in self._locks:
            lock.close()
        self._arena.close()

    def _take_front(self) -> int:
        """The front buffer, locked; it cannot become the back buffer of a push that writes while we hold it."""
        while True:
            front = int(self._block.front[0])
            if front == NONE:
                raise WeightSyncError("weights were pulled before the first push; push before any policy acts")
            if not self._locks[front].take(shared=True, deadline_s=self._deadline_s):
                writers = ", ".join(map(str, self._locks[front].holders()))
                raise BufferHeldError(f"process {writers} has been writing for more than {self._deadline_s:g} s; look at the trainer")
            if front == int(self._block.front[0]) and int(self._block.versions[front]) != NONE:
                return front
            if front != self._held:
                self._let_go(front)  # a push has finished in between: there are newer weights

    def _bring(self, front: int, version: int) -> None:
        """Make the front buffer the policy's weights, and let it act if they are what was sent."""
        close_gate(self._policy, f"version {version} did not arrive as it was sent")
        self._whole = False
        self._adopt(front)
        self.version = version
        if self._block.has_digests[front]:
            self._compare(front)
        self._whole = True
        open_gate(self._policy)

    def _adopt(self, front: int) -> None:
        """Map or copy the front buffer's tensors."""
        if self._mapped:
            for tensor, view in zip(self._tensors, self._block.tensors[front]):
                tensor.data = view
            if self._held not in (NONE, front):
                self._let_go(self._held)
            self._held = front
        else:
            for tensor, view in zip(self._tensors, self._block.tensors[front]):
                write(tensor.data, view)

    def _compare(self, front: int) -> str:
        """Compare the policy with the trainer's digests, or where the version has none, with the bytes in shared memory."""
        held = held_weights(self._policy)
        ours = {entry.name: tensor_digest(held[entry.name]) for entry in self._layout.synced}
        if self._block.has_digests[front]:
            theirs = {entry.name: self._block.digests[front, index].tobytes() for index, entry in enumerate(self._layout.synced)}
        else:
            theirs = {entry.name: tensor_digest(view) for entry, view in zip(self._layout.synced, self._block.tensors[front])}
        require_same_digests(ours, theirs, self.version)
        return combined_digest(ours)

    def _let_go(self, buffer: int) -> None:
        self._locks[buffer].release()

    def _require_own(self, policy: nn.Module) -> None:
        if policy is not self._policy:
            raise WeightSyncError("this receiver was connected to another policy; connect one receiver per policy")


def _attach(address: SharedWeights) -> tuple[SharedArena, tuple[BufferLock, BufferLock]]:
    try:
        first, second = address.locks
        return SharedArena.attach(address.arena), (BufferLock.attach(first), BufferLock.attach(second))
    except FileNotFoundError as error:
        raise WeightSyncError(
            f"the trainer's weights are not there any more ({address.arena}); it has ended, or closed its sender"
        ) from error
