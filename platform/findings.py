"""One thing that `loraplex doctor` looked at, how it is, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One look: `mend` says what to do where it is not ok."""

    what: str
    state: State
    found: str
    mend: str = ""
