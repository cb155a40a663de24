"""One completion while it runs: chunks of tokens in, deltas of text out.

Turns tokens into text, ends it at a stop string, and counts what was generated. Knows token ids;
refuses to know engines, HTTP and JSON.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from loraplex.engine.protocol import Chunk, FinishReason, TokenLogprob
from loraplex.platform.errors import EngineRestarted
from loraplex.platform.text import Decoder, StopStrings


class ShownToken(msgspec.Struct, frozen=True):
    """A token, where its text starts, and its log-probabilities (a prompt's first has none)."""

    offset: int
    token_id: int
    logprob: TokenLogprob | None


class Delta(msgspec.Struct, frozen=True):
    """What one event added to a choice; `finish` is set on the last one.

    `stop` is the stop string that ended it, where one did.
    """

    index: int
    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None
    total: int = 0  # tokens that the choice has by now

    def __bool__(self) -> bool:
        """Whether it adds anything."""
        return bool(self.text or self.tokens or self.finish)


@dataclass
class Choice:
    """One completion, and what has come of it so far. `index` is its place in the API request."""

    index: int
    decoder: Decoder
    stops: StopStrings
    min_tokens: int = 0  # a stop string counts if it ends after so many
    completion_tokens: int = 0
    logprob: float = 0.0  # of all tokens together, where log-probabilities were asked for
    finish: FinishReason | None = None
    _before: str = ""  # text that opens the answer: the prompt, where it is echoed
    _decoded: int = 0  # characters decoded
    _shown: int = 0  # of those, characters given out
    _waiting: list[ShownToken] = field(default_factory=list)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens; those that ended it count too."""
        return self.logprob / max(self.completion_tokens, 1)

    def echo(self, text: str, tokens: Sequence[ShownToken]) -> None:
        """Have the answer begin with the prompt; only before the first chunk."""
        self._before, self._decoded, self._waiting = text, len(text), list(tokens)

    def take(self, chunk: Chunk) -> Delta:
        """Account for a chunk; what comes after the end is not charged and adds nothing."""
        if self.finish is not None:
            return Delta(self.index, "")
        before, self._before = self._before, ""
        text = before + self._take_tokens(chunk)
        if self.finish is None and chunk.finish is not None:
            text += self._end(chunk.finish)
        return self._delta(text)

    def _take_tokens(self, chunk: Chunk) -> str:
        text = ""
        for i, token in enumerate(chunk.token_ids):
            self.completion_tokens += 1
            if chunk.logprobs:
                self._account(chunk.logprobs[i])
            piece = self.decoder.push(token)
            self._decoded += len(piece)
            text += self.stops.push(piece, may_end=self.completion_tokens > self.min_tokens)
            if self.stops.hit is not None:
                self.finish = "stop"
                break
        return text

    def _account(self, logprob: TokenLogprob) -> None:
        self.logprob += logprob.logprob
        if not self.decoder.is_silent(logprob.token_id):
            self._waiting.append(ShownToken(self._decoded, logprob.token_id, logprob))

    def _end(self, reason: FinishReason) -> str:
        if reason == "abort":
            raise EngineRestarted("The engine gave the request up. Send it again.")
        self.finish = reason
        return self.stops.flush()

    def _delta(self, text: str) -> Delta:
        """Tokens go out with their first character; those of a trimmed stop string never do."""
        self._shown += len(text)
        ready = self._ready() if self._waiting else ()
        total, stop = self.completion_tokens, self.stops.hit
        return Delta(self.index, text, ready, self.finish, stop, total)

    def _ready(self) -> tuple[ShownToken, ...]:
        all_shown = self.finish is not None and self.stops.hit is None
        limit = math.inf if all_shown else self._shown
        count = bisect_left(self._waiting, limit, key=lambda token: token.offset)
        ready, self._waiting = self._waiting[:count], self._waiting[count:]
        return tuple(ready)
