"""Shows the long steps of a start: a spinner on a terminal, plain lines elsewhere, or the log.

Knows titles, lines and seconds; refuses to know what a step does. Everything goes to standard
error, so that standard output holds results only.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

Report = Callable[[str], None]

log = logging.getLogger("loraplex.start")


class Steps:
    """One step at a time, each with the last line that it reported and the time that it took."""

    def __init__(
        self, console: Console | None = None, redact: Callable[[str], str] = lambda line: line
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._redact = redact

    @contextmanager
    def step(self, title: str) -> Iterator[Report]:
        """Show a step while the body runs; the body reports its progress through what it gets."""
        started = time.monotonic()
        with self._spinner(title) if self._console.is_terminal else self._plain(title) as report:
            yield report
        self.say(f"{title}: {time.monotonic() - started:.1f} s")

    def say(self, line: str) -> None:
        """Print one line above whatever step is running."""
        self._console.print(self._redact(line), markup=False)

    @contextmanager
    def _spinner(self, title: str) -> Iterator[Report]:
        with self._console.status(title) as status:
            yield lambda line: status.update(f"{title}: [dim]{escape(self._redact(line))}[/dim]")

    @contextmanager
    def _plain(self, title: str) -> Iterator[Report]:
        self.say(f"{title} …")
        yield lambda line: self.say(f"  {line}")


class LoggedSteps(Steps):
    """The same as records of the log, for a log that machines read."""

    def say(self, line: str) -> None:
        """Log one line."""
        log.info("%s", line.strip())

    @contextmanager
    def step(self, title: str) -> Iterator[Report]:
        """Log what is reported while the body runs, and how long it took."""
        started = time.monotonic()
        yield self.say
        self.say(f"{title}: {time.monotonic() - started:.1f} s")
