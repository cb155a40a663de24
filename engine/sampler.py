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
not read; nor are those of other such rows where the outcome's device draws. The others take
turns in memory that fits a core's cache, half of them on a second thread: the model's threads have
nothing to do meanwhile.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.draw import Draw, Drawer, Floats
from loraplex.engine.logprobs import prompt_logprobs
from loraplex.engine.outcome import Outcome
from loraplex.engine.philox import uniform
from loraplex.engine.protocol import Sampling, TokenLogprob

GREEDY_BELOW = 1e-5  # temperatures under this are greedy
SHARED_FROM = 4  # rows whose second half is worth a thread's waking

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
ADDENDS = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf))  # for eight tokens of a mask

_second = ThreadPoolExecutor(1, "sampler")


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


class _Task(NamedTuple):
    """A row whose logits have to be looked at: fp32 `[vocabulary]`, the highest is `peak`."""

    row: Row
    logits: Floats
    peak: float


def sample(outcome: Outcome, rows: Sequence[Row]) -> list[Choice | None]:
    """Choose a token for each row of `outcome`, on any device.

    A row that holds NaN or infinity, or whose mask lets no token come, has no distribution to
    choose from: its choice is None.
    """
    peaks = outcome.peak.tolist()
    if outcome.draw is None:
        tokens = _likeliest(outcome, peaks)
        is_chosen = _is_plain
    else:
        tokens = outcome.draw(outcome, [_draw(row) for row in rows])
        is_chosen = _is_unadjusted
    work = [i for i, row in enumerate(rows) if tokens[i] is not None and not is_chosen(row)]
    logits = _on_host(outcome.logits, work)
    tasks = [_Task(rows[i], logits[i], peaks[i]) for i in work]
    for i, token in zip(work, _choose_all(tasks), strict=True):
        tokens[i] = token
    return [
        None if token is None else Choice(token, _logprob(outcome.logits[i], token, row.sampling))
        for i, (token, row) in enumerate(zip(tokens, rows, strict=True))
    ]


def _likeliest(outcome: Outcome, peaks: list[float]) -> list[int | None]:
    tokens = zip(outcome.likeliest.tolist(), peaks, strict=True)
    return [token if math.isfinite(peak) else None for token, peak in tokens]


def _draw(row: Row) -> Draw | None:
    """How a device chooses the row's token, if it may: by a draw, or as the likeliest."""
    if is_greedy(row.sampling) or _is_adjusted(row):
        return None
    return Draw(row.sampling, _share(row))


def _share(row: Row) -> float:
    return uniform(row.seed, row.generated)


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


def _is_plain(row: Row) -> bool:
    return is_greedy(row.sampling) and not _is_adjusted(row)


def _is_unadjusted(row: Row) -> bool:
    return not _is_adjusted(row)


def _is_adjusted(row: Row) -> bool:
    return row.mask is not None or row.is_short or is_adjusted(row.sampling)


def _on_host(logits: Tensor, wanted: list[int]) -> dict[int, Floats]:
    """The wanted rows of `logits`; from a GPU they come in one copy."""
    chosen = logits if logits.device.type == "cpu" else logits[wanted].cpu()
    places = wanted if chosen is logits else range(len(wanted))
    matrix = chosen.numpy()
    return {i: matrix[place] for i, place in zip(wanted, places, strict=True)}


def _choose_all(tasks: list[_Task]) -> list[int | None]:
    if len(tasks) < SHARED_FROM:
        return _choose_in_turn(tasks)
    half = len(tasks) // 2
    others = _second.submit(_choose_in_turn, tasks[half:])
    return _choose_in_turn(tasks[:half]) + others.result()


def _choose_in_turn(tasks: list[_Task]) -> list[int | None]:
    if not tasks:
        return []
    vocabulary = len(tasks[0].logits)
    drawer, spare = Drawer(vocabulary), np.empty(vocabulary, np.float32)
    return [_choose(task, drawer, spare) for task in tasks]


def _choose(task: _Task, drawer: Drawer, spare: Floats) -> int | None:
    """The row's token; adjusted logits are written to `spare`, `[vocabulary]`."""
    row, logits, peak = task
    if _is_adjusted(row):
        logits = spare
        np.copyto(logits, task.logits)
        _adjust(logits, row)
        token = int(logits.argmax())
        peak = float(logits[token])
        if not math.isfinite(peak):
            return None
        if is_greedy(row.sampling):
            return token
    return drawer.draw(logits, peak, row.sampling, _share(row))


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
        addends = ADDENDS[row.mask.astype("<i4", copy=False).view(np.uint8)]
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
