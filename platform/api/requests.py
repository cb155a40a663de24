"""Bodies of the two generating routes: OpenAI's parameters, checked as far as a body alone allows.

Absurd values, unknown fields and fields that this server does not serve are refused with the field
named; nothing is dropped in silence. What needs the base or the tenant is checked in `sampling.py`
and `target.py`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from loraplex.platform.errors import BadRequest

MAX_STOPS = 4
MAX_STOP_CHARS = 1_000
MAX_PROMPTS = 16
MAX_CHOICES = 8
MAX_MESSAGES = 4_096
MAX_BIASES = 1_024
MAX_STOP_TOKENS = 128

REFUSED = {
    "tools": "Tools are not served here; describe them in a message instead.",
    "tool_choice": "Tools are not served here; leave tool_choice out.",
    "functions": "Functions are not served here; describe them in a message instead.",
    "function_call": "Functions are not served here; leave function_call out.",
    "audio": "Only text is served here; leave audio out.",
    "modalities": 'Only text is served here; leave modalities out, or send ["text"].',
    "prediction": "Predicted outputs are not served here; leave prediction out.",
    "web_search_options": "Web search is not served here; leave web_search_options out.",
    "reasoning_effort": "The base is no reasoning model; leave reasoning_effort out.",
    "verbosity": "Verbosity is not served here; ask for it in a message instead.",
    "store": "Completions are not stored here; leave store out, or send false.",
    "echo": "Echoing the prompt is not served here; leave echo out, or send false.",
    "suffix": "Infilling is not served here; leave suffix out.",
    "best_of": "best_of is not served here; use n and choose yourself.",
}
HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
IGNORED = frozenset(
    {"parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key"}
)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS, description="A string, or up to four."),
    BeforeValidator(_as_list),
]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Strict(BaseModel):
    """Fields are what they say they are: no coercion, no NaN or infinity, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer; only plain text is served."""

    type: str

    @model_validator(mode="after")
    def _only_text(self) -> "ResponseFormat":
        if self.type != "text":
            raise BadRequest(
                'Only response_format {"type": "text"} is served here; ask for JSON in a message.',
                param="response_format",
            )
        return self


class GenerationRequest(Strict):
    """What chat and plain completions have in common."""

    prompt_param: ClassVar[str] = "prompt"  # the field that holds the prompt

    model: Annotated[str, Field(min_length=1, max_length=256)]
    adapter_id: Annotated[
        str | None,
        Field(min_length=1, max_length=256, description="An adapter, where `model` is the base."),
    ] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, description="0 or -1: all.")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    logit_bias: Annotated[dict[str, Bias] | None, Field(max_length=MAX_BIASES)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKENS)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str | None, Field(max_length=1_024)] = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=64)] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, reason in REFUSED.items():
            value = data.get(name)
            if value is not None and not _is_harmless(name, value):
                raise BadRequest(reason, param=name)
        return {k: v for k, v in data.items() if k not in REFUSED and k not in IGNORED}

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise BadRequest(
                "stream_options is only for streams; set stream to true.", param="stream_options"
            )
        return self

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """The completion's limit in tokens, and the field that gave it."""
        return self.max_tokens, "max_tokens"

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to tell beside the chosen one; None for no logprobs."""
        return None


def _is_harmless(name: str, value: Any) -> bool:
    """Whether a refused field says only what is done anyway; True is not 1 here."""
    return any(value == each and type(value) is type(each) for each in HARMLESS.get(name, ()))


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
    if value in ("tool", "function"):
        raise ValueError("tools are not served here; roles are system, user and assistant")
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
    """One turn of a conversation."""

    role: Annotated[Literal["system", "user", "assistant"], BeforeValidator(_known_role)]
    content: Annotated[
        str,
        BeforeValidator(_join_parts),
        WithJsonSchema({"anyOf": [{"type": "string"}, PARTS]}),
    ]
    name: Annotated[str | None, Field(max_length=64)] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, data: Any) -> Any:
        """SDKs send an answer back as they got it, with `refusal: null` and the like."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value not in (None, [])}


class ChatRequest(GenerationRequest):
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


Prompt = list[str] | list[list[int]]


def _as_prompts(value: Any) -> Any:
    """A prompt's four forms (text, texts, ids, lists of ids) as a list of texts or lists of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("a prompt is a string, token ids, or a list of either")
    if all(type(item) is int for item in value):
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request")
    if not all(type(item) is str for item in value) and not all(map(_is_ids, value)):
        raise ValueError("a prompt is a string, token ids, or a list of either")
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _IDS,
        {"type": "array", "items": _IDS},
    ]
}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_as_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @property
    def prompts(self) -> Prompt:
        """One text or one list of token ids for each prompt."""
        prompts: Prompt = self.prompt
        return prompts

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to tell beside the chosen one; None for no logprobs."""
        return self.logprobs
