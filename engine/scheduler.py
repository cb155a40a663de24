"""Chooses the tokens of each step: continuous batching over a pool of KV blocks, pure ints.

Every step extends the running sequences in order of admission and then admits others while token
budget and blocks last. A prompt takes all the budget that is left, so only the sequence that was
admitted last can be in the middle of its prompt: decodes always go first. A sequence whose image is
not resident is held apart and delays nobody. When blocks run out, the sequence that was admitted
last gives up its own and is computed again later; the one that was admitted first is never
preempted, and alone it always fits, so the oldest always ends and nothing can lock up.

This file knows counts of tokens and blocks; it refuses to know tensors, times and token ids.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from loraplex.engine.block_pool import BlockPool, BrokenPool
from loraplex.engine.sequence import Sequence
from loraplex.engine.waiting import WaitingQueue


@dataclass(frozen=True)
class Scheduled:
    """Tokens [start, start + count) of a sequence, to be run in this step."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True)
class Plan:
    """What one step runs, and who lost its blocks to make room."""

    scheduled: tuple[Scheduled, ...]
    preempted: tuple[Sequence, ...]


@dataclass
class _Step:
    """A plan in the making."""

    budget: int
    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns which sequences load, wait and run, and their block tables.

    Needs `max_num_batched_tokens >= max_num_seqs`, and sequences that alone fit into the pool.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_seqs, self._max_tokens = max_num_seqs, max_num_batched_tokens
        self._loading: dict[str, list[Sequence]] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # in order of admission

    @property
    def loading_images(self) -> list[str]:
        """Digests of the images that sequences wait for."""
        return list(self._loading)

    @property
    def loading(self) -> int:
        """Sequences whose image is not resident yet."""
        return sum(map(len, self._loading.values()))

    @property
    def waiting(self) -> int:
        """Sequences that could run and wait for their turn."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence: a base one waits for its turn, another first for its image."""
        if sequence.image is None:
            self._waiting.push(sequence)
        else:
            self._loading.setdefault(sequence.image, []).append(sequence)

    def image_ready(self, digest: str) -> list[Sequence]:
        """The image is resident: its sequences, returned, now wait for their turn."""
        ready = self._loading.pop(digest, [])
        for sequence in ready:
            self._waiting.push(sequence)
        return ready

    def loading_for(self, digest: str) -> list[Sequence]:
        """The sequences that wait for an image."""
        return list(self._loading.get(digest, ()))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, and free its blocks."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._free(sequence)
        elif not self._waiting.remove(sequence) and sequence.image is not None:
            queue = self._loading[sequence.image]
            queue.remove(sequence)
            if not queue:
                del self._loading[sequence.image]

    def schedule(self) -> Plan:
        """Choose the next step's tokens and give them blocks."""
        step = _Step(self._max_tokens)
        for sequence in list(self._running):
            if sequence not in step.preempted:
                self._extend(sequence, step)
        self._admit(step)
        return Plan(tuple(step.scheduled), tuple(step.preempted))

    def commit(self, scheduled: Iterable[Scheduled]) -> None:
        """The step ran: its tokens are computed."""
        for part in scheduled:
            part.sequence.computed = part.start + part.count

    def check_integrity(self) -> None:
        """Raise `BrokenPool` unless exactly the running sequences hold blocks, enough of them."""
        self._pool.check_integrity(sequence.block_table for sequence in self._running)
        for sequence in self._running:
            if len(sequence.block_table) * self._pool.block_size < sequence.computed:
                raise BrokenPool(f"{sequence.request_id} has more tokens than its blocks hold")

    def _extend(self, sequence: Sequence, step: _Step) -> None:
        """Schedule as many pending tokens as budget and blocks allow."""
        room = self._make_room(sequence, step)
        count = min(sequence.pending, step.budget, room)
        if count == 0:
            return
        missing = self._pool.blocks_for(sequence.computed + count) - len(sequence.block_table)
        if missing > 0:
            sequence.block_table += self._pool.allocate(missing)
        step.scheduled.append(Scheduled(sequence, sequence.computed, count))
        step.budget -= count

    def _make_room(self, sequence: Sequence, step: _Step) -> int:
        """Preempt those admitted later, last first, until the sequence can have a token.

        Returns how many tokens it can have.
        """
        while (room := self._room(sequence)) == 0 and self._running[-1] is not sequence:
            victim = self._running.pop()
            self._free(victim)
            self._waiting.push_preempted(victim)
            step.preempted.append(victim)
        return room

    def _room(self, sequence: Sequence) -> int:
        """Tokens that the sequence could add with its own blocks and the free ones."""
        blocks = len(sequence.block_table) + self._pool.free_count
        return blocks * self._pool.block_size - sequence.computed

    def _admit(self, step: _Step) -> None:
        """Start sequences, in turn, while there are blocks for all their known tokens."""
        while step.budget > 0 and len(self._running) < self._max_seqs:
            sequence = self._waiting.peek()
            if sequence is None:
                return
            if self._pool.blocks_for(len(sequence.token_ids)) > self._pool.free_count:
                return
            self._running.append(self._waiting.pop())
            self._extend(sequence, step)

    def _free(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.computed = 0
