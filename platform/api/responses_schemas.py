"""The shapes of OpenAI's Responses API, for OpenAPI and for the tests that hold answers to them.

`responses_form.py` and `responses_output.py` write the JSON; nothing here runs when they do.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from loraplex.platform.api.answer_schemas import Answer, CachedTokens, Explained, RankedToken
from loraplex.platform.api.error_schemas import ErrorFields

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseText(Answer):
    """Text, with its log-probabilities where they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[RankedToken]


class ResponseMessage(Answer):
    """What the model said; it has its text once it is done."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: Annotated[list[ResponseText], Field(max_length=1)]


class ResponseFunctionCall(Answer):
    """A call for the caller to make; `arguments` is JSON as text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


ResponseItem = Annotated[ResponseMessage | ResponseFunctionCall, Field(discriminator="type")]


class InputTokens(CachedTokens):
    """Of the prompt's tokens; writing to the cache is not counted."""

    cache_write_tokens: int


class OutputTokens(Answer):
    """Of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseFailure(Answer):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Answer):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(Answer):
    """There is none."""

    effort: None
    summary: None


class ResponseObject(Answer):
    """OpenAI's response: its items, and what it repeats of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: Annotated[str, Field(description="The immutable id of what answered.")]
    output: list[ResponseItem]
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    loraplex: Explained | None = None


class InputTokenCount(Answer):
    """How many tokens a response's prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: Annotated[int, Field(examples=[42])]


class ResponseEvent(Answer):
    """An event of a response's stream; which fields it has beside the first two, its type says."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    item: ResponseItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: ResponseText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[RankedToken] | None = None
    name: str | None = None
    arguments: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
    error: ErrorFields | None = None
