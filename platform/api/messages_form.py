"""The JSON of Anthropic's messages, whole and as a stream's events.

A stream is `message_start`, for each block its start, deltas and stop, then `message_delta` with
the reason and the usage, and `message_stop`; a `ping` follows the first block's start. Knows deltas
and shapes; refuses to know where deltas come from and how bytes are sent.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from pydantic_core import from_json

from loraplex.platform.api.choice import Delta
from loraplex.platform.api.forms import Answered, Json, Usage, named_events
from loraplex.platform.api.messages_errors import error_body
from loraplex.platform.api.tool_calls import Arguments, Begin, CallReader, Piece, Text
from loraplex.platform.errors import ApiError
from loraplex.platform.hermes import CLOSE, OPEN

NOTHING: Final = Delta(0, "")


@dataclass(frozen=True)
class Asked:
    """What the form must know of a request: its ids, its tools and stops, and its prompt's size."""

    request_id: str
    id: str
    model: str
    prompt_tokens: int
    tools: Collection[str] = ()
    stops: Collection[str] = ()


class MessagesForm:
    """Writes one message."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._reader = asked, CallReader(asked.tools)
        self._blocks, self._open = 0, ""  # blocks begun, and the type of the last if it is open
        self._last = NOTHING

    def opening(self, choices: int) -> bytes:
        """The message without content. What of its prompt was cached is known at the end."""
        message = self._message([], None, None, Usage(self._asked.prompt_tokens, 0))
        return named_events([{"type": "message_start", "message": message}])

    def chunks(self, delta: Delta) -> bytes:
        """Blocks, and what is added to them."""
        events = [event for piece in self._read(delta) for event in self._tell(piece)]
        if delta.finish:
            self._last = delta
            events += self._close()
        return named_events(events)

    def ending(self, usage: Usage, explained: Json) -> bytes:
        """Why it ended, what it used, and the end."""
        reason, sequence = self._stop(self._last, self._reader.calls)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        return named_events([last, {"type": "message_stop"} | explained])

    def failure(self, error: ApiError) -> bytes:
        """An event of the type error."""
        return named_events([error_body(error, self._asked.request_id)])

    def whole(self, answers: Sequence[Answered], usage: Usage) -> Json:
        """A message with its content."""
        (answer,) = answers
        pieces = self._read(Delta(0, answer.text, finish=answer.last.finish))
        reason, sequence = self._stop(answer.last, self._reader.calls)
        content = list(_blocks(pieces, cut=reason in ("max_tokens", "stop_sequence")))
        if reason == "tool_use" and not any(block["type"] == "tool_use" for block in content):
            reason = "end_turn"
        return self._message(content, reason, sequence, usage)

    def _read(self, delta: Delta) -> list[Piece]:
        """What a delta adds to the message."""
        if not self._asked.tools:
            return [Text(delta.text)] if delta.text else []
        return self._reader.push(delta.text) + (self._reader.flush() if delta.finish else [])

    def _tell(self, piece: Piece) -> Iterator[Json]:
        """The events of one piece; text may need a block of its own first."""
        if isinstance(piece, Begin):
            yield from self._begin(
                {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            )
            return
        if isinstance(piece, Text):
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            delta = {"type": "text_delta", "text": piece.text}
        else:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        yield {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        yield {"type": "content_block_start", "index": self._blocks, "content_block": block}
        if not self._blocks:
            yield {"type": "ping"}
        self._blocks, self._open = self._blocks + 1, block["type"]

    def _close(self) -> list[Json]:
        opened, self._open = self._open, ""
        return [{"type": "content_block_stop", "index": self._blocks - 1}] if opened else []

    def _stop(self, last: Delta, calls: int) -> tuple[str, str | None]:
        """Why a message ended, and at which of its stop sequences."""
        if last.stop in self._asked.stops:
            return "stop_sequence", last.stop
        if last.finish == "length":
            return "max_tokens", None
        return "tool_use" if calls else "end_turn", None

    def _message(
        self, content: list[Json], reason: str | None, sequence: str | None, usage: Usage
    ) -> Json:
        return {
            "id": self._asked.id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(usage),
        }


def _blocks(pieces: Sequence[Piece], *, cut: bool) -> Iterator[Json]:
    """The blocks that pieces come to; a call's are its beginning and its arguments."""
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, Text)):
        if is_text:
            yield _text("".join(piece.text for piece in group if isinstance(piece, Text)))
            continue
        parts = list(group)
        for begin in parts:
            if isinstance(begin, Begin):
                yield _call(begin, parts, cut=cut)


def _call(begin: Begin, pieces: Sequence[Piece], *, cut: bool) -> Json:
    """A call; as much of it as came, where it was `cut`. What is no JSON is text as it stands."""
    arguments = "".join(
        piece.text
        for piece in pieces
        if isinstance(piece, Arguments) and piece.index == begin.index
    )
    try:
        read = from_json(arguments or "{}", allow_partial=cut)
    except ValueError:
        return _text(f'{OPEN}{{"name": "{begin.name}", "arguments": {arguments}{CLOSE}')
    return {"type": "tool_use", "id": begin.id, "name": begin.name, "input": read}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _usage(usage: Usage) -> Json:
    """Anthropic counts the cached part of a prompt apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
