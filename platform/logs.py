"""Log records as lines, in text or JSON: each with its request's id, none with a secret.

What belongs to the request in hand (its id, its caller, how it ended) is kept in a context
variable, so that every record made for it carries the id, and its access line all of it. Knows
records and streams; refuses to know routes and what the facts mean.
"""

import logging
import re
import sys
import time
import traceback
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TextIO

import msgspec

from loraplex.platform.redaction import Redactor

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
CHATTY: Final = ("alembic", "httpx", "httpcore", "uvicorn", "asyncio", "opentelemetry")
ENGINE_LINE: Final = re.compile(r"\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+) (.*)")

IN_MESSAGE: Final = frozenset({"method", "route", "status"})  # of an access line

access = logging.getLogger("loraplex.access")


@dataclass
class Facts:
    """What is known of one HTTP request so far; `rest` is what its route notes of it."""

    request_id: str
    tenant_id: str | None = None
    key_id: str | None = None
    rest: dict[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """All that is known, by name."""
        named = {
            "request_id": self.request_id,
            "tenant_id": self.tenant_id,
            "key_id": self.key_id,
        }
        return {name: value for name, value in named.items() if value is not None} | self.rest


_current: ContextVar[Facts | None] = ContextVar("request", default=None)


def begin_request(request_id: str) -> Facts:
    """Make the facts of a request; records of this task and of its children carry its id."""
    facts = Facts(request_id)
    _current.set(facts)
    return facts


def note_caller(tenant_id: str | None, key_id: str) -> None:
    """Note who makes the request in hand."""
    if (facts := _current.get()) is not None:
        facts.tenant_id, facts.key_id = tenant_id, key_id


def note(**facts: Any) -> None:
    """Note more of the request in hand, plain JSON values, for its access line."""
    if (current := _current.get()) is not None:
        current.rest.update(facts)


class Redaction(logging.Filter):
    """Finishes each record and takes the secrets out: of message, traceback, stack and fields."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redact = redactor

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through, redacted."""
        record.msg, record.fields = self._cleaned(_message(record), _fields(record))
        record.args = ()
        if record.exc_info and not record.exc_text:
            record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        if record.exc_text:
            record.exc_text = self._redact(record.exc_text)
        if record.stack_info:
            record.stack_info = self._redact(record.stack_info)
        return True

    def _cleaned(self, message: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Look once through all texts, since there is hardly ever a secret in one."""
        texts = {name: value for name, value in fields.items() if isinstance(value, str)}
        together = "\n".join((message, *texts.values()))
        if self._redact(together) == together:
            return message, fields
        clean = {name: self._redact(text) for name, text in texts.items()}
        return self._redact(message), fields | clean


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # else the logging package would print the record, secrets and all
        return f"{record.msg!r} could not be formatted with what it was given"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    current = _current.get()
    known = {} if current is None else {"request_id": current.request_id}
    return known | getattr(record, "fields", {})


class TextFormatter(logging.Formatter):
    """For people: time, level, logger, message, then the fields that it lacks as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without a traceback."""
        line, fields = super().formatMessage(record), getattr(record, "fields", {})
        return " ".join([line, *(f"{k}={v}" for k, v in fields.items() if k not in IN_MESSAGE)])


class JsonFormatter(logging.Formatter):
    """For machines: one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; `time` is UTC, ISO 8601 with milliseconds."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_text:
            line["exception"] = record.exc_text
        if record.stack_info:
            line["stack"] = record.stack_info
        return msgspec.json.encode(line, enc_hook=str).decode()


def handler_of(form: LogFormat, redactor: Redactor, stream: TextIO) -> logging.Handler:
    """A handler that writes lines of this form, redacted."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(Redaction(redactor))
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    return handler


def configure(form: LogFormat, level: LogLevel, redactor: Redactor) -> None:
    """Send all records, and warnings, to standard error in this form; nothing goes elsewhere."""
    _leave_out_what_no_line_has()
    root = logging.getLogger()
    root.handlers[:] = [handler_of(form, redactor, sys.stderr)]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name in CHATTY:
        logging.getLogger(name).setLevel("DEBUG" if level == "debug" else "WARNING")


def _leave_out_what_no_line_has() -> None:
    """The caller's frame, thread, process and task, as Python's logging HOWTO says to do it."""
    for name in ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks"):
        setattr(logging, name, None)


def relay(line: str) -> None:
    """Log a line of the engine's own log under its own logger and level."""
    if found := ENGINE_LINE.fullmatch(line):
        level, name, message = found.groups()
        logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", message)
    else:
        logging.getLogger("loraplex.engine").info("%s", line)
