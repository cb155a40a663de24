"""Beam search: which beams go on and which hypotheses are complete, given log-probabilities.

Decides as Transformers' `generate(num_beams=width, do_sample=False)` does, heuristic end included:
without `early_stopping` a search ends once its best live beam, scored at its present length, is no
better than the worst of `width` complete hypotheses.

This file knows tokens and log-probabilities; it refuses to know logits, blocks and sequences.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from loraplex.engine.protocol import Beams, FinishReason

Pairs = list[tuple[int, float]]  # tokens and their log-probabilities


class Candidate(NamedTuple):
    """A continuation: the place of its parent among the live beams, and the token added to it."""

    beam: int
    token: int
    logprob_sum: float


class Hypothesis(NamedTuple):
    """A complete beam: what it generated, and its log-probability over length ** penalty."""

    tokens: tuple[int, ...]
    score: float
    reason: FinishReason


class BeamSearch:
    """One request's search: advance it step by step until no beam goes on, then take its results.

    A beam is complete with a token of `ends` ("stop"), or with `max_tokens` tokens ("length").
    Before it has `min_tokens` none of `barred` may come, unless no other may.
    """

    def __init__(
        self,
        beams: Beams,
        choices: int,
        ends: Iterable[int],
        max_tokens: int,
        *,
        barred: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._beams, self._choices = beams, choices
        self._ends, self._max_tokens = frozenset(ends), max_tokens
        self._barred, self._min_tokens = barred, min_tokens
        self._live: list[tuple[int, ...]] = [()]
        self._sums = [0.0]
        self._complete: list[Hypothesis] = []  # best first, `width` at most
        self._length = 0

    @property
    def width(self) -> int:
        """Beams that go on, at most."""
        return self._beams.width

    @property
    def tops(self) -> int:
        """How many of a beam's likeliest tokens matter: `width` that go on and all others."""
        return self.width + len(self._ends | self._barred)

    def advance(self, tops: list[Pairs]) -> list[Candidate]:
        """The next live beams, best first, `width` at most; none when the search has ended.

        `tops[i]` holds live beam i's `self.tops` likeliest tokens and their log-probabilities. At
        first there is one beam; later they are those that the last call returned, in its order.
        """
        if self._length < self._min_tokens:
            tops = [self._without_barred(each) for each in tops]
        self._length += 1
        ranked = self._rank(tops)
        for candidate in ranked[: self.width]:
            if reason := self._reason(candidate):
                self._add(candidate, reason)
        going = [candidate for candidate in ranked if not self._reason(candidate)][: self.width]
        if self._is_over(going):
            going = []
        self._live = [(*self._live[beam], token) for beam, token, _ in going]
        self._sums = [candidate.logprob_sum for candidate in going]
        return going

    def results(self) -> list[Hypothesis]:
        """The best complete hypotheses, best first, as many as there are choices."""
        return self._complete[: self._choices]

    def _without_barred(self, likeliest: Pairs) -> Pairs:
        return [pair for pair in likeliest if pair[0] not in self._barred] or likeliest

    def _rank(self, tops: list[Pairs]) -> list[Candidate]:
        candidates = [
            Candidate(beam, token, total + logprob)
            for beam, (total, likeliest) in enumerate(zip(self._sums, tops, strict=True))
            for token, logprob in likeliest
        ]
        return sorted(candidates, key=lambda candidate: -candidate.logprob_sum)

    def _reason(self, candidate: Candidate) -> FinishReason | None:
        if candidate.token in self._ends:
            return "stop"
        return "length" if self._length == self._max_tokens else None

    def _add(self, candidate: Candidate, reason: FinishReason) -> None:
        tokens = (*self._live[candidate.beam], candidate.token)
        self._complete.append(Hypothesis(tokens, self._score(candidate), reason))
        self._complete.sort(key=lambda hypothesis: -hypothesis.score)
        del self._complete[self.width :]

    def _score(self, candidate: Candidate) -> float:
        return candidate.logprob_sum / math.pow(self._length, self._beams.length_penalty)

    def _is_over(self, going: list[Candidate]) -> bool:
        if not going:
            return True
        if len(self._complete) < self.width:
            return False
        return self._beams.early_stopping or self._score(going[0]) <= self._complete[-1].score
