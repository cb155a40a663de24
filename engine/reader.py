"""Reads a step's outcome: what each row means for the sequence that it belongs to.

A part's wanted rows are its last ones. Where the part ends with all that its sequence knows, the
last row, and one for each guess before it, choose tokens; rows of a prompt whose log-probabilities
are asked for tell these. This file knows outcomes and parts; it refuses to know schedulers and
events.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from loraplex.engine.logprobs import prompt_logprobs
from loraplex.engine.outcome import Outcome
from loraplex.engine.plan import Scheduled
from loraplex.engine.protocol import FailureCode, FinishReason, TokenLogprob
from loraplex.engine.sampler import Choice, Row, sample
from loraplex.engine.sequence import Sequence, finish_reason


class Wanted(NamedTuple):
    """A part, and the row of the outcome that is the first of its wanted ones."""

    part: Scheduled
    row: int

    @property
    def last_row(self) -> int:
        """The row of the part's last token."""
        return self.row + self.part.wanted - 1


def with_rows(order: Rows[Scheduled]) -> list[Wanted]:
    """All parts of a step in row order, each with its place among the wanted rows."""
    found, row = [], 0
    for part in order:
        found.append(Wanted(part, row))
        row += part.wanted
    return found


def ends_known(part: Scheduled) -> bool:
    """Whether the part ends with the last that its sequence knows, so that tokens are chosen."""
    sequence = part.sequence
    return part.end == len(sequence.token_ids) + len(sequence.drafts)


def read_prompt(outcome: Outcome, wanted: Wanted) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of the prompt's tokens that follow the part's rows."""
    part, request = wanted.part, wanted.part.sequence.request
    count = request.sampling.prompt_logprobs or 0
    following = part.sequence.token_ids[part.start + 1 : min(part.end + 1, request.prompt_len)]
    rows = outcome.logits[wanted.row : wanted.row + len(following)]
    return prompt_logprobs(rows, following, count)


def choose(outcome: Outcome, picks: Rows[tuple[Sequence, int]]) -> list[list[Choice | None]]:
    """For each sequence the tokens that its rows choose, each as if the guesses before held.

    A pick has a sequence and the row of its last token; the rows of its guesses end there.
    """
    if not picks:
        return []
    rows: list[Row] = []
    index: list[int] = []
    for sequence, last in picks:
        rows += _rows(sequence)
        index += range(last - len(sequence.drafts), last + 1)
    choices = iter(sample(_select(outcome, index), rows))
    return [[next(choices) for _ in range(len(s.drafts) + 1)] for s, _ in picks]


def _rows(sequence: Sequence) -> Iterator[Row]:
    """For each guess, and for what follows the last, the row that chooses in its place."""
    request, tokens, guesses = sequence.request, sequence.token_ids, sequence.drafts
    mask = sequence.matcher.mask() if sequence.matcher else None
    fixed = request.prompt_len, sequence.seed, mask, request.barred
    for count in range(len(guesses) + 1):
        known = tokens + guesses[:count] if count else tokens
        yield Row(request.sampling, known, *fixed)


def accept(choices: list[Choice | None], guesses: list[int]) -> list[Choice | None]:
    """The choices that stand: up to the first that is not the guess that followed it."""
    for place, (choice, guess) in enumerate(zip(choices, guesses, strict=False)):
        if choice is None or choice.token_id != guess:
            return choices[: place + 1]
    return choices


def extend(
    sequence: Sequence, choices: Rows[Choice], model_len: int
) -> tuple[Rows[Choice], FinishReason | None]:
    """Add tokens until one ends the sequence; those that were added, and why it ends."""
    for count, choice in enumerate(choices, 1):
        sequence.token_ids.append(choice.token_id)
        if sequence.matcher is not None:
            sequence.matcher.consume(choice.token_id)
        reason = finish_reason(sequence, model_len)
        if reason is not None:
            return choices[:count], reason
    return choices, None


def why_no_token(sequence: Sequence) -> tuple[FailureCode, str]:
    """What to tell of a sequence for which none could be chosen."""
    if sequence.matcher is not None and sequence.matcher.error is not None:
        return "invalid_request", f"the guide cannot be followed: {sequence.matcher.error}"
    return "internal", "the model's output is not finite; the adapter's weights may be too large"


def _select(outcome: Outcome, index: list[int]) -> Outcome:
    if index == list(range(len(outcome.likeliest))):
        return outcome
    rows = torch.tensor(index, device=outcome.logits.device)
    logits, likeliest, peak = (part.index_select(0, rows) for part in _parts(outcome))
    return Outcome(logits, likeliest, peak, outcome.draw)


def _parts(outcome: Outcome) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return outcome.logits, outcome.likeliest, outcome.peak
