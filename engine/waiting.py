"""The queue of sequences that could run: tenants take turns, those that were preempted go first.

Within a tenant the order is that of arrival. It refuses to know blocks, images and budgets.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator

from loraplex.engine.sequence import Sequence


class WaitingQueue:
    """First the preempted, oldest first; then one of each tenant in turn."""

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._tenants: OrderedDict[str, deque[Sequence]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._tenants.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        for queue in self._tenants.values():
            yield from queue

    def push(self, sequence: Sequence) -> None:
        """Add a sequence behind its tenant's others."""
        self._tenants.setdefault(sequence.tenant, deque()).append(sequence)

    def push_preempted(self, sequence: Sequence) -> None:
        """Add a sequence before all others; its victims come in reverse order of admission."""
        self._preempted.appendleft(sequence)

    def peek(self) -> Sequence | None:
        """The next sequence, or None when there is none."""
        return next(iter(self), None)

    def pop(self) -> Sequence:
        """Take the next sequence; its tenant goes behind the other tenants."""
        if self._preempted:
            return self._preempted.popleft()
        tenant, queue = next(iter(self._tenants.items()))
        sequence = queue.popleft()
        self._tenants.move_to_end(tenant)
        self._drop_if_empty(tenant)
        return sequence

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence from anywhere in the queue; False when it is not there."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            return True
        queue = self._tenants.get(sequence.tenant, ())
        if sequence not in queue:
            return False
        self._tenants[sequence.tenant].remove(sequence)
        self._drop_if_empty(sequence.tenant)
        return True

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._tenants[tenant]:
            del self._tenants[tenant]
