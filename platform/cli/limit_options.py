"""The options that set limits: the same words for tenants, keys and adapters.

Knows option names and the API's fields; refuses to know which resource they are of.
"""

from typing import Annotated, Any

import typer

LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrency",
    "tokens_per_day",
    "tokens_per_month",
)
UNLIMITED = "unlimited"


def _limit(text: str) -> int | str:
    if text == UNLIMITED:
        return UNLIMITED
    if not text.isdecimal():
        raise typer.BadParameter(f"{text!r} is neither a number nor '{UNLIMITED}'")
    return int(text)


def limit_option(field: str, what: str) -> Any:
    """An option that takes a number, or the word for none."""
    name = f"--{field.replace('_', '-')}"
    return typer.Option(name, parser=_limit, metavar=f"N|{UNLIMITED}", help=what)


Requests = Annotated[Any, limit_option("requests_per_minute", "Requests in any minute.")]
Tokens = Annotated[Any, limit_option("tokens_per_minute", "Tokens, in and out, in a minute.")]
Concurrency = Annotated[Any, limit_option("max_concurrency", "Requests at the same time.")]
DayTokens = Annotated[Any, limit_option("tokens_per_day", "Tokens, in and out, in a UTC day.")]
MonthTokens = Annotated[Any, limit_option("tokens_per_month", "The same, in a UTC month.")]


def limits_given(*given: Any, fields: tuple[str, ...] = LIMITS) -> dict[str, Any]:
    """Of `fields`, those that were given, as the API takes them: null for no limit."""
    return {
        field: None if value == UNLIMITED else value
        for field, value in zip(fields, given, strict=True)
        if value is not None
    }
