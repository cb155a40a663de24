"""API keys: the list, the form for a new one, and a secret that is shown once."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from loraplex.web.contexts.shell import Badge, Choice, Page, Pager


@dataclass(frozen=True)
class KeyRow:
    """One line of the list."""

    id: str
    name: str
    redacted: str
    scopes: tuple[str, ...]  # in words
    adapters: str  # "all", or their names
    state: Badge
    ends_at: datetime | None
    last_used_at: datetime | None
    act: str
    mark: str  # of the tenant that an operator looks at, for addresses
    is_live: bool


@dataclass(frozen=True)
class KeysPage(Page):
    """The list, and the form for a new key."""

    template: ClassVar[str] = "admin/keys.html"

    rows: tuple[KeyRow, ...]
    pager: Pager
    scopes: tuple[Choice, ...]
    overlaps: tuple[Choice, ...]
    can_write: bool
    act: str
    name: str = ""
    adapters: str = ""
    days: str = ""
    tenants: tuple[Choice, ...] = ()
    wrong: dict[str, str] = field(default_factory=dict)  # by field


@dataclass(frozen=True)
class KeyMadePage(Page):
    """A secret, this once."""

    template: ClassVar[str] = "admin/key_made.html"

    name: str
    secret: str
    curl: str | None  # None: it may not call models
    back: str
    usage: str
    missing: tuple[str, ...]  # of its adapters, those that its tenant does not have
    old_ends_at: datetime | None = None  # of the key that it replaces
