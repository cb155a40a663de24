"""Chooses each row's next token from its logits.

A row's token depends on its own logits, its own parameters and its own tokens: never on the rows
beside it, nor on any generator with a state. Randomness is Philox (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), a function of the request's seed and the position of the
generated token, so a seed reproduces in any batch and after a preemption.

The order is: repetition, frequency and presence penalties, logit bias, temperature, top-k, top-p
over what top-k left, min-p. Tokens as likely as the last one that a limit keeps are kept too.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch

from loraplex.engine.protocol import Sampling, TokenLogprob
from loraplex.engine.sequence import Sequence

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
WINDOW = 256  # likeliest tokens looked at before all of them are sorted


@dataclass(frozen=True)
class Choice:
    """A chosen token, and its log-probability where the request asked for one."""

    token_id: int
    logprob: TokenLogprob | None


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: Rows[Sequence]) -> list[Choice | None]:
    """Choose a token for each row of `logits`, float32 `[W, vocabulary]`, on any device.

    Row i belongs to `sequences[i]`, whose `token_ids` are those known so far. A row that holds NaN
    or infinity has no distribution to choose from: its choice is None.
    """
    adjusted = _adjust(logits, sequences)
    peaks, likeliest = adjusted.max(dim=-1)
    finite, tokens = torch.isfinite(peaks).tolist(), likeliest.tolist()
    choices: list[Choice | None] = []
    for i, sequence in enumerate(sequences):
        if not finite[i]:
            choices.append(None)
            continue
        token = tokens[i]
        if not _is_greedy(sequence.sampling):
            token = _draw(adjusted[i] - peaks[i], sequence.sampling, sequence.generated)
        choices.append(Choice(token, _logprob(logits[i], token, sequence.sampling.logprobs)))
    return choices


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the seed and the position."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=[0, position, 0, 0])
    return float(np.random.Generator(bits).random())


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW


def _draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """Invert the cumulative distribution; `logits` `[vocabulary]`, the largest is 0."""
    probabilities = torch.softmax(logits / sampling.temperature, dim=-1)
    floor = _floor(probabilities, sampling)
    if floor > 0:
        probabilities = torch.where(probabilities >= floor, probabilities, 0.0)
    cumulative = torch.cumsum(probabilities, dim=-1, dtype=torch.float64)
    target = cumulative[-1] * uniform(sampling.seed, position)
    return int(torch.searchsorted(cumulative, target, right=True))


def _floor(probabilities: torch.Tensor, sampling: Sampling) -> float:
    """The least probability that top-k, top-p and min-p keep."""
    floor = 0.0
    if 0 < sampling.top_k < len(probabilities) or sampling.top_p < 1:
        floor = _floor_of_top(probabilities, sampling.top_k, sampling.top_p)
    if sampling.min_p > 0:
        floor = max(floor, sampling.min_p * float(probabilities.max()))
    return floor


def _floor_of_top(probabilities: torch.Tensor, top_k: int, top_p: float) -> float:
    """Probability of the last token of the shortest prefix, likeliest first, that both allow.

    The prefix has at most `top_k` tokens and at least `top_p` of those tokens' mass.
    """
    vocabulary = len(probabilities)
    k = top_k if 0 < top_k < vocabulary else vocabulary
    window = min(max(WINDOW, top_k), vocabulary)
    ordered = torch.topk(probabilities, window).values
    cumulative = torch.cumsum(ordered, dim=-1, dtype=torch.float64)
    wanted = top_p * (float(cumulative[k - 1]) if k <= window else 1.0)
    if k > window and cumulative[-1] < wanted:
        ordered = torch.sort(probabilities, descending=True).values
        cumulative = torch.cumsum(ordered, dim=-1, dtype=torch.float64)
    last = int(torch.searchsorted(cumulative, wanted)) if top_p < 1 else k - 1
    return float(ordered[min(last, k - 1)])


def _adjust(logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """Logits after penalties and biases; the same tensor where no row asks for any."""
    rows = [i for i, sequence in enumerate(sequences) if _is_adjusted(sequence.sampling)]
    if not rows:
        return logits
    adjusted = logits.clone()
    for i in rows:
        _penalise(adjusted[i], sequences[i])
    return adjusted


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


def _logprob(row: torch.Tensor, token: int, count: int | None) -> TokenLogprob | None:
    """The token's and the `count` likeliest tokens' log-probabilities under unmodified logits."""
    if count is None:
        return None
    logprobs = torch.log_softmax(row, dim=-1)
    top = torch.topk(logprobs, min(count, len(row)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(pairs))
