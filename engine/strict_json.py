"""JSON from strangers: one object, no duplicate keys, no NaN, no bombs.

This file knows JSON. It refuses to know what the object means.
"""

import json
from typing import Any, NoReturn


class JsonError(ValueError):
    """The text is not one strict JSON object; the message says why, without a full stop."""


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse one JSON object; raises `JsonError`.

    Python's parser takes the last of duplicate keys and accepts NaN; here both are errors, as are
    nesting that exhausts the stack and integers too long to convert.
    """
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except JsonError:
        raise
    except RecursionError as error:
        raise JsonError("it is nested too deeply") from error
    except ValueError as error:
        raise JsonError(f"it cannot be parsed: {error}") from error
    if not isinstance(value, dict):
        raise JsonError("it is not an object")
    return value


def is_int(value: object) -> bool:
    """Whether a parsed value is an integer; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise JsonError(f"it has the key {key[:80]!r} twice")
        value[key] = item
    return value


def _no_constant(name: str) -> NoReturn:
    raise JsonError(f"it holds {name}, which JSON has not")
