"""The shapes of generated answers, for OpenAPI and for the tests that hold answers to them.

`forms.py` and its kin write the JSON; nothing here runs when they do. Refuses to know how.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Finish = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """What is here is all that there is."""

    model_config = ConfigDict(extra="forbid")


class Explained(Answer):
    """How an answer came about; times are milliseconds since the engine took the request."""

    model: str
    adapter: str | None
    version: int | None
    digest: Annotated[str | None, Field(description="Of the adapter's image; null for the base.")]
    arm: Annotated[Literal["stable", "canary"] | None, Field(description="Of a canary split.")]
    cached_tokens: int = 0
    queue_ms: Annotated[float, Field(description="Until first scheduled.")] = 0
    load_ms: Annotated[float, Field(description="Until the adapter's image was resident.")] = 0
    first_token_ms: float = 0
    total_ms: float = 0


class CachedTokens(Answer):
    """Of the prompt's tokens, those that were not computed anew."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of one request; a prompt is counted once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ShownToken(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class RankedToken(ShownToken):
    """A token, and the likeliest in its place."""

    top_logprobs: list[ShownToken]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens, where they were asked for."""

    content: list[RankedToken]
    refusal: None


class CalledFunction(Answer):
    """What is to be called; `arguments` is JSON as text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call for the caller to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswer(Answer):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    """One of `n` answers."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Answer):
    """A chat's answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: Annotated[str, Field(description="The immutable id of what answered.")]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] = []
    loraplex: Explained | None = None


class CalledPart(Answer):
    """More of a call's function."""

    name: str = ""
    arguments: str = ""


class ToolCallPart(Answer):
    """A call begins, with its id and name, or goes on."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledPart


class ChatDelta(Answer):
    """What an event adds to the assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallPart] = []


class ChatChunkChoice(Answer):
    """What an event adds to one of `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(Answer):
    """An event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    loraplex: Explained | None = None


class TextLogprobs(Answer):
    """Log-probabilities by token; those of an echoed prompt's first are null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    """One continuation; in a stream, what an event adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: list[dict[str, Any] | None] = []


class TextCompletion(Answer):
    """Continuations, or an event of their stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    loraplex: Explained | None = None


class MessageUsage(Answer):
    """Tokens of one message; `input_tokens` are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageText(Answer):
    """Text."""

    type: Literal["text"]
    text: str


class MessageToolUse(Answer):
    """A call for the caller to make."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class Message(Answer):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: Annotated[str, Field(description="The immutable id of what answered.")]
    content: list[Annotated[MessageText | MessageToolUse, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    loraplex: Explained | None = None
