"""Rows' draws as one call of the native library, on the threads of the step before.

This file knows outcomes on the host and one struct; it refuses to know requests and where
randomness comes from.
"""

from collections.abc import Sequence

from loraplex.engine.draw import HOTTEST, Draw
from loraplex.engine.outcome import Outcome
from loraplex.kernels.cpu import library as abi

FP32_BYTES = 4


def draw_rows(
    library: abi.Library, handle: int, outcome: Outcome, draws: Sequence[Draw | None]
) -> list[int | None]:
    """See `DrawRows`; the logits are contiguous, with as many columns as the handle's model."""
    tokens, peaks = outcome.tokens(), outcome.peak.tolist()
    at, size = outcome.logits.data_ptr(), outcome.logits.shape[1] * FP32_BYTES
    structs = {
        place: _struct(draw, at + place * size, peaks[place])
        for place, draw in enumerate(draws)
        if draw is not None and tokens[place] is not None
    }
    if structs:
        rows = (abi.Draw * len(structs))(*structs.values())
        library.draw(handle, rows)
        for place, row in zip(structs, rows, strict=True):
            tokens[place] = row.token
    return tokens


def _struct(draw: Draw, logits: int, peak: float) -> abi.Draw:
    limits = draw.sampling
    factor = 1 / min(limits.temperature, HOTTEST)
    return abi.Draw(logits, limits.top_k, peak, factor, limits.top_p, limits.min_p, draw.share)
