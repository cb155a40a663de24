"""Tools in a chat's body: their shape, and the form that an answer must have where one is forced.

Answers are read by `tool_calls.py`; how tools are told to the model is the template's matter. This
file refuses to know templates and tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator

from loraplex.engine.protocol import Guide
from loraplex.platform.api.strict import Strict
from loraplex.platform.api.structured import checked, compact
from loraplex.platform.errors import BadRequest
from loraplex.platform.hermes import CLOSE, OPEN

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
class OneTool:
    """A `tool_choice` that forces the function of this name."""

    name: str


def _as_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return OneTool(name)
    raise ValueError(
        'it is "none", "auto", "required" or {"type": "function", "function": {"name": a name}}'
    )


_WORDS = {"type": "string", "enum": ["none", "auto", "required"]}
_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
ToolChoice = Annotated[
    Any,
    BeforeValidator(_as_choice),
    WithJsonSchema({"anyOf": [_WORDS, _FUNCTION, {"type": "null"}]}),
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
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if choice == "required" and not names:
            raise ValueError("there are no tools to choose from")
        if isinstance(choice, OneTool) and choice.name not in names:
            raise ValueError("it names none of the tools")
        return choice

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model is told of: all of them, or none."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def one_call(self) -> bool:
        """Whether the answer ends with its first call."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, OneTool)


def told(body: Tooled) -> list[dict[str, Any]]:
    """The tools as the model is told of them; raises `BadRequest` where they are too long."""
    tools = [tool.told() for tool in body.callable_tools]
    if len(compact(tools, "tools")) > MAX_TOOLS_CHARS:
        raise BadRequest(f"The tools are longer than {MAX_TOOLS_CHARS} characters.", param="tools")
    return tools


def forced(body: Tooled) -> Guide | None:
    """The form of an answer that must call: one or more calls, each with its function's schema.

    Raises `BadRequest` where llguidance cannot follow a schema. Takes milliseconds: for a thread.
    """
    choice = body.tool_choice
    functions = [tool.function for tool in body.tools or ()]
    if isinstance(choice, OneTool):
        functions = [function for function in functions if function.name == choice.name]
    elif choice != "required":
        return None
    return checked(Guide("grammar", _calls(functions, one=body.one_call)), "tools")


def _calls(functions: Sequence[Function], *, one: bool) -> str:
    """A Lark grammar of calls in their tags, as `hermes.py` writes them."""
    more = "" if one else ' ("\\n" call)*'
    bodies = " | ".join(f"f{i}" for i in range(len(functions)))
    lines = [
        f"start: call{more}",
        f"call: {json.dumps(OPEN + chr(10))} ({bodies}) {json.dumps(chr(10) + CLOSE)}",
    ]
    for i, function in enumerate(functions):
        head = json.dumps(f'{{"name": "{function.name}", "arguments": ')
        schema = {"type": "object"} | (function.parameters or NO_PARAMETERS)
        lines.append(f'f{i}: {head} %json {compact(schema, "tools")} "}}"')
    return "\n".join(lines)
