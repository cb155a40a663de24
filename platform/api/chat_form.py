"""The JSON of chats: `chat.completion` and `chat.completion.chunk`, with calls of tools.

Knows deltas and shapes; refuses to know where deltas come from and how bytes are sent.
"""

from collections.abc import Collection, Sequence

from loraplex.platform.api.choice import Delta, ShownToken
from loraplex.platform.api.forms import (
    LEAST_LOGPROB,
    Answered,
    Identity,
    Json,
    OpenAIForm,
    Usage,
    prompt_json,
)
from loraplex.platform.api.tool_calls import Arguments, Begin, CallReader, Piece, Text
from loraplex.platform.text import Vocabulary


class ChatForm(OpenAIForm):
    """Writes one chat's answers; `tools` are the names of those that it may call."""

    kind = "chat.completion.chunk"

    def __init__(
        self, identity: Identity, vocabulary: Vocabulary, tools: Collection[str] = ()
    ) -> None:
        super().__init__(identity, vocabulary)
        self._tools = tools
        self._readers: dict[int, CallReader] = {}  # of each choice in a stream

    def opening(self, choices: int) -> bytes:
        """Each choice begins by saying whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return self._events([self._chunk(i, delta) for i in range(choices)])

    def chunks(self, delta: Delta) -> bytes:
        """Text, calls and log-probabilities, then the reason why it ended."""
        parts = self._parts(delta) if self._tools else [{"content": delta.text}]
        if delta.tokens:
            parts = parts or [{"content": ""}]
        elif not delta.text and not self._tools:
            parts = []
        chunks = [self._chunk(delta.index, part) for part in parts]
        if chunks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(delta.tokens)
        if delta.finish:
            reader = self._readers.get(delta.index)
            finish = _reason(delta.finish, reader.calls if reader else 0)
            chunks.append(self._chunk(delta.index, {}, finish))
        return self._events(chunks, delta.total)

    def whole(self, answers: Sequence[Answered], usage: Usage) -> Json:
        """A `chat.completion`."""
        choices = [self._choice(i, each) for i, each in enumerate(answers)]
        prompt = prompt_json(self._identity, self._vocabulary, answers[0].prompt_logprobs)
        body = self._identity.envelope("chat.completion", choices)
        return body | prompt | {"usage": usage.json()}

    def _parts(self, delta: Delta) -> list[Json]:
        """What a delta adds to the message, where there are tools."""
        reader = self._readers.setdefault(delta.index, CallReader(self._tools))
        pieces = reader.push(delta.text) + (reader.flush() if delta.finish else [])
        return [_part(piece) for piece in pieces]

    def _choice(self, index: int, answer: Answered) -> Json:
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        calls: list[Json] = []
        if self._tools:
            message["content"], calls = self._read(answer.text)
        if calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": _reason(answer.finish, len(calls)),
        }

    def _read(self, text: str) -> tuple[str | None, list[Json]]:
        """The content and the calls of a whole text."""
        reader = CallReader(self._tools)
        pieces = reader.push(text) + reader.flush()
        said = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        calls = [_call(piece, pieces) for piece in pieces if isinstance(piece, Begin)]
        return (said or None) if calls else said, calls

    def _chunk(self, index: int, delta: Json, finish: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._envelope([choice])

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json | None:
        if self._identity.logprobs is None:
            return None
        return {"content": ranked(self._vocabulary, tokens), "refusal": None}


def ranked(vocabulary: Vocabulary, tokens: Sequence[ShownToken]) -> list[Json]:
    """The log-probabilities of an answer's tokens, each with the likeliest in its place."""
    known = [token.logprob for token in tokens if token.logprob is not None]
    return [
        _token(vocabulary, each.token_id, each.logprob)
        | {"top_logprobs": [_token(vocabulary, *pair) for pair in each.top]}
        for each in known
    ]


def _token(vocabulary: Vocabulary, token_id: int, logprob: float) -> Json:
    content = vocabulary.bytes_of(token_id)
    return {
        "token": content.decode(errors="replace"),
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": list(content),
    }


def _reason(finish: str | None, calls: int) -> str | None:
    return "tool_calls" if calls and finish == "stop" else finish


def _part(piece: Piece) -> Json:
    """A piece of an answer as a part of a stream's message."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Begin):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _call(begin: Begin, pieces: Sequence[Piece]) -> Json:
    arguments = "".join(
        piece.text
        for piece in pieces
        if isinstance(piece, Arguments) and piece.index == begin.index
    )
    function = {"name": begin.name, "arguments": arguments}
    return {"id": begin.id, "type": "function", "function": function}
