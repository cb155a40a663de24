"""Speculation without a draft model: gives sequences that decode guesses of what follows.

The step computes guesses beside the newest token, and the sampler's own choices decide which hold,
so what is generated is the same with and without them. This file knows sequences; it refuses to
know how guesses are found (`ngram.py`) and verified (`reader.py`).
"""

from collections.abc import Iterable

from loraplex.engine.ngram import Lookup
from loraplex.engine.sequence import Sequence


def guess(running: Iterable[Sequence], default: int, model_len: int) -> None:
    """Set the `drafts` of those that want some; `default` is for those that do not say.

    Who has a token that nobody has read gets none: guesses would have to follow that one.
    """
    for sequence in running:
        most = _most(sequence, default)
        if most and sequence.pending == 1 and not sequence.ahead:
            left = sequence.request.sampling.max_tokens - sequence.generated - 1
            left = min(most, left, model_len - len(sequence.token_ids) - 1)
            sequence.drafts = _propose(sequence, max(0, left))


def foresees(running: Iterable[Sequence], default: int) -> bool:
    """Whether guesses may follow a token that nobody has read, so that it is worth reading first.

    They may where some follow the tokens before it.
    """
    waiting = (s for s in running if s.ahead and _most(s, default))
    return any(_propose(sequence, 1) for sequence in waiting)


def _most(sequence: Sequence, default: int) -> int:
    """How many guesses a sequence wants now."""
    if sequence.is_steered or not sequence.generated:
        return 0
    asked = sequence.request.sampling.draft_tokens
    return default if asked is None else asked


def _propose(sequence: Sequence, most: int) -> list[int]:
    sequence.lookup = sequence.lookup or Lookup()
    return sequence.lookup.propose(sequence.token_ids, most)
