"""What all answers have in common: how a route writes them, usage, prompts' log-probabilities.

Knows deltas, counts and shapes; refuses to know where deltas come from and how bytes are sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from loraplex.engine.protocol import TokenLogprob
from loraplex.platform.api.choice import Delta, ShownToken
from loraplex.platform.errors import ApiError
from loraplex.platform.text import Vocabulary

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Usage:
    """Tokens of one API request; a prompt is counted once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def counts(self) -> Json:
        """OpenAI's `usage` object, as far as it is known before the end."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }

    def json(self) -> Json:
        """OpenAI's `usage` object."""
        return self.counts() | {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


@dataclass(frozen=True)
class Identity:
    """What is the same in every part of an answer, and which log-probabilities it has, if any."""

    id: str
    model: str
    created: int  # seconds since the epoch
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_usage: bool = False  # in a stream
    counted: tuple[int, ...] = ()  # tokens of each choice's prompt, where each chunk tells usage

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        """An answer, or a part of one, of these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True)
class Answered:
    """A choice from its start to its end, and what the engine told of its prompt."""

    deltas: Sequence[Delta]
    prompt_logprobs: Sequence[TokenLogprob] = ()

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[ShownToken]:
        """All of its tokens, where log-probabilities were asked for."""
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def last(self) -> Delta:
        """What ended it."""
        return self.deltas[-1]

    @property
    def finish(self) -> str | None:
        """Why it ended."""
        return self.last.finish


class Form(Protocol):
    """How one route writes its answers: as JSON, or as the bytes of a stream's events.

    `explained` is the object of `explain.py` under its name, or nothing where nobody asked.
    """

    def opening(self, choices: int) -> bytes:
        """What comes before any text."""

    def chunks(self, delta: Delta) -> bytes:
        """What one delta adds to a stream."""

    def ending(self, usage: Usage, explained: Json) -> bytes:
        """What ends a stream that ran to its end."""

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""

    def whole(self, answers: Sequence[Answered], usage: Usage) -> Json:
        """The answer to a request without streaming, of all its choices."""


class OpenAIForm:
    """What OpenAI's streams have in common: bare events, and `[DONE]` after a complete stream."""

    kind: ClassVar[str]  # the `object` of its chunks

    def __init__(self, identity: Identity, vocabulary: Vocabulary) -> None:
        self._identity, self._vocabulary = identity, vocabulary

    def ending(self, usage: Usage, explained: Json) -> bytes:
        """A chunk without choices, if there is something to tell; then the end."""
        last = explained | ({"usage": usage.json()} if self._identity.include_usage else {})
        return self._events([self._envelope([]) | last] if last else []) + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """The error's body; no `[DONE]` follows it."""
        return b"data: " + msgspec.json.encode(error.body) + b"\n\n"

    def _envelope(self, choices: list[Json]) -> Json:
        return self._identity.envelope(self.kind, choices)

    def _events(self, chunks: Sequence[Json], total: int = 0) -> bytes:
        """With usage asked for, all chunks but the last say that it is not known yet.

        Where each is to tell it, it is that of the chunk's choice, which has `total` tokens.
        """
        if self._identity.include_usage:
            chunks = [{"usage": self._so_far(chunk, total)} | chunk for chunk in chunks]
        return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)

    def _so_far(self, chunk: Json, total: int) -> Json | None:
        counted, choices = self._identity.counted, chunk["choices"]
        return Usage(counted[choices[0]["index"]], total).counts() if counted and choices else None


def named_events(events: Sequence[Json]) -> bytes:
    """Server-sent events, each under the name of its type."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        for event in events
    )


def prompt_json(
    identity: Identity, vocabulary: Vocabulary, logprobs: Sequence[TokenLogprob]
) -> Json:
    """vLLM's `prompt_logprobs`, where they were asked for: null, then each token's by its id."""
    count = identity.prompt_logprobs
    if count is None:
        return {}
    known = [dict(_ranked(vocabulary, each, count)) for each in logprobs]
    return {"prompt_logprobs": [None, *known]}


def _ranked(vocabulary: Vocabulary, token: TokenLogprob, count: int) -> Iterator[tuple[str, Json]]:
    """The prompt's own token, whose rank is known among the likeliest alone, and those."""
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, 1)}
    for token_id, logprob in ((token.token_id, token.logprob), *token.top[:count]):
        yield (
            str(token_id),
            {
                "logprob": max(logprob, LEAST_LOGPROB),
                "rank": ranks.get(token_id),
                "decoded_token": text_of(vocabulary, token_id),
            },
        )


def text_of(vocabulary: Vocabulary, token_id: int) -> str:
    """A token's text; bytes that are no character read as U+FFFD."""
    return vocabulary.bytes_of(token_id).decode(errors="replace")
