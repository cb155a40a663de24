"""The JSON of answers, whole or in chunks, as OpenAI writes it for chats and for completions.

Knows deltas, counts and shapes; refuses to know where deltas come from and how bytes are sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loraplex.engine.protocol import TokenLogprob
from loraplex.platform.api.generation import Delta, ShownToken
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

    def json(self) -> Json:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Identity:
    """What is the same in every part of an answer."""

    id: str
    model: str
    created: int  # seconds since the epoch
    logprobs: bool  # whether the caller asked for them


class Form(Protocol):
    """How one route writes its answers."""

    def opening(self, choices: int) -> list[Json]:
        """Chunks that come before any text."""

    def chunks(self, delta: Delta) -> list[Json]:
        """Chunks of a stream for one delta."""

    def usage(self, usage: Usage) -> Json:
        """The chunk without choices that ends a stream whose caller asked for usage."""

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> Json:
        """The answer to a request without streaming; `deltas` are by choice."""


class ChatForm:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, identity: Identity, vocabulary: Vocabulary) -> None:
        self._identity, self._vocabulary = identity, vocabulary

    def opening(self, choices: int) -> list[Json]:
        """Each choice begins by saying whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([_chat_choice(i, delta)]) for i in range(choices)]

    def chunks(self, delta: Delta) -> list[Json]:
        """Text and log-probabilities, then the reason why it ended."""
        chunks = []
        if delta.text or delta.tokens:
            logprobs = self._logprobs(delta.tokens)
            choice = _chat_choice(delta.index, {"content": delta.text}, logprobs)
            chunks.append(self._chunk([choice]))
        if delta.finish:
            chunks.append(self._chunk([_chat_choice(delta.index, {}, finish=delta.finish)]))
        return chunks

    def usage(self, usage: Usage) -> Json:
        """No choices, and the usage."""
        return self._chunk([]) | {"usage": usage.json()}

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> Json:
        """A `chat.completion`."""
        choices = [self._message(i, each) for i, each in enumerate(deltas)]
        return _envelope(self._identity, "chat.completion", choices) | {"usage": usage.json()}

    def _message(self, index: int, deltas: Sequence[Delta]) -> Json:
        message = {"role": "assistant", "content": _text(deltas), "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(_tokens(deltas)),
            "finish_reason": deltas[-1].finish,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        return _envelope(self._identity, "chat.completion.chunk", choices)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json | None:
        if not self._identity.logprobs:
            return None
        return {"content": [self._entry(each.logprob) for each in tokens], "refusal": None}

    def _entry(self, token: TokenLogprob) -> Json:
        top = [self._token(*pair) for pair in token.top]
        return self._token(token.token_id, token.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        content = self._vocabulary.bytes_of(token_id)
        return {
            "token": content.decode(errors="replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(content),
        }


class CompletionForm:
    """`text_completion`, whole and in chunks."""

    def __init__(self, identity: Identity, vocabulary: Vocabulary) -> None:
        self._identity, self._vocabulary = identity, vocabulary

    def opening(self, choices: int) -> list[Json]:
        """Nothing comes before the text."""
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        """One chunk: text, log-probabilities and, on the last one, why it ended."""
        return [self._envelope([self._choice(delta.index, [delta])])]

    def usage(self, usage: Usage) -> Json:
        """No choices, and the usage."""
        return self._envelope([]) | {"usage": usage.json()}

    def whole(self, deltas: Sequence[Sequence[Delta]], usage: Usage) -> Json:
        """A `text_completion`."""
        choices = [self._choice(i, each) for i, each in enumerate(deltas)]
        return self._envelope(choices) | {"usage": usage.json()}

    def _envelope(self, choices: list[Json]) -> Json:
        return _envelope(self._identity, "text_completion", choices)

    def _choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        return {
            "index": index,
            "text": _text(deltas),
            "logprobs": self._logprobs(_tokens(deltas)),
            "finish_reason": deltas[-1].finish,
        }

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json | None:
        if not self._identity.logprobs:
            return None
        return {
            "tokens": [self._text_of(each.logprob.token_id) for each in tokens],
            "token_logprobs": [max(each.logprob.logprob, LEAST_LOGPROB) for each in tokens],
            "top_logprobs": [self._top(each.logprob) for each in tokens],
            "text_offset": [each.offset for each in tokens],
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one; where two have one text, the likelier counts."""
        likeliest_last = sorted([*token.top, (token.token_id, token.logprob)], key=lambda x: x[1])
        return {self._text_of(i): max(logprob, LEAST_LOGPROB) for i, logprob in likeliest_last}

    def _text_of(self, token_id: int) -> str:
        return self._vocabulary.bytes_of(token_id).decode(errors="replace")


def _envelope(identity: Identity, kind: str, choices: list[Json]) -> Json:
    return {
        "id": identity.id,
        "object": kind,
        "created": identity.created,
        "model": identity.model,
        "choices": choices,
    }


def _chat_choice(
    index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _tokens(deltas: Sequence[Delta]) -> list[ShownToken]:
    return [token for delta in deltas for token in delta.tokens]
