"""Twenty JSON schemas whose texts end: strings, arrays and numbers have bounds.

They hold nested objects, arrays, enums, constants, patterns, formats, anyOf and references. Each is
named by what a user would ask for.
"""

from typing import Any

Schema = dict[str, Any]


def _object(properties: Schema, *optional: str, **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


def _array(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _text(most: int = 24, least: int = 0) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": most}


def _integer(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _pattern(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


BOOLEAN: Schema = {"type": "boolean"}
POINT = _object({"x": _integer(-100, 100), "y": _integer(-100, 100)})
PERSON = _object({"name": _text(least=1), "age": _integer(0, 120)})

SCHEMAS: dict[str, Schema] = {
    "a person": PERSON,
    "whether it will rain": BOOLEAN,
    "a mood": {"enum": ["happy", "sad", "angry", "calm", None]},
    "three lottery numbers": _array(_integer(1, 49), 3, 3),
    "a shopping list": _array(_object({"item": _text(16, 1), "count": _integer(1, 12)}), 1, 4),
    "a book": _object(
        {"title": _text(40, 1), "year": _integer(1450, 2030), "tags": _array(_text(10), 0, 3)}
    ),
    "a phone number": _pattern(r"^\+[0-9]{2} [0-9]{3}-[0-9]{4}$"),
    "a serial number": _object({"serial": _pattern("^[A-Z]{3}-[0-9]{4}$"), "sold": BOOLEAN}),
    "a date and a time": _object(
        {
            "date": {"type": "string", "format": "date"},
            "time": _pattern("^([01][0-9]|2[0-3]):[0-5][0-9]$"),
        }
    ),
    "an answer or an error": {
        "anyOf": [
            _object({"ok": {"const": True}, "answer": _text(30)}),
            _object({"ok": {"const": False}, "error": _integer(400, 599)}),
        ]
    },
    "a value of any kind": {"anyOf": [_integer(0, 999), _text(12), {"type": "null"}, BOOLEAN]},
    "a line from one point to another": {
        "$defs": {"point": POINT},
        **_object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "a family": {
        "$defs": {"person": PERSON},
        **_object(
            {
                "parents": _array({"$ref": "#/$defs/person"}, 1, 2),
                "children": _array({"$ref": "#/$defs/person"}, 0, 2),
            }
        ),
    },
    "an address": _object(
        {
            "street": _text(least=1),
            "city": _object({"name": _text(16), "zip": _pattern("^[0-9]{5}$")}),
            "country": {"enum": ["DE", "FR", "JP", "US"]},
        }
    ),
    "a setting, its unit if it has one": _object(
        {"key": _pattern("^[a-z_]{1,12}$"), "value": _integer(0, 4096), "unit": _text(4)}, "unit"
    ),
    "a matrix of two by two": _array(_array(_integer(-9, 9), 2, 2), 2, 2),
    "a chess move": _object(
        {"piece": {"enum": ["K", "Q", "R", "B", "N", "P"]}, "to": _pattern("^[a-h][1-8]$")}
    ),
    "an order with its price": _object(
        {
            "id": {"type": "string", "format": "uuid"},
            "cents": {"type": "integer", "exclusiveMinimum": 0, "maximum": 100000},
            "tax": {"enum": [0, 0.07, 0.19]},
        }
    ),
    "a call of a tool": {
        "anyOf": [
            _object({"tool": {"const": "search"}, "query": _text(30, 1)}),
            _object({"tool": {"const": "add"}, "a": _integer(0, 99), "b": _integer(0, 99)}),
        ]
    },
    "a deep box": _object({"box": _object({"box": _object({"box": _object({"ball": BOOLEAN})})})}),
}
