"""How the engine's process logs: one line a record, to stderr, tracebacks folded into it.

Records carry request ids and digests; never tokens, which are a tenant's words.
"""

import json
import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO engine.core a message traceback="…"`, newlines escaped."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        seconds = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        name = record.name.removeprefix("loraplex.")
        line = f"{seconds}.{record.msecs:03.0f}Z {record.levelname} {name} {record.getMessage()}"
        if record.exc_info:
            line += f" traceback={json.dumps(self.formatException(record.exc_info))}"
        return line.replace("\n", "\\n")


def configure() -> None:
    """Send this process's records, from INFO up, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
