"""The fields of a response's body that have shapes of their own: tools, text, what streams carry.

Each says itself as a chat has it (`said`), and as an answer repeats it (`told`). Refuses to know
the rest of a body.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from loraplex.platform.api.responses_items import without_nulls
from loraplex.platform.api.strict import Strict
from loraplex.platform.api.structured import JsonSchema
from loraplex.platform.api.tools import MAX_TOOLS, Function


def _is_function(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise ValueError(
            "the server runs no tools; describe one of yours with the type function, or leave it "
            "out"
        )
    return without_nulls(value)


class FunctionTool(Function):
    """A function that the model may call and the caller runs."""

    type: Literal["function"]
    allowed_callers: Annotated[list[Literal["direct"]] | None, Field(max_length=1)] = None
    defer_loading: Literal[False] | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None

    def told(self) -> dict[str, Any]:
        """The tool, as an answer repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }

    def said(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        function = {key: value for key, value in self.told().items() if key != "type"}
        return {"type": "function", "function": function}


def _as_choice(value: Any) -> Any:
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function"}:
            return _as_named(value)
        case {"type": "allowed_tools", "mode": mode, "tools": [_, *_] as tools}:
            if mode in ("auto", "required"):
                named = [_as_named(tool) for tool in tools]
                return {"type": "allowed_tools", "mode": mode, "tools": named}
    raise ValueError(
        'it is "none", "auto", "required", {"type": "function", "name": a name} or {"type": '
        '"allowed_tools", "mode": "auto" or "required", "tools": at least one function, each as '
        "above}"
    )


def _as_named(value: Any) -> dict[str, str]:
    match value:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "name": name}
    raise ValueError('a function is chosen by {"type": "function", "name": a name}')


def said_choice(choice: Any) -> Any:
    """A `tool_choice` as a chat has it."""
    match choice:
        case {"mode": mode, "tools": tools}:
            allowed = {"mode": mode, "tools": [said_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case {"name": name}:
            return {"type": "function", "function": {"name": name}}
    return choice


_FUNCTION: Final = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_ALLOWED: Final = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"type": "string", "enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _FUNCTION, "minItems": 1},
    },
    "required": ["type", "mode", "tools"],
}
_WORDS: Final = {"type": "string", "enum": ["none", "auto", "required"]}
_CHOICES: Final = {"anyOf": [_WORDS, _FUNCTION, _ALLOWED, {"type": "null"}]}


Tools = Annotated[
    list[Annotated[FunctionTool, BeforeValidator(_is_function)]], Field(max_length=MAX_TOOLS)
]
ToolChoice = Annotated[
    Any,
    BeforeValidator(_as_choice),
    WithJsonSchema(_CHOICES),
    Field(description="Without it: auto."),
]


class PlainFormat(Strict):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]

    def told(self) -> dict[str, Any]:
        """The form, as an answer repeats it."""
        return {"type": self.type}

    said = told


class SchemaFormat(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]

    def told(self) -> dict[str, Any]:
        """The form, as an answer repeats it."""
        return {"type": self.type} | self._schema()

    def said(self) -> dict[str, Any]:
        """The form as a chat's `response_format`."""
        return {"type": self.type, "json_schema": self._schema()}

    def _schema(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "description": self.description,
            "schema": self.schema_ or {},
            "strict": self.strict,
        }


class TextConfig(Strict):
    """How the text of the answer is."""

    format: Annotated[PlainFormat | SchemaFormat | None, Field(discriminator="type")] = None
    verbosity: Annotated[
        Literal["medium"] | None, Field(description="For another, ask in the instructions.")
    ] = None


class Streaming(Strict):
    """What a stream carries besides text."""

    include_obfuscation: Annotated[
        bool | None, Field(description="Changes nothing: events are as long as their text.")
    ] = None


class CacheOptions(Strict):
    """How prompts are cached; changes nothing, since every prefix is."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: Annotated[
        Literal[False] | None, Field(description="To warm a prefix, ask for one token.")
    ] = None
