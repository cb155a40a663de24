"""Bodies of the two generating routes: OpenAI's parameters, checked as far as a body alone allows.

Absurd values, unknown fields and fields that this server does not serve are refused with the field
named; nothing is dropped in silence. This file has what both routes share, and plain completions;
chats are in `chat.py`. What needs the base or the tenant is checked in `job.py` and `target.py`.
"""

from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from loraplex.platform.api.beams import NEUTRAL, Several
from loraplex.platform.api.strict import Strict
from loraplex.platform.api.structured import Guided
from loraplex.platform.api.unserved import Unserved
from loraplex.platform.errors import BadRequest

MAX_STOPS = 16  # OpenAI takes 4, vLLM any number
MAX_STOP_CHARS = 1_000
MAX_PROMPTS = 16
MAX_BIASES = 1_024
MAX_STOP_TOKENS = 128
MAX_DRAFT_TOKENS = 16
MAX_PARTS = 16
MAX_WEIGHT = 100.0

REASONS: Final = {
    "functions": "Functions are the older name of tools; send tools.",
    "function_call": "function_call is the older name of tool_choice; send tool_choice.",
    "audio": "Only text is served here; leave audio out.",
    "modalities": 'Only text is served here; leave modalities out, or send ["text"].',
    "web_search_options": "Web search is not served here; leave web_search_options out.",
    "reasoning_effort": "The base is no reasoning model; leave reasoning_effort out.",
    "verbosity": "Verbosity is not served here; ask for it in a message instead.",
    "store": "Completions are not stored here; leave store out, or send false.",
    "suffix": "Infilling is not served here; leave suffix out.",
    "skip_special_tokens": "Special tokens have no text here; leave skip_special_tokens out.",
    "include_stop_str_in_output": (
        "A stop string is no part of an answer here; leave include_stop_str_in_output out."
    ),
    "truncate_prompt_tokens": (
        "A prompt is never cut here; send a shorter one, and leave truncate_prompt_tokens out."
    ),
    "bad_words": "Words cannot be forbidden here; use logit_bias, and leave bad_words out.",
}
HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    "suffix": ("",),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
}
IGNORED: Final = frozenset(  # none of them changes what is answered
    {
        "service_tier",
        "safety_identifier",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "spaces_between_special_tokens",
    }
)
UNSERVED: Final = Unserved(REASONS, HARMLESS, ignored=IGNORED)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS, description="A string, or up to 16."),
    BeforeValidator(_as_list),
]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]
AdapterName = Annotated[str, Field(min_length=1, max_length=256)]


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="True: each chunk tells its choice's usage so far.")
    ] = None
    include_obfuscation: bool | None = None


class AdapterPart(Strict):
    """An adapter in a composition, and the factor by which it counts."""

    id: AdapterName
    weight: Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0


class Sampled(Strict):
    """Who answers and how tokens are drawn, whatever the route."""

    model: AdapterName
    adapter_id: Annotated[
        AdapterName | None, Field(description="An adapter, where `model` is the base.")
    ] = None
    adapters: Annotated[
        list[AdapterPart] | None,
        Field(
            min_length=1,
            max_length=MAX_PARTS,
            description="Adapters whose weighted sum answers, where `model` is the base.",
        ),
    ] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, description="0 or -1: all.")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    logit_bias: Annotated[dict[str, Bias] | None, Field(max_length=MAX_BIASES)] = None
    seed: Annotated[
        int | None, Field(ge=-(2**63), lt=2**63, description="Choice i samples with seed + i.")
    ] = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOP_TOKENS)] = None
    min_tokens: Annotated[
        int | None,
        Field(ge=0, description="Before so many tokens nothing stops a completion."),
    ] = None
    priority: Annotated[
        int | None,
        Field(ge=-(2**31), lt=2**31, description="Among one tenant's own, the lowest first."),
    ] = None
    speculative_tokens: Annotated[
        int | None,
        Field(ge=0, le=MAX_DRAFT_TOKENS, description="Drafts a step, looked up in the prompt."),
    ] = None
    ignore_eos: bool | None = None
    loraplex: Annotated[
        bool | None, Field(description="True: the answer says how it came about, in `loraplex`.")
    ] = None
    user: Annotated[str | None, Field(max_length=1_024)] = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=64)] = None


class GenerationRequest(Guided, Several, Sampled):
    """What chat and plain completions have in common."""

    prompt_param: ClassVar[str] = "prompt"  # the field that holds the prompt

    max_tokens: Annotated[int | None, Field(ge=1)] = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        return UNSERVED.strip(data, cls.model_fields)

    @model_validator(mode="after")
    def _check_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise BadRequest(
                "stream_options is only for streams; set stream to true.", param="stream_options"
            )
        options = self.stream_options
        if options and options.continuous_usage_stats and not options.include_usage:
            raise BadRequest(
                "continuous_usage_stats needs include_usage set to true.", param="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "A stream has no prompt_logprobs; leave stream out.", param="prompt_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> "GenerationRequest":
        parameters = {name: getattr(self, name) for name in NEUTRAL if name != "logprobs"}
        self.check_width(parameters | {"logprobs": self.top_logprobs_wanted})
        return self

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """The completion's limit in tokens, and the field that gave it."""
        return self.max_tokens, "max_tokens"

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to tell beside the chosen one; None for no logprobs."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer opens with the prompt."""
        return False


Prompts = list[str] | list[list[int]]


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
    echo: bool | None = None

    @property
    def prompts(self) -> Prompts:
        """One text or one list of token ids for each prompt."""
        prompts: Prompts = self.prompt
        return prompts

    @property
    def top_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to tell beside the chosen one; None for no logprobs."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """Whether the answer opens with the prompt."""
        return bool(self.echo)
