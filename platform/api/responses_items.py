"""The items of a conversation as OpenAI's Responses API has them: messages, calls, their results.

Checks items and says them as a chat's messages, which is what templates are given. Reasoning is
left out: no base here has asked to be told of it. Refuses to know what else is in a body.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from loraplex.platform.api.chat import MAX_MESSAGES, MAX_PAST_CALLS
from loraplex.platform.api.or_text import OrText
from loraplex.platform.api.strict import Strict
from loraplex.platform.api.tools import NotRead, PastFunction, ToolName

MAX_PARTS: Final = 1_024
MAX_ITEMS: Final = MAX_MESSAGES - 1  # beside the instructions
SERVED: Final = ("message", "function_call", "function_call_output", "reasoning")
TEXTS: Final = ("input_text", "output_text", "refusal")
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Said = dict[str, Any]  # a message of a chat


def without_nulls(value: Any) -> Any:
    """An object without what says nothing: SDKs dump every field that a class has."""
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if each is not None}


class TextPart(Strict):
    """A part of a content: text, the caller's or the model's."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: NotRead = None
    logprobs: NotRead = None
    parsed: NotRead = None
    prompt_cache_breakpoint: Annotated[
        Any, Field(exclude=True, description="Changes nothing: every prefix is cached.")
    ] = None


class RefusalPart(Strict):
    """What another model said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The same as text, which it is here."""
        return self.refusal


def _as_part(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") not in TEXTS:
        raise ValueError(
            "only text is served here, no images, files or audio; send parts of type input_text"
        )
    return without_nulls(value)


Part = TextPart | RefusalPart
Parts = Annotated[
    list[Annotated[Part, Field(discriminator="type"), BeforeValidator(_as_part)]],
    Field(max_length=MAX_PARTS),
    OrText(lambda text: [{"type": "input_text", "text": text}]),
]


class DirectCaller(Strict):
    """The model itself calls, and no program of its."""

    type: Literal["direct"]


class MessageItem(Strict):
    """What somebody said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: NotRead = None
    status: NotRead = None
    phase: NotRead = None


class FunctionCall(PastFunction):
    """A call that the model made; `arguments` are JSON as text."""

    type: Literal["function_call"]
    call_id: CallId
    caller: DirectCaller | None = None
    id: NotRead = None
    status: NotRead = None

    def said(self) -> Said:
        """The call as a chat's message has it."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionCallOutput(Strict):
    """What a call came to."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Parts
    name: ToolName | None = None
    caller: DirectCaller | None = None
    id: NotRead = None
    status: NotRead = None

    def said(self) -> Said:
        """The result as a chat's message."""
        named = {} if self.name is None else {"name": self.name}
        content = _text(self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": content} | named


class ReasoningItem(Strict):
    """What another model thought; it is left out."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


def _as_item(value: Any) -> Any:
    """A message may leave out its type; any other kind must be one of those served."""
    if not isinstance(value, dict):
        return value
    value = without_nulls(value)
    if "type" not in value and "role" in value:
        return value | {"type": "message"}
    if value.get("type") in (None, "item_reference"):
        raise ValueError("nothing is stored here; send the item itself, with its type")
    if value["type"] not in SERVED:
        raise ValueError(f"only items of type {', '.join(SERVED)} are served here; leave it out")
    return value


Item = Annotated[
    MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem,
    Field(discriminator="type"),
    BeforeValidator(_as_item),
]
Items = Annotated[
    list[Item],
    Field(min_length=1, max_length=MAX_ITEMS, description="A message of the user, or items."),
    OrText(lambda text: [{"role": "user", "content": text}]),
]


def said(items: Iterable[Item]) -> list[Said]:
    """The items as a chat's messages; calls join what the assistant said right before them."""
    turns: list[Said] = []
    for item in items:
        if isinstance(item, MessageItem):
            turns.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, FunctionCallOutput):
            turns.append(item.said())
        elif isinstance(item, FunctionCall):
            if not _may_call(turns):
                turns.append({"role": "assistant", "content": ""})
            turns[-1].setdefault("tool_calls", []).append(item.said())
    return turns


def _may_call(turns: list[Said]) -> bool:
    """Whether the last turn is the assistant's, and has room for a call."""
    last = turns[-1] if turns else {}
    return last.get("role") == "assistant" and len(last.get("tool_calls", ())) < MAX_PAST_CALLS


def _text(parts: list[Part]) -> str:
    return "\n".join(part.text for part in parts)
