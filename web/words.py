"""Numbers and moments as people read them."""

import re
from datetime import UTC, datetime
from typing import Final

from markupsafe import Markup, escape

_CODE: Final = re.compile(r"`([^`]*)`")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def of_bytes(number: int) -> str:
    """`1.2 GiB`; whole below a KiB."""
    value, unit = float(number), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[0]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def of_count(number: float) -> str:
    """`12,345`; a fraction keeps one place."""
    whole = float(number).is_integer()
    return f"{number:,.0f}" if whole else f"{number:,.1f}"


def of_seconds(seconds: float) -> str:
    """`3 ms`, `4.2 s`, `2 min 5 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def of_moment(moment: datetime) -> str:
    """`2026-11-30 04:05 UTC`; a script of the page turns it into the reader's zone."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def marked(text: str) -> Markup:
    """Text with what stands in backticks as code; all else is escaped."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped)
