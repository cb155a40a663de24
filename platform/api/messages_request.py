"""Bodies of Anthropic's two routes, and the chat that each of them means.

Fields that this server does not serve are refused by name, with the reason; those that change
nothing here are accepted, and their descriptions say why. Refuses to know how chats run.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from loraplex.platform.api.chat import MAX_MESSAGES, ChatRequest
from loraplex.platform.api.failures import checked
from loraplex.platform.api.messages_blocks import (
    Block,
    CacheControl,
    OrBlocks,
    TextBlock,
    Turn,
    text_of,
)
from loraplex.platform.api.requests import AdapterName, Stops
from loraplex.platform.api.strict import Strict
from loraplex.platform.api.tools import MAX_TOOLS, ToolName
from loraplex.platform.api.unserved import Unserved
from loraplex.platform.errors import BadRequest

REASONS: Final = {
    "thinking": "The base is no reasoning model; leave thinking out.",
    "container": "There are no containers here; leave container out.",
    "mcp_servers": "The server calls no MCP servers; leave mcp_servers out.",
    "context_management": "Contexts are not edited here; leave context_management out.",
    "speed": "There is one speed here; leave speed out.",
    "thread": "Threads are not kept here: send all messages, and leave thread out.",
    "inference_geo": "Requests run where this server runs; leave inference_geo out.",
}
CODES: Final = {"thread": "thread_unsupported_request"}  # upon it Anthropic's SDK sends it all
HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
UNSERVED: Final = Unserved(REASONS, HARMLESS, CODES)


class InputSchema(Strict):
    """A JSON schema of type object."""

    model_config = ConfigDict(extra="allow")

    type: Literal["object"]


class ClientTool(Block):
    """A function that the model may call and the caller runs."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str | None, Field(max_length=16_384)] = None
    input_schema: InputSchema
    strict: Annotated[bool | None, Field(description="Changes nothing, as in a chat.")] = None
    eager_input_streaming: Annotated[
        bool | None, Field(description="Changes nothing: inputs are streamed as they come.")
    ] = None
    allowed_callers: Annotated[list[Literal["direct"]] | None, Field(max_length=1)] = None
    defer_loading: Literal[False] | None = None

    def said(self) -> dict[str, Any]:
        """The tool in OpenAI's words."""
        function = {"name": self.name, "parameters": self.input_schema.model_dump()}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class ToolChoice(Strict):
    """Whether, and which of, the tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('it has a name if its type is "tool", and only then')
        return self

    def said(self) -> Any:
        """The choice in OpenAI's words."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Strict):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """The form of the answer."""

    format: OutputFormat | None = None


class CountRequest(Strict):
    """POST /v1/messages/count_tokens."""

    model: AdapterName
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[list[TextBlock] | None, Field(max_length=1_024), OrBlocks] = None
    tools: Annotated[list[ClientTool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        return UNSERVED.strip(data, cls.model_fields)

    @model_validator(mode="after")
    def _can_be_continued(self) -> "CountRequest":
        if self.prefills and any(block.type == "tool_use" for block in self.messages[-1].content):
            raise BadRequest(
                "The last of the messages calls tools; answer its calls in a message of the user.",
                param="messages",
            )
        if self.prefills and self.output_config is not None and self.output_config.format:
            raise BadRequest(
                "An answer that output_config holds to a form cannot be prefilled; end with a "
                "message of the user.",
                param="output_config",
            )
        return self

    @property
    def prefills(self) -> bool:
        """Whether the last message opens the answer, which goes on with it."""
        return self.messages[-1].role == "assistant"

    def chat(self) -> ChatRequest:
        """The chat that is meant; raises `BadRequest` where chats are stricter."""
        return checked(ChatRequest, self._said())

    def _said(self) -> dict[str, Any]:
        """The body in OpenAI's words, as far as both routes have it."""
        system = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        said: dict[str, Any] = {
            "model": self.model,
            "messages": system + [each for turn in self.messages for each in turn.said()],
        }
        if self.prefills:
            said["continue_final_message"] = True
        if self.tools:
            said["tools"] = [tool.said() for tool in self.tools]
        if self.tool_choice is not None:
            said["tool_choice"] = self.tool_choice.said()
            said["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "answer", "schema": self.output_config.format.schema_}
            said["response_format"] = {"type": "json_schema", "json_schema": schema}
        return said


class Metadata(Strict):
    """Who asks, as the caller knows them."""

    user_id: Annotated[
        str | None,
        Field(max_length=1_024, description="Requests of one id stay on one side of a canary."),
    ] = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    metadata: Metadata | None = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None,
        Field(description="Changes nothing: there is one tier."),
    ] = None
    loraplex: Annotated[
        bool | None, Field(description="True: the answer says how it came about, in `loraplex`.")
    ] = None

    def _said(self) -> dict[str, Any]:
        """All of the body."""
        same = ("max_tokens", "stream", "temperature", "top_k", "top_p", "loraplex")
        said = super()._said() | {name: getattr(self, name) for name in same}
        user = self.metadata.user_id if self.metadata else None
        return said | {"stop": self.stop_sequences, "user": user}
