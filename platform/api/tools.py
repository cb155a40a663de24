"""Tools in a chat's body: their shape, and the form that an answer must have where one is forced.

Answers are read by `tool_calls.py`; how tools are told to the model is the template's matter. This
file refuses to know templates and tokens.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from loraplex.engine.protocol import Guide
from loraplex.platform.api.call_grammar import calls_or_json, calls_or_text, only_calls
from loraplex.platform.api.strict import Strict
from loraplex.platform.api.structured import checked, compact
from loraplex.platform.errors import BadRequest

MAX_TOOLS: Final = 128
MAX_TOOLS_CHARS: Final = 65_536
NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

NotRead = Annotated[
    Any, Field(exclude=True, description="OpenAI's SDK adds it to answers; it is not read.")
]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Strict):
    """A function that the model may call; without `parameters` it takes none."""

    name: ToolName
    description: Annotated[str | None, Field(max_length=16_384)] = None
    parameters: Annotated[
        dict[str, Any] | None, Field(description="A JSON schema of type object.")
    ] = None
    strict: Annotated[
        bool | None,
        Field(description="Changes nothing: a forced call has its schema, a free one has none."),
    ] = None

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise ValueError("a function's parameters are a schema of type object")
        return value


class Tool(Strict):
    """OpenAI's wrapping of a function."""

    type: Literal["function"]
    function: Function

    def told(self) -> dict[str, Any]:
        """What the model is told: the caller's words, without nulls and flags."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": NO_PARAMETERS} | function}


@dataclass(frozen=True)
class Chosen:
    """A `tool_choice` by names: no other tools are called, and one of these if it `must` be.

    `once` means that the answer ends with its first call.
    """

    names: frozenset[str]
    must: bool
    once: bool = False


def _as_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function"}:
            return Chosen(frozenset([_as_name(value)]), must=True, once=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_, *_] as tools}}:
            if mode in ("auto", "required"):
                return Chosen(frozenset(map(_as_name, tools)), must=mode == "required")
    raise ValueError(
        'it is "none", "auto", "required", {"type": "function", "function": {"name": a name}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": at '
        "least one function, each as above}}"
    )


def _as_name(value: Any) -> str:
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise ValueError('a function is chosen by {"type": "function", "function": {"name": a name}}')


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_WORDS = {"type": "string", "enum": ["none", "auto", "required"]}
_FUNCTION = _object(type={"const": "function"}, function=_object(name={"type": "string"}))
_ALLOWED = _object(
    type={"const": "allowed_tools"},
    allowed_tools=_object(
        mode={"type": "string", "enum": ["auto", "required"]},
        tools={"type": "array", "items": _FUNCTION, "minItems": 1},
    ),
)
ToolChoice = Annotated[
    Any,
    BeforeValidator(_as_choice),
    WithJsonSchema({"anyOf": [_WORDS, _FUNCTION, _ALLOWED, {"type": "null"}]}),
]


def _parse_arguments(value: Any) -> Any:
    """The object that a past call's `arguments`, a string, spells."""
    if not isinstance(value, str):
        raise ValueError("arguments are a string that holds a JSON object")
    try:
        parsed = json.loads(value or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("arguments are a string that holds a JSON object")
    return parsed


class PastFunction(Strict):
    """What was called."""

    name: ToolName
    arguments: Annotated[
        dict[str, Any], BeforeValidator(_parse_arguments), WithJsonSchema({"type": "string"})
    ]
    parsed_arguments: NotRead = None


class PastCall(Strict):
    """A call in the conversation so far."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: PastFunction
    index: NotRead = None


class Tooled(Strict):
    """The fields of a chat that concern tools."""

    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Annotated[
        ToolChoice, Field(description="Without it: auto where there are tools.")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="False: the answer ends with its first call.")
    ] = None

    @field_validator("tools")
    @classmethod
    def _differ(cls, tools: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have one name")
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _choose_among_tools(cls, choice: Any, info: ValidationInfo) -> Any:
        names = {tool.function.name for tool in info.data.get("tools") or ()}
        if choice == "required" and not names:
            raise ValueError("there are no tools to choose from")
        if isinstance(choice, Chosen) and (unknown := sorted(choice.names - names)):
            raise ValueError(f"{unknown[0][:64]!r} is none of the tools")
        return choice

    @property
    def told_tools(self) -> list[Tool]:
        """The tools that the model is told of: all of them, or none."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """Those of them that the answer may call."""
        choice = self.tool_choice
        if not isinstance(choice, Chosen):
            return self.told_tools
        return [tool for tool in self.told_tools if tool.function.name in choice.names]

    @property
    def one_call(self) -> bool:
        """Whether the answer ends with its first call."""
        once = isinstance(self.tool_choice, Chosen) and self.tool_choice.once
        return once or self.parallel_tool_calls is False

    @property
    def must_call(self) -> bool:
        """Whether the answer has a call."""
        choice = self.tool_choice
        return choice.must if isinstance(choice, Chosen) else choice == "required"


def told(body: Tooled) -> list[dict[str, Any]]:
    """The tools as the model is told of them; raises `BadRequest` where they are too long."""
    tools = [tool.told() for tool in body.told_tools]
    if len(compact(tools, "tools")) > MAX_TOOLS_CHARS:
        raise BadRequest(f"The tools are longer than {MAX_TOOLS_CHARS} characters.", param="tools")
    return tools


def held(body: Tooled, schema: dict[str, Any] | None) -> Guide | None:
    """The form of an answer that is not free to call any tools; None if it is, or may call none.

    Calls have their functions' schemas. `schema` is that of an answer without a call, if it has
    one. Raises `BadRequest` where llguidance cannot follow them. Takes milliseconds: for a thread.
    """
    functions = [tool.function for tool in body.callable_tools]
    is_free = schema is None and len(functions) == len(body.told_tools)
    if not functions or (is_free and not body.must_call):
        return None
    schemas = {each.name: each.parameters or NO_PARAMETERS for each in functions}
    if body.must_call:
        grammar = only_calls(schemas, one=body.one_call)
    elif schema is not None:
        grammar = calls_or_json(schemas, schema, one=body.one_call)
    else:
        grammar = calls_or_text(schemas, one=body.one_call)
    return checked(Guide("grammar", grammar), "tools")
