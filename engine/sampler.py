"""Chooses each row's next token from its logits.

A row's token depends on its own logits, its own parameters and its own tokens: never on the rows
beside it, nor on any generator with a state. Randomness is Philox (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), a function of the request's seed and the position of the
generated token, so a seed reproduces in any batch and after a preemption.

The order is: repetition, frequency and presence penalties, logit bias, temperature, top-k, top-p
over what top-k left, min-p. Tokens as likely as the last one that a limit keeps are kept too.

A greedy row without penalties takes the token that the executor found and its logits are not read.
The rows that draw take turns: one row fits a core's cache, a matrix of them costs more in page
faults than in arithmetic. After its softmax a row looks only at tokens that its limits could keep,
or, without limits, at one block of tokens.
"""

from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.outcome import Outcome, outcome_of
from loraplex.engine.philox import uniform
from loraplex.engine.protocol import Sampling, TokenLogprob
from loraplex.engine.sequence import Sequence

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
BLOCK = 256  # tokens that are summed together when a row has no limits
LIKELY = 2048  # tokens with this part of what top-p leaves out are looked at first

Floats = NDArray[np.float32]


class Choice(NamedTuple):
    """A chosen token, and its log-probability where the request asked for one."""

    token_id: int
    logprob: TokenLogprob | None


def sample(outcome: Outcome, sequences: Rows[Sequence]) -> list[Choice | None]:
    """Choose a token for each row of `outcome`, on any device.

    Row i belongs to `sequences[i]`, whose `token_ids` are those known so far. A row that holds NaN
    or infinity has no distribution to choose from: its choice is None.
    """
    adjusted = _adjust(outcome, sequences)
    tokens = adjusted.likeliest.tolist()
    finite = [peak == peak for peak in adjusted.peak.tolist()]
    for i, sequence in enumerate(sequences):
        if finite[i] and not _is_greedy(sequence.sampling):
            temperature = sequence.sampling.temperature
            row = _probabilities(adjusted.logits[i], adjusted.peak[i], temperature)
            tokens[i] = _draw(row, sequence.sampling, sequence.generated)
    return [
        Choice(token, _logprob(outcome.logits, i, token, sequence.sampling.logprobs))
        if finite[i]
        else None
        for i, (token, sequence) in enumerate(zip(tokens, sequences, strict=True))
    ]


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def _probabilities(logits: torch.Tensor, peak: torch.Tensor, temperature: float) -> Floats:
    """Probabilities of one row of logits, `[vocabulary]`, the largest of which is `peak`."""
    row = (logits - peak).div_(temperature)
    probabilities: Floats = torch.softmax(row, dim=-1, out=row).cpu().numpy()
    return probabilities


def _draw(probabilities: Floats, sampling: Sampling, position: int) -> int:
    """Draw from `[vocabulary]` what the limits keep of it."""
    share = uniform(sampling.seed, position)
    if not (_limits_rank(sampling, probabilities) or sampling.top_p < 1 or sampling.min_p):
        return _draw_from_all(probabilities, share)
    tokens = _candidates(probabilities, sampling)
    kept = probabilities[tokens]
    floor = _floor(kept, sampling, _limits_rank(sampling, probabilities))
    sums = np.cumsum(np.where(kept >= floor, kept, 0), dtype=np.float64)
    return int(tokens[_place(sums, share)])


def _limits_rank(sampling: Sampling, probabilities: Floats) -> bool:
    return 0 < sampling.top_k < len(probabilities)


def _draw_from_all(probabilities: Floats, share: float) -> int:
    """Choose a block of tokens by its mass, then one of its tokens: a tenth of a running sum."""
    starts = np.arange(0, len(probabilities), BLOCK)
    sums = np.cumsum(np.add.reduceat(probabilities, starts), dtype=np.float64)
    block = _place(sums, share)
    before = float(sums[block - 1]) if block else 0.0
    rest = (float(sums[-1]) * share - before) / (float(sums[block]) - before)
    tokens = probabilities[block * BLOCK : (block + 1) * BLOCK]
    return block * BLOCK + _place(np.cumsum(tokens, dtype=np.float64), rest)


def _place(sums: NDArray[np.float64], share: float) -> int:
    """Where running sums pass `share`, in [0, 1], of the whole; what is there has some mass."""
    place = np.searchsorted(sums, sums[-1] * share, side="right")
    return int(min(place, np.searchsorted(sums, sums[-1])))


def _candidates(probabilities: Floats, sampling: Sampling) -> NDArray[np.intp]:
    """Tokens in their order, among which are all that the limits keep."""
    if _limits_rank(sampling, probabilities):
        place = len(probabilities) - sampling.top_k
        return np.flatnonzero(probabilities >= np.partition(probabilities, place)[place])
    least = sampling.min_p * float(probabilities.max()) if sampling.min_p else 0.0
    others = 1 - sampling.top_p
    likely = np.flatnonzero(probabilities >= max(least, others / LIKELY))
    if not others or probabilities[likely].sum(dtype=np.float64) >= sampling.top_p:
        return likely
    # All tokens under `others / vocabulary` are less than `others`; half leaves room for rounding.
    return np.flatnonzero(probabilities >= max(least, others / len(probabilities) / 2))


def _floor(kept: Floats, sampling: Sampling, limits_rank: bool) -> float:
    """The least probability that the limits keep, of `kept`, which holds all that are as large.

    Of top-k and top-p it is that of the last token of the shortest prefix, likeliest first, which
    has `top_k` tokens or `top_p` of those tokens' mass.
    """
    floor = sampling.min_p * float(kept.max()) if sampling.min_p else 0.0
    if sampling.top_p < 1:
        ordered = np.sort(kept)[::-1]
        sums = np.cumsum(ordered, dtype=np.float64)
        k = sampling.top_k if limits_rank else len(kept)
        whole = sums[k - 1] if limits_rank else 1.0
        last = np.searchsorted(sums, sampling.top_p * whole)
        floor = max(floor, float(ordered[min(int(last), k - 1)]))
    return floor


def _adjust(outcome: Outcome, sequences: Rows[Sequence]) -> Outcome:
    """The outcome after penalties and biases; the same one where no row asks for any."""
    rows = [i for i, sequence in enumerate(sequences) if _is_adjusted(sequence.sampling)]
    if not rows:
        return outcome
    index = torch.tensor(rows, device=outcome.logits.device)
    logits = outcome.logits.index_select(0, index)
    for row, i in zip(logits, rows, strict=True):
        _penalise(row, sequences[i])
    adjusted = outcome_of(logits)
    return Outcome(
        outcome.logits.index_copy(0, index, logits),
        outcome.likeliest.index_copy(0, index, adjusted.likeliest),
        outcome.peak.index_copy(0, index, adjusted.peak),
    )


def _is_adjusted(s: Sampling) -> bool:
    penalties = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1
    return bool(penalties or s.logit_bias)


def _penalise(row: torch.Tensor, sequence: Sequence) -> None:
    """Change one row, `[vocabulary]`, in place.

    Repetition (Keskar et al., "CTRL", 2019) looks at the prompt too; presence and frequency only at
    what was generated.
    """
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1:
        seen, _ = _counts(sequence.token_ids, row.device)
        scores = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        seen, counts = _counts(sequence.token_ids[sequence.prompt_len :], row.device)
        row[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias:
        row[token] += bias


def _counts(token_ids: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct tokens and how often each occurs."""
    seen, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
    return torch.from_numpy(seen).to(device), torch.from_numpy(counts).to(device, torch.float32)


def _logprob(logits: torch.Tensor, row: int, token: int, count: int | None) -> TokenLogprob | None:
    """The token's and the `count` likeliest tokens' log-probabilities under unmodified logits."""
    if count is None:
        return None
    logprobs = torch.log_softmax(logits[row], dim=-1)
    top = torch.topk(logprobs, min(count, len(logprobs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(pairs))
