"""Chooses the tokens of each step: continuous batching over a pool of KV blocks, pure ints.

Every step extends the running sequences, the most entitled first (`fairness.py`), and then admits
others while token budget, sequences and blocks last. A sequence that decodes has its token before a
prompt takes what is left of the budget. A sequence whose image is not resident is held apart and
delays nobody. When blocks run out, the least entitled give up theirs (`block_tables.py`).

Nothing locks up: the sequence that was admitted first is never preempted, and alone it always fits,
so it ends. Sequences of one unit (the beams of a search) are admitted and preempted together.

This file knows counts of tokens and blocks; it refuses to know tensors and what a step computes.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from loraplex.engine.block_pool import BlockPool
from loraplex.engine.block_tables import BlockTables
from loraplex.engine.counters import Counters
from loraplex.engine.fairness import FairQueue
from loraplex.engine.host_slots import HostSlots
from loraplex.engine.plan import Draft, Plan, Scheduled
from loraplex.engine.protocol import Service
from loraplex.engine.sequence import Sequence

MOST_SERVICES = 256  # tenants that are reported

Unit = list[Sequence]


@dataclass(frozen=True)
class Limits:
    """Of one step. Needs `max_tokens >= max_seqs` and `max_wanted >= max_seqs`."""

    max_seqs: int
    max_tokens: int
    max_wanted: int  # rows whose logits are computed


class Scheduler:
    """Owns which sequences load, wait and run. Each unit must alone fit into the pool.

    `prefers_swap` is that of `BlockTables`.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostSlots,
        counters: Counters,
        limits: Limits,
        prefers_swap: Callable[[int, int], bool],
    ) -> None:
        self._tables, self._limits = BlockTables(pool, host, prefers_swap), limits
        self.counters = counters
        self._queue: FairQueue[Sequence] = FairQueue(counters)
        self._loading: dict[str, list[Sequence]] = {}
        self.running: list[Sequence] = []  # they hold blocks; in order of admission
        self.lacking_blocks = 0  # more that the last step could have used

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
        return len(self._queue)

    def add(self, sequence: Sequence) -> None:
        """Take a sequence: a base one waits for its turn, another first for its image."""
        if sequence.image is None:
            self._push(sequence)
        else:
            self._loading.setdefault(sequence.image, []).append(sequence)

    def image_ready(self, digest: str) -> None:
        """The image is resident: its sequences now wait for their turn."""
        for sequence in self._loading.pop(digest, ()):
            self._push(sequence)

    def loading_for(self, digest: str) -> list[Sequence]:
        """The sequences that wait for an image."""
        return list(self._loading.get(digest, ()))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._queue.ended(sequence)
        elif not self._queue.remove(sequence):
            self._stop_loading(sequence)
        self._tables.forget(sequence)

    def fork(self, sequence: Sequence, index: int) -> Sequence:
        """A running copy of a running sequence; they share blocks until one writes to them."""
        child = sequence.fork(index)
        self._tables.share(child)
        self.running.insert(self.running.index(sequence) + 1, child)
        self._queue.started(child)
        sequence.slots = 1
        return child

    def schedule(self) -> Plan:
        """Choose the next step's tokens and give them blocks."""
        limits = self._limits
        draft = Draft(limits.max_tokens, limits.max_wanted - limits.max_seqs)
        draft.decodes = sum(map(_decodes, self.running))
        self.lacking_blocks = 0
        units = self._units()
        while units:
            unit = units.popleft()
            draft.decodes -= sum(map(_decodes, unit))
            if self._make_room(unit, units, draft):
                for sequence in unit:
                    self._extend(sequence, draft)
        self._admit(draft)
        return draft.finish()

    def commit(self, sequence: Sequence, computed: int) -> None:
        """A step ran: the first `computed` of the sequence's tokens have KV."""
        sequence.computed = computed
        self._tables.store(sequence, computed)

    def store(self, sequence: Sequence, computed: int) -> None:
        """The same of a step for which `sequence.computed` was set when it was launched.

        A sequence that has lost its blocks since has nothing to store.
        """
        self._tables.store(sequence, computed)

    def renumber(self, moves: list[tuple[int, int]]) -> None:
        """Blocks have moved: those at each source are at its target now."""
        target = dict(moves)
        for sequence in self.running:
            sequence.block_table = [target.get(block, block) for block in sequence.block_table]

    def services(self) -> tuple[Service, ...]:
        """What tenants have had and have now, of those whose requests came last."""
        held = self._blocks_of_tenants()
        served = self._queue.services()[-MOST_SERVICES:]
        return tuple(Service(*each, kv_blocks=held[each.tenant]) for each in reversed(served))

    def check_integrity(self) -> None:
        """Raise unless blocks and slots are held by exactly the sequences that own them."""
        self._tables.check_integrity(self.running, self._queue)
        self._queue.check_integrity(self.running)

    def _push(self, sequence: Sequence) -> None:
        self.counters.set_policy(sequence.tenant, sequence.request.policy)
        self._tables.set_weight(sequence.tenant, sequence.request.policy.weight)
        self._queue.push(sequence)

    def _stop_loading(self, sequence: Sequence) -> None:
        image = sequence.image or ""
        if sequence in self._loading.get(image, ()):
            self._loading[image].remove(sequence)
            if not self._loading[image]:
                del self._loading[image]

    def _blocks_of_tenants(self) -> Counter[str]:
        """Blocks that each tenant's running sequences refer to."""
        held: Counter[str] = Counter()
        for sequence in self.running:
            held[sequence.tenant] += len(sequence.block_table)
        return held

    def _units(self) -> deque[Unit]:
        """Those that run, the most entitled first; before all, the one that was admitted first."""
        running = self.running
        if not running:
            return deque()
        if self._tables.free_count > len(running) and all(map(_decodes, running)):
            return deque(s.unit for s in running if s.unit[0] is s)  # nobody can lack anything
        first = running[0].unit
        units = deque([first])
        for sequence in self._queue.order(running):
            unit = sequence.unit
            if unit[0] is sequence and unit[0] is not first[0]:
                units.append(unit)
        return units

    def _make_room(self, unit: Unit, later: deque[Unit], draft: Draft) -> bool:
        """Preempt the least entitled until each sequence of the unit can have a token."""
        while (needed := self._tables.needed_next(unit)) > self._tables.free_count:
            if not later:
                self.lacking_blocks += needed - self._tables.free_count
                return False
            self._preempt(later.pop(), draft)
        return True

    def _preempt(self, unit: Unit, draft: Draft) -> None:
        draft.decodes -= sum(map(_decodes, unit))
        self._queue.push_preempted(unit[0])
        for sequence in unit:
            self._tables.take_away(sequence, draft)
            self.running.remove(sequence)
            self._queue.ended(sequence)
            draft.preempted.append(sequence)

    def _extend(self, sequence: Sequence, draft: Draft) -> None:
        """Schedule as many pending tokens as budget and blocks allow."""
        room = self._tables.room(sequence)
        count = min(sequence.pending, draft.budget - draft.decodes, room)
        count, wanted = _count_wanted(sequence, count, draft.wanted)
        if count <= 0:
            return
        self._tables.grow(sequence, count, draft)
        draft.scheduled.append(Scheduled(sequence, sequence.computed, count, wanted))
        draft.budget -= count
        draft.wanted -= max(0, wanted - 1)

    def _admit(self, draft: Draft) -> None:
        """Start sequences, in turn, while there are blocks for all their known tokens."""
        held = self._blocks_of_tenants() if len(self._queue) else Counter()
        while draft.budget > 0:
            head = self._queue.peek(lambda sequence: self._is_within_caps(sequence, held))
            if head is None or head in draft.preempted:
                return
            if _slots(self.running) + _slots(head.unit) > self._limits.max_seqs:
                return
            if lacking := self._tables.place(head.unit):
                self.lacking_blocks += lacking
                return
            self._start(head.unit, draft)
            held[head.tenant] += sum(len(sequence.block_table) for sequence in head.unit)

    def _is_within_caps(self, sequence: Sequence, held: Counter[str]) -> bool:
        """Whether the tenant may start this; one that runs nothing always may."""
        tenant, unit = sequence.tenant, sequence.unit
        running, policy = self._queue.running(tenant), self.counters.policy(tenant)
        if running == 0:
            return True
        blocks = held[tenant] + self._tables.needed_in_all(unit)
        if policy.kv_share < 1 and blocks > policy.kv_share * self._tables.limit:
            return False
        return policy.max_running is None or running + _slots(unit) <= policy.max_running

    def _start(self, unit: Unit, draft: Draft) -> None:
        """Let a unit run that has its blocks; a prompt is charged when it comes first."""
        for sequence in unit:
            self._queue.started(sequence)
        self._queue.take(unit[0])
        for sequence in unit:
            request = sequence.request
            self._tables.swap_in(sequence, draft)
            if request.scheduled is None:
                request.cached = sequence.computed
                computed = request.prompt_len - request.cached
                self.counters.charge(request.tenant, computed, cached_tokens=request.cached)
            self.running.append(sequence)
            self._extend(sequence, draft)


def _slots(sequences: Unit) -> int:
    """Sequences that these are or will become."""
    return sum(sequence.slots for sequence in sequences)


def _decodes(sequence: Sequence) -> bool:
    """Whether all it has to run is its newest token, and guesses."""
    return sequence.pending - len(sequence.drafts) == 1


def _count_wanted(sequence: Sequence, count: int, spare: int) -> tuple[int, int]:
    """Tokens to run of `count` at most, and how many of them have their logits computed.

    `spare` more rows than one for each sequence may be wanted. Guesses that do not fit are dropped.
    """
    request = sequence.request
    if request.wants_prompt_logprobs:
        count = min(count, request.prompt_len - sequence.computed, 1 + spare)
        return count, count
    known = sequence.pending - len(sequence.drafts)
    if count < known:
        return count, 0
    del sequence.drafts[max(0, min(count - known, spare)) :]
    return known + len(sequence.drafts), 1 + len(sequence.drafts)
