"""A scheduler without an engine: sequences of ones, and steps that only count."""

from typing import Any

from loraplex.engine.block_pool import BlockPool
from loraplex.engine.counters import Counters
from loraplex.engine.host_slots import HostSlots
from loraplex.engine.plan import Plan, Scheduled
from loraplex.engine.protocol import Generate, Policy, Sampling
from loraplex.engine.scheduler import Limits, Scheduler
from loraplex.engine.sequence import Sequence, from_request, name_blocks

OPEN = Policy()


class Subject:
    """A scheduler over `blocks` blocks, and the sequences that it was given, by their names."""

    def __init__(
        self,
        blocks: int,
        *,
        seqs: int = 8,
        tokens: int = 16,
        wanted: int = 0,
        size: int = 4,
        slots: int = 0,
    ) -> None:
        self.pool, self.host = BlockPool(blocks, size), HostSlots(slots)
        limits = Limits(seqs, tokens, wanted or seqs)
        self.scheduler = Scheduler(self.pool, self.host, Counters(), limits, lambda *_: slots > 0)
        self.sequences: dict[str, list[Sequence]] = {}
        self._arrived = 0

    def add(
        self,
        name: str,
        prompt: int,
        *,
        tokens: int = 1,
        image: str | None = None,
        tenant: str = "",
        scope: str = "",
        policy: Policy = OPEN,
        choices: int = 1,
        priority: int = 0,
        token: int | None = None,
        **sampling: Any,
    ) -> Sequence:
        """A sequence whose tokens are nobody else's, or all of them `token`."""
        self._arrived += 1
        first = 1000 * self._arrived
        token_ids = tuple(range(first, first + prompt)) if token is None else (token,) * prompt
        message = Generate(
            name, token_ids, Sampling(tokens, **sampling), image, tenant, scope, policy,
            priority=priority, choices=choices,
        )  # fmt: skip
        sequence = from_request(message, float(self._arrived), (), 1 << 20)
        name_blocks(sequence, "base")
        self.scheduler.add(sequence)
        self.sequences[name] = sequence.request.alive
        return sequence

    def schedule(self) -> Plan:
        return self.scheduler.schedule()

    def commit(self, scheduled: list[Scheduled] | tuple[Scheduled, ...]) -> None:
        """The parts ran: whose tokens are all computed gets one more."""
        for part in scheduled:
            sequence = part.sequence
            if part.end == len(sequence.token_ids) + len(sequence.drafts):
                sequence.token_ids += [*sequence.drafts, 1]
                sequence.drafts = []
            self.scheduler.commit(sequence, part.end)
        self.scheduler.check_integrity()

    def run(self) -> Plan:
        plan = self.schedule()
        self.commit(plan.scheduled)
        return plan

    def fork(self, name: str, choices: int) -> list[Sequence]:
        alive = self.sequences[name]
        children = [self.scheduler.fork(alive[0], index) for index in range(1, choices)]
        alive += children
        self.scheduler.check_integrity()
        return children

    def end(self, name: str) -> None:
        for sequence in self.sequences.pop(name):
            self.scheduler.remove(sequence)
        self.scheduler.check_integrity()
