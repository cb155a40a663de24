"""The grammar of an answer that calls functions, as Lark of llguidance's; `hermes.py` has the tags.

Knows functions' names and JSON schemas; refuses to know bodies, and who must call what.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from loraplex.engine.protocol import WHITESPACE
from loraplex.platform.api.structured import compact
from loraplex.platform.hermes import CLOSE, OPEN

Schema = dict[str, Any]
OPENED: Final = json.dumps(OPEN)
CLOSED: Final = json.dumps(f"\n{CLOSE}")


def only_calls(functions: Mapping[str, Schema], *, one: bool) -> str:
    """One call, or at least one where `one` is false, and nothing else."""
    return _grammar(f"start: {_calls(OPENED, one=one)}", functions)


def calls_or_json(functions: Mapping[str, Schema], schema: Schema, *, one: bool) -> str:
    """Calls, or JSON of this schema."""
    start = f"start: {_calls(OPENED, one=one)} | answer"
    return _grammar(f"{start}\nanswer: {_json(schema, 'response_format')}", functions)


def calls_or_text(functions: Mapping[str, Schema], *, one: bool) -> str:
    """Text, calls, or text and then calls.

    The first tag begins a call, whatever the text before it: a lazy terminal ends where it can.
    """
    start = f"start: (TEXT | {_calls('open', one=one)})?"
    return _grammar(f"{start}\nopen[lazy]: TEXT {OPENED}\nTEXT: /(.|\\n)*/", functions)


def _calls(first: str, *, one: bool) -> str:
    return f"{first} call" if one else f'{first} call ("\\n" {OPENED} call)*'


def _grammar(start: str, functions: Mapping[str, Schema]) -> str:
    bodies = " | ".join(f"f{i}" for i in range(len(functions)))
    lines = [start, f'call: "\\n" ({bodies}) {CLOSED}']
    for i, (name, schema) in enumerate(functions.items()):
        head = json.dumps(f'{{"name": "{name}", "arguments": ')
        lines.append(f'f{i}: {head} {_json({"type": "object"} | schema, "tools")} "}}"')
    return "\n".join(lines)


def _json(schema: Schema, param: str) -> str:
    spaced = schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return f"%json {compact(spaced, param)}"
