"""The JSON of OpenAI's Responses API, whole and as a stream's events.

A stream is `response.created` and `response.in_progress`, the events of its items, and one of
`response.completed`, `response.incomplete` and `response.failed`; an `error` comes before the last.
Refuses to know where deltas come from and how bytes are sent.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from loraplex.platform.api.choice import Delta
from loraplex.platform.api.forms import Answered, Json, Usage, named_events
from loraplex.platform.api.responses_output import Output
from loraplex.platform.errors import ApiError
from loraplex.platform.text import Vocabulary


@dataclass(frozen=True)
class Asked:
    """What the form must know of a request: its id, its tools, and what an answer repeats of it.

    `now` tells seconds since the epoch.
    """

    unique: str
    model: str
    settings: Json
    now: Callable[[], float]
    tools: Collection[str] = ()


class ResponsesForm:
    """Writes one response."""

    def __init__(self, asked: Asked, vocabulary: Vocabulary) -> None:
        self._asked, self._created = asked, int(asked.now())
        self._output = Output(asked.unique, vocabulary, asked.tools)
        self._numbers = count(2)  # of events, behind the two that open a stream

    def opening(self, choices: int) -> bytes:
        """The response without items."""
        response = self._response("in_progress", output=[])
        kinds = ("response.created", "response.in_progress")
        return _numbered([{"type": kind, "response": response} for kind in kinds], count())

    def chunks(self, delta: Delta) -> bytes:
        """Items, and what is added to them."""
        return _numbered(self._output.take(delta), self._numbers)

    def ending(self, usage: Usage, explained: Json) -> bytes:
        """The response as it ended."""
        response = self._ended(usage)
        event = {"type": f"response.{response['status']}", "response": response | explained}
        return _numbered([event], self._numbers)

    def failure(self, error: ApiError) -> bytes:
        """The error, in the two shapes that clients look for, and the response that failed."""
        told = {"code": error.code, "message": error.message, "param": error.param}
        failed = {"code": _code(error), "message": error.message}
        response = self._response("failed", error=failed)
        events: list[Json] = [
            {"type": "error", **told, "error": error.fields()},
            {"type": "response.failed", "response": response},
        ]
        return _numbered(events, self._numbers)

    def whole(self, answers: Sequence[Answered], usage: Usage) -> Json:
        """A response with its items."""
        (answer,) = answers
        for _ in self._output.take(Delta(0, answer.text, tuple(answer.tokens), answer.last.finish)):
            pass
        return self._ended(usage)

    def _ended(self, usage: Usage) -> Json:
        if self._output.is_cut:
            cut = {"reason": "max_output_tokens"}
            return self._response("incomplete", incomplete_details=cut, usage=_usage(usage))
        completed = int(self._asked.now())
        return self._response("completed", completed_at=completed, usage=_usage(usage))

    def _response(self, status: str, **facts: object) -> Json:
        return {
            "id": f"resp_{self._asked.unique}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._asked.model,
            "output": self._output.items,
            "usage": None,
            **self._asked.settings,
            **facts,
        }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _code(error: ApiError) -> str:
    """The code of OpenAI's that a failed response has; the event before it has ours."""
    if error.status >= 500:
        return "server_error"
    return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"


def _numbered(events: Iterable[Json], numbers: Iterable[int]) -> bytes:
    pairs = zip(events, numbers, strict=False)
    return named_events([event | {"sequence_number": number} for event, number in pairs])
