"""Guides without a tokenizer, for tests of the engine's loop; use `runpy.run_path`."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from loraplex.engine.guidance import GuideError
from loraplex.engine.protocol import Guide

EOS, VOCABULARY = 0, 64


class StandInMatcher:
    error: str | None = None

    def __init__(self, allowed: list[set[int]]) -> None:
        self._allowed, self.prepared = allowed, False

    def mask(self) -> np.ndarray:
        assert self.prepared, "masks are computed beside the step"
        allowed = self._allowed[0] if self._allowed else {EOS}
        bits = np.zeros(VOCABULARY, np.uint8)
        bits[list(allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, token: int) -> None:
        self.prepared = False
        assert token in (self._allowed.pop(0) if self._allowed else {EOS})

    @property
    def is_complete(self) -> bool:
        return not self._allowed

    def fork(self) -> "StandInMatcher":
        copy = StandInMatcher([set(each) for each in self._allowed])
        copy.prepared = self.prepared
        return copy


class StandInGuides:
    """`Guides` whose texts are allowed token ids, such as "3,4 5": 3 or 4, then 5, then the end."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[StandInMatcher], str]] = []
        self.holds = False

    def compile(self, guide: Guide) -> Future[StandInMatcher]:
        job: Future[StandInMatcher] = Future()
        self.held.append((job, guide.text))
        if not self.holds:
            self.let_go()
        return job

    def let_go(self) -> None:
        for job, text in self.held:
            if text == "bad":
                job.set_exception(GuideError("the grammar is bad"))
            else:
                job.set_result(StandInMatcher([set(map(int, t.split(","))) for t in text.split()]))
        self.held.clear()

    def prepare(self, matchers: Sequence[StandInMatcher]) -> None:
        for matcher in matchers:
            matcher.prepared = True

    def close(self) -> None:
        pass
