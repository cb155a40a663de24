"""The pages that people see: typed contexts in, HTML out.

Knows templates and what each one needs; refuses to know where the facts come from. Every value is
escaped, and a template that names what its context lacks fails.
"""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import ClassVar, Protocol

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loraplex.web import words

ROOM = Path(__file__).parent
STATIC = ROOM / "static"


class Context(Protocol):
    """A frozen dataclass that names its template."""

    template: ClassVar[str]


@dataclass(frozen=True)
class Welcome:
    """What the first page tells a newcomer."""

    template: ClassVar[str] = "welcome.html"

    version: str
    base: str
    url: str  # of the API, without a slash at its end
    context_tokens: int
    engine: str | None  # the device it runs on; None while it starts


def render(page: Context) -> str:
    """The HTML of a page."""
    values = {each.name: getattr(page, each.name) for each in fields(page)}  # type: ignore[arg-type]
    return _environment().get_template(page.template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(ROOM / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(
        bytes=words.of_bytes,
        count=words.of_count,
        seconds=words.of_seconds,
        moment=words.of_moment,
        marked=words.marked,
    )
    return environment
