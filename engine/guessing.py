"""Speculation without a draft model: gives sequences that decode guesses of what follows.

The step computes guesses beside the newest token, and the sampler's own choices decide which hold,
so what is generated is the same with and without them. This file knows sequences; it refuses to
know how guesses are found (`ngram.py`) and verified (`reader.py`).
"""

from collections.abc import Iterable

from loraplex.engine.ngram import Lookup
from loraplex.engine.sequence import Sequence


def guess(running: Iterable[Sequence], default: int, model_len: int) -> None:
    """Set the `drafts` of those that want some; `default` is for those that do not say."""
    for sequence in running:
        sampling = sequence.request.sampling
        most = default if sampling.draft_tokens is None else sampling.draft_tokens
        if most and sequence.pending == 1 and sequence.generated and not sequence.is_steered:
            left = sampling.max_tokens - sequence.generated - 1
            left = min(most, left, model_len - len(sequence.token_ids) - 1)
            sequence.lookup = sequence.lookup or Lookup()
            sequence.drafts = sequence.lookup.propose(sequence.token_ids, max(0, left))
