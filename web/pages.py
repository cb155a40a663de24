"""The pages that people see: typed contexts in, HTML out.

Knows templates and what each one needs; refuses to know where the facts come from. Every value is
escaped, and a template that names what its context lacks fails.
"""

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

ROOM = Path(__file__).parent
STATIC = ROOM / "static"


@dataclass(frozen=True)
class Welcome:
    """What the first page tells a newcomer."""

    version: str
    base: str
    url: str  # of the API, without a slash at its end
    context_tokens: int
    engine: str | None  # the device it runs on; None while it starts


def render_welcome(page: Welcome) -> str:
    """The page at `/`."""
    return _environment().get_template("welcome.html").render(asdict(page))


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(ROOM / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
