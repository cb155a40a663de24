"""The body of a chat: messages, and what only chats may ask for.

Roles and contents are checked here; what a base's template makes of them is its own matter.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from loraplex.platform.api.chat_turns import Turned
from loraplex.platform.api.requests import GenerationRequest
from loraplex.platform.api.strict import Strict
from loraplex.platform.api.tools import NotRead, PastCall, Tooled
from loraplex.platform.errors import BadRequest

MAX_MESSAGES = 4_096
MAX_PAST_CALLS = 128


def _join_parts(value: Any) -> Any:
    """Content as a string; a list of parts of type "text" is joined by line breaks."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError("only content parts of type text are served here")
        if part.get("type") != "text":
            raise ValueError("only content parts of type text are served here")
    return "\n".join(part["text"] for part in value)


def _known_role(value: Any) -> Any:
    if value == "function":
        raise ValueError("the role of a function's result is tool")
    return "system" if value == "developer" else value


PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}


class ChatMessage(Strict):
    """One turn of a conversation. Only an assistant's turn with calls may lack `content`."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_known_role)]
    content: Annotated[
        str,
        BeforeValidator(_join_parts),
        WithJsonSchema({"anyOf": [{"type": "string"}, PARTS]}),
    ]
    name: Annotated[str | None, Field(max_length=64)] = None
    tool_calls: Annotated[list[PastCall] | None, Field(max_length=MAX_PAST_CALLS)] = None
    tool_call_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    parsed: NotRead = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, data: Any) -> Any:
        """SDKs send an answer back as they got it, with `refusal: null` and the like."""
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value not in (None, [])}
        return {"content": ""} | given if "tool_calls" in given else given

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _only_the_assistant_calls(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("role") != "assistant":
            raise ValueError("only messages of the assistant have tool_calls")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _only_tools_answer(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("role") != "tool":
            raise ValueError("only messages of the role tool have tool_call_id")
        return value

    def told(self) -> dict[str, Any]:
        """What a template is given."""
        return self.model_dump(exclude_none=True)


class ChatRequest(GenerationRequest, Tooled, Turned):
    """POST /v1/chat/completions."""

    prompt_param: ClassVar[str] = "messages"

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs set to true.", param="top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise BadRequest(
                "max_tokens and max_completion_tokens mean the same; send one of them.",
                param="max_tokens",
            )
        return self

    @model_validator(mode="after")
    def _one_form(self) -> "ChatRequest":
        """An answer without calls may be JSON of a schema; any other form excludes calls."""
        if self.callable_tools and (asked := next(self.guided(), None)):
            raise BadRequest(
                f"An answer that may call tools cannot be held to {asked[0]} too; set tool_choice "
                'to "none", or leave it out.',
                param=asked[0],
            )
        return self

    @model_validator(mode="after")
    def _ends_openly(self) -> "ChatRequest":
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise BadRequest(
                "A message that calls tools cannot be continued; leave out continue_final_message.",
                param="continue_final_message",
            )
        return self

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """The completion's limit in tokens, and the field that gave it."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return super().token_limit

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to tell beside the chosen one; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None
