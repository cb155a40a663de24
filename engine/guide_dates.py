"""Dates in a JSON schema that a guide follows: only days that there are.

llguidance's own `date` allows the 29th of February in any year. Which days there are is regular, so
`format` becomes a pattern; years are those from 1000 to 2999. This file knows JSON Schema's
keywords; it refuses to know how a pattern is followed.
"""

from typing import Any, Final

_DAY: Final = (
    r"([12]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|02-(0[1-9]|1\d|2[0-8]))"
    r"|([12]\d(0[48]|[2468][048]|[13579][26])|(12|16|20|24|28)00)-02-29)"
)
_TIME: Final = r"T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
PATTERNS: Final = {"date": f"^{_DAY}$", "date-time": f"^{_DAY}{_TIME}$"}
VALUES: Final = frozenset({"const", "default", "enum", "examples"})  # they hold no schemas
NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def with_real_dates(schema: Any) -> Any:
    """The schema, in which days and times are held to patterns; strings with one are left alone."""
    if isinstance(schema, list):
        return [with_real_dates(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _changed(key, value) for key, value in schema.items()}
    form = changed.get("format")
    if isinstance(form, str) and form in PATTERNS and "pattern" not in changed:
        del changed["format"]
        changed["pattern"] = PATTERNS[form]
    return changed


def _changed(key: str, value: Any) -> Any:
    if key in NAMED and isinstance(value, dict):
        return {name: with_real_dates(each) for name, each in value.items()}
    return value if key in VALUES else with_real_dates(value)
