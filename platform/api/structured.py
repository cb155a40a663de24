"""Structured output: the fields that ask for it, and the one `Guide` that they mean.

OpenAI's `response_format` and vLLM's `structured_outputs` and `guided_*` are served; a request has
at most one. What llguidance cannot follow is refused here, with its reason, before anything runs.
Knows grammars; refuses to know tokens and prompts.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from loraplex.engine.protocol import Guide, GuideKind
from loraplex.platform.api.grammars import MAX_CHARS, problem_with
from loraplex.platform.api.strict import Strict
from loraplex.platform.errors import BadRequest

MAX_ALTERNATIVES: Final = 1_024
MAX_REASON_CHARS: Final = 400

Schema = dict[str, Any]
GuideText = Annotated[str, Field(min_length=1, max_length=MAX_CHARS)]
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_ALTERNATIVES, description="The answer is one of these."),
]


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("it is too deep") from None


def _as_schema_text(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, dict):
        return _dumps(value)
    raise ValueError("a JSON schema is an object, or its text")


SchemaText = Annotated[
    str | None,
    BeforeValidator(_as_schema_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}),
]
Asked = tuple[str, GuideKind, str]  # the field, the kind of guide, and its text


class JsonSchema(Strict):
    """A schema by name; `strict` changes nothing, since a schema is always enforced."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str | None, Field(max_length=4_096)] = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise BadRequest(
                'response_format has a json_schema if its type is "json_schema", and only then.',
                param="response_format",
            )
        return self

    @property
    def wanted(self) -> Schema | None:
        """The answer's schema, if it is JSON."""
        if self.type == "json_object":
            return {"type": "object"}
        return (self.json_schema.schema_ or {}) if self.json_schema is not None else None

    def asked(self) -> Iterator[Asked]:
        """What this asks for, at most one."""
        if self.wanted is not None:
            yield "response_format", "json_schema", compact(self.wanted, "response_format")


class StructuredOutputs(Strict):
    """vLLM's way to say it; exactly one of these."""

    json_: Annotated[SchemaText, Field(alias="json", description="A JSON schema.")] = None
    regex: GuideText | None = None
    choice: Alternatives | None = None
    grammar: Annotated[GuideText | None, Field(description="Lark, as llguidance has it.")] = None
    json_object: bool | None = None

    def asked(self) -> Iterator[Asked]:
        """What this asks for."""
        name = "structured_outputs"
        yield from _asked(name, self.json_, self.regex, self.choice, self.grammar)
        if self.json_object:
            yield name, "json_schema", '{"type":"object"}'


class Guided(Strict):
    """The fields of a request that may ask for structured output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText = None
    guided_regex: GuideText | None = None
    guided_choice: Alternatives | None = None
    guided_grammar: GuideText | None = None

    def asked(self) -> Iterator[Asked]:
        """Each thing that the answer must match."""
        if self.response_format is not None:
            yield from self.response_format.asked()
        yield from self.guided()

    def guided(self) -> Iterator[Asked]:
        """Each of them that a field of vLLM's asks for."""
        if self.structured_outputs is not None:
            yield from self.structured_outputs.asked()
        yield from _asked("guided_json", self.guided_json)
        yield from _asked("guided_regex", regex=self.guided_regex)
        yield from _asked("guided_choice", choice=self.guided_choice)
        yield from _asked("guided_grammar", grammar=self.guided_grammar)


def guide_of(body: Guided) -> Guide | None:
    """What the answer must match, if anything; takes milliseconds, so run it on a thread.

    Raises `BadRequest` that names the field where there is more than one, or none that works.
    """
    asked = list(body.asked())
    if not asked:
        return None
    param, kind, text = asked[0]
    if len(asked) > 1:
        raise BadRequest(
            f"{asked[1][0]} asks for a second form of the answer; send one.", param=asked[1][0]
        )
    return checked(Guide(kind, text), param)


def checked(guide: Guide, param: str) -> Guide:
    """The guide, if llguidance can follow it; else `BadRequest` with its reason."""
    if len(guide.text) > MAX_CHARS:
        raise BadRequest(f"{param} is longer than {MAX_CHARS} characters.", param=param)
    if problem := problem_with(guide):
        reason = " ".join(problem.split())[:MAX_REASON_CHARS].rstrip(".")
        raise BadRequest(f"The answer cannot be held to {param}: {reason}.", param=param)
    return guide


def compact(value: Any, param: str) -> str:
    """JSON without spaces; `BadRequest` for what JSON cannot say."""
    try:
        return _dumps(value)
    except ValueError as error:
        raise BadRequest(f"{param} has what JSON cannot say: {error}.", param=param) from error


def _asked(
    param: str,
    schema: str | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
) -> Iterator[Asked]:
    if schema is not None:
        yield param, "json_schema", schema
    if regex is not None:
        yield param, "regex", regex
    if choice is not None:
        yield param, "grammar", f"start: {' | '.join(map(json.dumps, choice))}"
    if grammar is not None:
        yield param, "grammar", grammar
