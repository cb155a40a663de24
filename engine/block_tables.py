"""The blocks of each sequence: given for its tokens, shared, copied, cached, swapped out and back.

What is to be copied is noted in the step's draft; the executor does it before the step. This file
knows sequences, a pool of blocks and the host's slots; it refuses to know who deserves a block.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences

from loraplex.engine.block_pool import BlockPool, BrokenPool
from loraplex.engine.host_slots import HostSlots
from loraplex.engine.plan import Draft
from loraplex.engine.prefix_cache import extend_hashes
from loraplex.engine.sequence import Sequence


class BlockTables:
    """Keeps the tables of sequences over one pool.

    `prefers_swap` says for a number of computed tokens and of blocks whether swapping these costs
    less than computing those again.
    """

    def __init__(
        self, pool: BlockPool, host: HostSlots, prefers_swap: Callable[[int, int], bool]
    ) -> None:
        self._pool, self._host, self._prefers_swap = pool, host, prefers_swap
        self._size = pool.block_size

    @property
    def limit(self) -> int:
        """Blocks that there are."""
        return self._pool.limit

    @property
    def free_count(self) -> int:
        """Blocks that can be given now."""
        return self._pool.free_count

    def needed_in_all(self, unit: Iterable[Sequence]) -> int:
        """Blocks that hold all tokens that the sequences know."""
        return sum(self._pool.blocks_for(len(sequence.token_ids)) for sequence in unit)

    def needed_next(self, unit: Iterable[Sequence]) -> int:
        """Blocks that the sequences need for one token each."""
        return sum(map(self._least, unit))

    def room(self, sequence: Sequence) -> int:
        """Tokens that the sequence could add with its own blocks and the free ones."""
        blocks = len(sequence.block_table) + self._pool.free_count - self._is_shared(sequence)
        return blocks * self._size - sequence.computed

    def grow(self, sequence: Sequence, count: int, draft: Draft) -> None:
        """Give the sequence blocks of its own for its next `count` tokens (copy-on-write)."""
        table, (place, offset) = sequence.block_table, divmod(sequence.computed, self._size)
        if self._is_shared(sequence):
            [fresh] = self._pool.allocate(1)
            if offset:
                draft.copies.append((table[place], fresh))
            self._pool.release([table[place]])
            table[place] = fresh
        missing = self._pool.blocks_for(sequence.computed + count) - len(table)
        if missing > 0:
            table += self._pool.allocate(missing)

    def share(self, sequence: Sequence) -> None:
        """Count a fork as one more holder of its blocks."""
        self._pool.share(sequence.block_table)

    def place(self, unit: Sequences[Sequence]) -> int:
        """Give all of a unit blocks for their known tokens, cached ones where there are any.

        Returns how many blocks are lacking; none of them has any then.
        """
        for count, sequence in enumerate(unit):
            lacking = self._place(sequence)
            if lacking > 0:
                for placed in unit[:count]:
                    self.release(placed)
                return lacking
        return 0

    def swap_in(self, sequence: Sequence, draft: Draft) -> None:
        """Bring swapped blocks back to the blocks that the sequence was given."""
        draft.swap_in += zip(sequence.host_slots, sequence.block_table, strict=False)
        self._host.give(sequence.host_slots)
        sequence.host_slots = []

    def take_away(self, sequence: Sequence, draft: Draft) -> None:
        """Take the blocks of a preempted sequence, swapping them out if that pays."""
        used = self._pool.blocks_for(sequence.computed)
        if self._prefers_swap(sequence.computed, used):
            sequence.host_slots = self._host.take(used) or []
        draft.swap_out += zip(sequence.block_table, sequence.host_slots, strict=False)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's blocks; unless they are on the host, nothing of it is computed."""
        self._pool.release(sequence.block_table)
        sequence.block_table, sequence.drafts, sequence.stored = [], [], 0
        if not sequence.host_slots:
            sequence.computed, sequence.tops = 0, []

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: it holds nothing any more."""
        self._host.give(sequence.host_slots)
        sequence.host_slots = []
        self.release(sequence)

    def store(self, sequence: Sequence, computed: int) -> None:
        """Let the blocks that the sequence's first `computed` tokens fill be found by others."""
        full = min(computed // self._size, len(sequence.block_table))
        if sequence.stored < full and sequence.chain is not None:
            extend_hashes(sequence.hashes, sequence.token_ids, sequence.chain, self._size)
            for i in range(sequence.stored, full):
                self._pool.store(sequence.block_table[i], sequence.hashes[i], sequence.tenant)
            sequence.stored = full

    def set_weight(self, tenant: str, weight: float) -> None:
        """A tenant's share of what is cached, relative to others'."""
        self._pool.set_weight(tenant, weight)

    def check_integrity(self, running: Sequences[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raise unless exactly those that run hold blocks, and those that wait host slots."""
        self._pool.check_integrity(sequence.block_table for sequence in running)
        self._host.check_integrity(s.host_slots for first in waiting for s in first.unit)
        for sequence in running:
            if len(sequence.block_table) * self._size < sequence.computed:
                raise BrokenPool("a sequence has more tokens than its blocks hold")

    def _least(self, sequence: Sequence) -> int:
        """Blocks that the sequence needs for its next token."""
        if sequence.pending == 0:
            return 0
        place = sequence.computed // self._size
        return place == len(sequence.block_table) or self._is_shared(sequence)

    def _is_shared(self, sequence: Sequence) -> bool:
        """Whether the block of the next token is another sequence's too."""
        place, table = sequence.computed // self._size, sequence.block_table
        return place < len(table) and self._pool.is_shared(table[place])

    def _place(self, sequence: Sequence) -> int:
        """Blocks for the sequence's known tokens; the number that is lacking, if any is."""
        needed, usable = self.needed_in_all([sequence]), self._usable_hashes(sequence)
        found, idle = self._pool.find(usable)
        lacking = needed - found - (self._pool.free_count - idle)
        if lacking > 0:
            return lacking
        table = self._pool.match(usable, sequence.tenant)
        sequence.block_table = table + self._pool.allocate(needed - found)
        sequence.stored = found
        if not sequence.host_slots:
            sequence.computed = found * self._size
        return 0

    def _usable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Names of the blocks that it could find in the cache; one token is always computed."""
        chain = sequence.chain
        if chain is None or sequence.host_slots or sequence.request.wants_prompt_logprobs:
            return []
        extend_hashes(sequence.hashes, sequence.token_ids, chain, self._size)
        return sequence.hashes[: (len(sequence.token_ids) - 1) // self._size]
