"""A base's chat template: messages in, one prompt text out, as Transformers renders it.

Templates come with a model, so they run in Jinja2's immutable sandbox with the helpers that
Transformers gives them: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop
controls, `{% generation %}` blocks, and blocks whose line breaks are trimmed. This file refuses to
know tokens and requests.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from loraplex.platform.errors import BadRequest
from loraplex.platform.hermes import OPEN, spell_out
from loraplex.platform.rendering import SPECIAL_TOKENS, Rendering, cut, mark

PROBE_TEXT = "Mind the tools."
PROBE = {"role": "user", "content": "Hello"}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
USUAL = Rendering()
FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """Renders messages (`{"role", "content", …}`, contents of plain text) to a prompt."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """Compile a template, and the one for chats with tools if it is another.

        Raises `jinja2.TemplateSyntaxError`.
        """
        environment = _environment()
        self._template = environment.from_string(source)
        self._tool_template = environment.from_string(
            source if tool_source is None else tool_source
        )
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate | None":
        """The template of a model directory, None if it has none; raises `ValueError` if broken."""
        config = _read_json(model_dir / "tokenizer_config.json")
        sources = _find_sources(model_dir, config)
        if "default" not in sources:
            return None
        try:
            return cls(sources["default"], _special_tokens(config), sources.get("tool_use"))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template in {model_dir} is broken: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        how: Rendering = USUAL,
    ) -> str:
        """The prompt, ready for the assistant's turn or as told; `BadRequest` if that is refused.

        Tools are the template's own matter where it writes calls as `hermes.py` does; else they are
        spelled out in the messages.
        """
        if not self._takes_tools:
            messages, tools = spell_out(messages, tools, system=self._takes_system), ()
        try:
            if how.continues:
                return cut(self._render(mark(messages), tools, how), messages)
            return self._render(messages, tools, how)
        except FAILURES as error:
            raise BadRequest(
                f"This model's chat template refuses these messages: {error}", param="messages"
            ) from error

    @cached_property
    def _takes_tools(self) -> bool:
        try:
            return OPEN in self._render([PROBE], [PROBE_TOOL])
        except FAILURES:
            return False

    @cached_property
    def _takes_system(self) -> bool:
        """Whether a system message's text is in what it renders."""
        try:
            return PROBE_TEXT in self._render([{"role": "system", "content": PROBE_TEXT}, PROBE])
        except FAILURES:
            return False

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        how: Rendering = USUAL,
    ) -> str:
        template = self._tool_template if tools else self._template
        return template.render(
            {
                **how.variables,
                **self._special_tokens,
                "messages": [dict(message) for message in messages],
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": how.begins,
            }
        )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _find_sources(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: the config's, one of which a file of its own may replace."""
    source = config.get("chat_template")
    alone: list[dict[str, Any]] = [{"name": "default", "template": source}]
    named = source if isinstance(source, list) else alone
    sources: dict[str, Any] = {entry["name"]: entry["template"] for entry in named}
    file = model_dir / "chat_template.jinja"
    if file.exists():
        sources["default"] = file.read_text(encoding="utf-8")
    return {name: text for name, text in sources.items() if isinstance(text, str)}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the names templates use; a value is a string or an AddedToken's JSON."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; here it is a no-op."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """The `dict` of a template: builds mappings, and has no attributes that lead elsewhere."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace without underscored names, which lead to the interpreter's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set the attribute {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
