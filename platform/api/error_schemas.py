"""The shapes of errors, and an example of each status; for OpenAPI, and for tests.

`errors.py` and `messages_errors.py` write the JSON. Refuses to know routes.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from loraplex.platform.errors import (
    AdapterRejected,
    ApiError,
    BadRequest,
    BodyTimedOut,
    Conflict,
    EngineUnavailable,
    Forbidden,
    InternalError,
    InvalidKey,
    NotFound,
    QuotaExceeded,
    TimedOut,
    TooLarge,
)


class ErrorFields(BaseModel):
    """OpenAI's four keys, which are always there; some errors tell more."""

    model_config = ConfigDict(extra="allow")

    message: Annotated[str, Field(description="What went wrong, and what to do.")]
    type: str
    param: Annotated[str | None, Field(description="The field at fault.")]
    code: Annotated[str | None, Field(description="Stable, for programs.")]


class Error(BaseModel):
    """The body of every error."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorFields


class MessageErrorDetails(BaseModel):
    """What programs read."""

    error_code: str | None
    param: str | None


class MessageErrorFields(BaseModel):
    """Anthropic's type of error."""

    type: str
    message: str
    details: MessageErrorDetails


class MessageError(BaseModel):
    """The body of every error of Anthropic's routes."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["error"]
    error: MessageErrorFields
    request_id: str


SAMPLE_ID: Final = "req_01jt4r0e6cq8v7v1e9b2s5m3xk"
SAMPLES: Final[dict[int, ApiError]] = {
    400: BadRequest("The field model is required.", param="model"),
    401: InvalidKey(),
    403: Forbidden("This key lacks the scope admin."),
    404: NotFound("There is nothing of that name, or it is not yours."),
    408: BodyTimedOut("The body did not come in time: it has 60 s. Send the request again."),
    409: Conflict("It is not as you have seen it. Look at it again, then decide."),
    413: TooLarge("The body is larger than the limit of 4194304 bytes."),
    422: AdapterRejected(
        [("nonfinite", "The tensor lora_A has values that are not finite. Train it again.")]
    ),
    429: QuotaExceeded("The tenant's 1000000 tokens of this month are used up."),
    500: InternalError(SAMPLE_ID),
    503: EngineUnavailable("The engine is starting. Try again in a few seconds."),
    504: TimedOut("The generation took longer than 600 s."),
}
MEANINGS: Final = {
    400: "A field has a value that can never work, or the body cannot be read.",
    401: "There is no key, or it is not valid.",
    403: "The key lacks the scope, or its tenant is suspended.",
    404: "There is no such thing for this caller.",
    408: "The rest of the body did not come in time; the connection is closed.",
    409: "It cannot be reconciled with what is there.",
    413: "The body is too large.",
    422: "An upload is no adapter for this base; `reasons` has every reason.",
    429: "A rate, a quota or a budget is used up; `retry-after` says for how long.",
    500: "The server failed.",
    503: "A part that the request needs is not there; `retry-after` says when to come back.",
    504: "The generation took too long.",
    507: "The server's disk is full; what was acknowledged is kept.",
}


def sample(status: int) -> dict[str, Any]:
    """An example of the body of an error."""
    return SAMPLES[status].body
