"""Chooses each row's next token from its logits.

A row's token depends on its own logits, its own parameters and its own tokens: never on the rows
beside it, nor on any generator with a state. Randomness is Philox (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), a function of the row's seed and the position of the generated
token, so a seed reproduces in any batch and after a preemption.

The order is: repetition, frequency and presence penalties, logit bias, a guide's mask, tokens that
may not come yet, temperature, top-k, top-p over what top-k left, min-p. Tokens as likely as the
last one that a limit keeps are kept too. Reported log-probabilities are the model's own, before any
of this.

A greedy row that none of these changes takes the token that the executor found and its logits are
not read. What draws is drawn where the outcome is, all rows in one call: by the device, by the
native step's threads, or without either by this process. Logits are changed on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.draw import Draw, Drawer, Floats
from loraplex.engine.logprobs import prompt_logprobs
from loraplex.engine.outcome import Outcome
from loraplex.engine.philox import uniform
from loraplex.engine.protocol import Sampling, TokenLogprob

GREEDY_BELOW = 1e-5  # temperatures under this are greedy

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
ADDENDS = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf))  # for eight tokens of a mask


class Row(NamedTuple):
    """What a row's choice depends on besides its logits."""

    sampling: Sampling
    token_ids: Sequence[int]  # the prompt, then what was generated
    prompt_len: int
    seed: int
    mask: NDArray[np.int32] | None = None  # bit `t % 32` of word `t // 32`: token t may come
    barred: Sequence[int] = ()  # tokens that may not come before `sampling.min_tokens` others

    @property
    def generated(self) -> int:
        """Tokens generated before this one."""
        return len(self.token_ids) - self.prompt_len

    @property
    def is_short(self) -> bool:
        """Whether the barred tokens may not come now."""
        return bool(self.barred) and self.generated < self.sampling.min_tokens


class Choice(NamedTuple):
    """A chosen token, and its log-probability where the request asked for one."""

    token_id: int
    logprob: TokenLogprob | None


def sample(outcome: Outcome, rows: Sequence[Row]) -> list[Choice | None]:
    """Choose a token for each row of `outcome`, on any device.

    A row that holds NaN or infinity, or whose mask lets no token come, has no distribution to
    choose from: its choice is None.
    """
    adjusted = [_is_adjusted(row) for row in rows]
    draws = [None if later else _draw(row) for row, later in zip(rows, adjusted, strict=True)]
    tokens = (outcome.draw or draw_on_host)(outcome, draws)
    work = [i for i, token in enumerate(tokens) if adjusted[i] and token is not None]
    if work:
        chosen = _choose_adjusted(outcome, work, [rows[i] for i in work])
        for i, token in zip(work, chosen, strict=True):
            tokens[i] = token
    return [
        None if token is None else Choice(token, _logprob(outcome.logits[i], token, row.sampling))
        for i, (token, row) in enumerate(zip(tokens, rows, strict=True))
    ]


def draw_on_host(outcome: Outcome, draws: Sequence[Draw | None]) -> list[int | None]:
    """See `DrawRows`: in this process, a row after the other."""
    tokens = outcome.tokens()
    if any(draws):
        logits, peaks = outcome.logits.numpy(), outcome.peak.tolist()
        drawer = Drawer(logits.shape[1])
        for i, draw in enumerate(draws):
            if draw is not None and tokens[i] is not None:
                tokens[i] = drawer.draw(logits[i], peaks[i], *draw)
    return tokens


def _choose_adjusted(outcome: Outcome, index: list[int], rows: list[Row]) -> list[int | None]:
    """Tokens of the rows `index`: what changes their logits does so in a copy on the host."""
    logits = _on_host(outcome.logits, index)
    for line, row in zip(logits, rows, strict=True):
        _adjust(line, row)
    likeliest = logits.argmax(axis=1)
    peak = logits[np.arange(len(rows)), likeliest]
    peak[~np.isfinite(peak)] = np.nan
    best = torch.from_numpy(likeliest), torch.from_numpy(peak)
    adjusted = Outcome(torch.from_numpy(logits), *best, outcome.draw)
    draws = [_draw(row) for row in rows]
    if not any(draws):
        return adjusted.tokens()
    return (outcome.draw or draw_on_host)(adjusted.to(outcome.logits.device), draws)


def _on_host(logits: Tensor, index: list[int]) -> Floats:
    """A copy of some rows of `logits`."""
    if logits.device.type == "cpu":
        copied: Floats = logits.numpy()[index]
        return copied
    return logits[index].cpu().numpy()


def _draw(row: Row) -> Draw | None:
    """How the row's token is drawn; None for the likeliest."""
    if is_greedy(row.sampling):
        return None
    return Draw(row.sampling, uniform(row.seed, row.generated))


def _logprob(logits: Tensor, token: int, sampling: Sampling) -> TokenLogprob | None:
    if sampling.logprobs is None:
        return None
    return prompt_logprobs(logits[None], [token], sampling.logprobs)[0]


def is_greedy(sampling: Sampling) -> bool:
    """Whether the likeliest token is taken."""
    return sampling.temperature < GREEDY_BELOW


def is_adjusted(sampling: Sampling) -> bool:
    """Whether logits are changed before a token is chosen."""
    penalties = sampling.presence_penalty or sampling.frequency_penalty
    return bool(penalties or sampling.repetition_penalty != 1 or sampling.logit_bias)


def _is_adjusted(row: Row) -> bool:
    return row.mask is not None or row.is_short or is_adjusted(row.sampling)


def _adjust(logits: Floats, row: Row) -> None:
    """Apply all that changes one row's logits, `[vocabulary]`, in place, before the limits.

    Repetition (Keskar et al., "CTRL", 2019) looks at the prompt too; presence and frequency only at
    what was generated.
    """
    sampling = row.sampling
    if sampling.repetition_penalty != 1:
        seen, _ = _counts(row.token_ids)
        scores, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = np.where(scores > 0, scores / penalty, scores * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        seen, counts = _counts(row.token_ids[row.prompt_len :])
        logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if row.mask is not None:
        # The default mode of `take` needs five times as long.
        octets = row.mask.astype("<i4", copy=False).view(np.uint8)
        addends = ADDENDS.take(octets, axis=0, mode="clip")
        logits += addends.reshape(-1)[: len(logits)]
    if row.is_short:
        _bar(logits, [token for token in row.barred if 0 <= token < len(logits)])


def _bar(logits: Floats, tokens: list[int]) -> None:
    """Let `tokens` not come, unless no other may: a guide's text can be complete too early."""
    before = logits[tokens]
    logits[tokens] = -np.inf
    if np.isneginf(logits.max()):
        logits[tokens] = before


def _counts(token_ids: Sequence[int]) -> tuple[NDArray[np.int64], Floats]:
    """Distinct tokens and how often each occurs."""
    seen, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
    return seen, counts.astype(np.float32)
