"""The demo tenant's and the operator's keys, kept beside the data so that a restart keeps them.

Knows one small file, readable by its owner only; refuses to know how keys are made or checked.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "credentials.json"


@dataclass(frozen=True)
class Credentials:
    """Where the platform answers, and the two keys that its first start made."""

    url: str  # "http://127.0.0.1:8000", without a path
    tenant_id: str  # the demo tenant's
    api_key: str  # the demo tenant's
    operator_key: str

    def __repr__(self) -> str:
        return f"Credentials(url={self.url!r}, tenant_id={self.tenant_id!r})"


def read(data_dir: Path) -> Credentials | None:
    """Return what an earlier start left, or None where the file is absent or damaged."""
    try:
        return Credentials(**json.loads((data_dir / FILE_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write(data_dir: Path, credentials: Credentials) -> None:
    """Replace the file at once, readable and writable by its owner only."""
    part = data_dir / f"{FILE_NAME}.{os.getpid()}"
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(credentials), file, indent=2)
    part.replace(data_dir / FILE_NAME)
