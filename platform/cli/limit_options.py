"""The options that set limits: the same words for tenants, keys and adapters.

Knows option names and the API's fields; refuses to know which resource they are of.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

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


LIMITS = {
    field: limit_option(field, what)
    for field, what in {
        "requests_per_minute": "Requests in any minute.",
        "tokens_per_minute": "Tokens, in and out, in a minute.",
        "max_concurrency": "Requests at the same time.",
        "tokens_per_day": "Tokens, in and out, in a UTC day.",
        "tokens_per_month": "The same, in a UTC month.",
    }.items()
}


def takes_limits(
    options: Mapping[str, Any] = LIMITS,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these options, by the API's fields, in the place of its parameter `limits`.

    The function gets those that were given as the API takes them: null for no limit.
    """

    def widened(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(*args: Any, **given: Any) -> Any:
            asked = {field: given.pop(field) for field in options}
            limits = {
                field: None if value == UNLIMITED else value
                for field, value in asked.items()
                if value is not None
            }
            return function(*args, **given, limits=limits)

        command.__signature__ = _widened(inspect.signature(function), options)  # type: ignore[attr-defined]
        return command

    return widened


def _widened(signature: inspect.Signature, options: Mapping[str, Any]) -> inspect.Signature:
    kind = inspect.Parameter.KEYWORD_ONLY
    widened: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name == "limits":
            widened += (
                inspect.Parameter(field, kind, default=None, annotation=Annotated[Any, option])
                for field, option in options.items()
            )
        else:
            widened.append(parameter.replace(kind=kind))
    return signature.replace(parameters=widened)
