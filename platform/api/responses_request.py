"""The body of OpenAI's Responses API, and the chat that it means.

Nothing is stored here, and the server runs no tools: fields that would need either are refused by
name, with what to send instead. Refuses to know how chats run.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import Field, model_validator

from loraplex.platform.api.chat import ChatRequest
from loraplex.platform.api.chat_turns import Turned
from loraplex.platform.api.failures import checked
from loraplex.platform.api.requests import Sampled
from loraplex.platform.api.responses_fields import (
    CacheOptions,
    Streaming,
    TextConfig,
    ToolChoice,
    Tools,
    said_choice,
)
from loraplex.platform.api.responses_items import Items, said
from loraplex.platform.api.structured import Asked, StructuredOutputs, compact
from loraplex.platform.api.unserved import Unserved
from loraplex.platform.errors import BadRequest

REASONS: Final = {
    "previous_response_id": "Nothing is stored here: send all items of the conversation in input, "
    "and leave previous_response_id out.",
    "conversation": "Conversations are not kept here: send all items of it in input, and leave "
    "conversation out.",
    "background": "Nothing runs in the background here; leave background out, or stream.",
    "background_options": "Nothing runs in the background here; leave background_options out.",
    "moderation": "Nothing is moderated here; leave moderation out.",
    "personality": "There are no styles to choose from: ask for one in instructions, and leave "
    "personality out.",
    "prompt": "Prompt templates are not kept here: send the text in instructions and input, and "
    "leave prompt out.",
    "reasoning": "The base is no reasoning model; leave reasoning out.",
    "context_management": "Contexts are not compacted here; leave context_management out.",
    "truncation": "A prompt is never cut here: send fewer items, and leave truncation out.",
    "max_tokens": "The limit is max_output_tokens here; send that.",
    "max_completion_tokens": "The limit is max_output_tokens here; send that.",
    "messages": "Messages are items of input here; send input.",
    "response_format": "The form of an answer is text.format here; send that.",
}
CODES: Final = {"previous_response_id": "previous_response_not_found"}  # OpenAI's own
HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "background": (False,),
    "reasoning": ({}, {"effort": "none"}),
    "context_management": ([],),
    "truncation": ("disabled",),
}
IGNORED: Final = frozenset({"image", "prompt_cache_retention"})  # neither changes an answer
UNSERVED: Final = Unserved(REASONS, HARMLESS, CODES, IGNORED)
SETTLED: Final[dict[str, Any]] = {  # what every answer says of itself
    "background": False,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
LOGPROBS: Final = "message.output_text.logprobs"


class ResponsesChat(ChatRequest):
    """A chat whose complaints name the fields of a response's body."""

    prompt_param: ClassVar[str] = "input"

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """The completion's limit in tokens, and the field that gave it."""
        return self.max_completion_tokens, "max_output_tokens"

    def asked(self) -> Iterator[Asked]:
        """Each thing that the answer must match."""
        for param, kind, text in super().asked():
            yield "text.format" if param == "response_format" else param, kind, text


class ResponsesRequest(Sampled, Turned):
    """POST /v1/responses."""

    input: Items
    instructions: Annotated[str | None, Field(description="A message of the system.")] = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="False: the answer ends with its first call.")
    ] = None
    max_tool_calls: Annotated[
        int | None, Field(ge=1, description="Of the server's own tools, of which there are none.")
    ] = None
    text: TextConfig | None = None
    structured_outputs: StructuredOutputs | None = None
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None,
        Field(max_length=2, description="Log-probabilities; reasoning there is none."),
    ] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    stream: bool | None = None
    stream_options: Streaming | None = None
    store: Annotated[bool | None, Field(description="Changes nothing: no response is stored.")] = (
        None
    )
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Annotated[
        Literal["auto", "default"] | None,
        Field(description="Changes nothing: there is one tier."),
    ] = None
    safety_identifier: Annotated[str | None, Field(max_length=1_024)] = None
    prompt_cache_key: Annotated[
        str | None,
        Field(max_length=1_024, description="Changes nothing: every prefix is cached."),
    ] = None
    prompt_cache_options: CacheOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        return UNSERVED.strip(data, cls.model_fields)

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesRequest":
        if self.stream_options is not None and not self.stream:
            raise BadRequest(
                "stream_options is only for streams; set stream to true.", param="stream_options"
            )
        if self.top_logprobs and not self.tells_logprobs:
            raise BadRequest(f"top_logprobs needs {LOGPROBS} in include.", param="top_logprobs")
        if self.tells_logprobs and self.tools and self.tool_choice != "none":
            raise BadRequest(
                "Log-probabilities are told of text alone; set tool_choice to "
                f'"none", or leave {LOGPROBS} out of include.',
                param="include",
            )
        if all(item.type == "reasoning" for item in self.input):
            raise BadRequest("There is nothing to answer in input; send a message.", param="input")
        return self

    @property
    def tells_logprobs(self) -> bool:
        """Whether the answer has its tokens' log-probabilities."""
        return LOGPROBS in (self.include or ())

    def chat(self) -> ResponsesChat:
        """The chat that is meant; raises `BadRequest` where chats are stricter."""
        return checked(ResponsesChat, self._said())

    def _said(self) -> dict[str, Any]:
        """The body as a chat's."""
        same = {*Sampled.model_fields, *Turned.model_fields, "parallel_tool_calls", "stream"}
        asked = self.model_dump(include=same, exclude_none=True)
        asked["messages"] = said(self.input)
        if self.instructions is not None:
            asked["messages"].insert(0, {"role": "system", "content": self.instructions})
        if self.tools:
            asked["tools"] = [tool.said() for tool in self.tools]
        asked["tool_choice"] = said_choice(self.tool_choice)
        if self.text is not None and self.text.format is not None:
            asked["response_format"] = self.text.format.said()
        if self.tells_logprobs:
            asked |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return asked | {
            "max_completion_tokens": self.max_output_tokens,
            "structured_outputs": self.structured_outputs,
        }

    def settings(self) -> dict[str, Any]:
        """What an answer repeats of its request; schemas, which may be deep, as JSON already."""
        tools = [tool.told() for tool in self.tools or ()]
        form = self.text.format if self.text is not None else None
        text = {"format": form.told() if form else {"type": "text"}, "verbosity": "medium"}
        return SETTLED | {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": msgspec.Raw(compact(text, "text.format").encode()),
            "tool_choice": self.tool_choice or "auto",
            "tools": msgspec.Raw(compact(tools, "tools").encode()),
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "user": self.user,
        }
