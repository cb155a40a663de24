"""Adapters: the list, and one adapter with its versions, aliases and users."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from loraplex.web.contexts.shell import Badge, Choice, Page, Pager


@dataclass(frozen=True)
class AdapterRow:
    """One line of the list."""

    name: str
    href: str
    owner: str | None  # shown to operators, and of shared adapters
    version: int | None  # None: all are retired
    rank: int | None
    bytes: int | None
    aliases: tuple[str, ...]
    residency: Badge
    visibility: str
    created_at: datetime


@dataclass(frozen=True)
class AdaptersPage(Page):
    """The list of adapters that match `query`."""

    template: ClassVar[str] = "admin/adapters.html"

    query: str
    rows: tuple[AdapterRow, ...]
    pager: Pager
    upload: str | None  # where to upload; None for those who may not
    list: str  # the address of this list
    tenants: tuple[Choice, ...] = ()  # that an operator may look at


@dataclass(frozen=True)
class AdapterRows(AdaptersPage):
    """The lines alone, for a search while typing."""

    template: ClassVar[str] = "admin/adapter_rows.html"


@dataclass(frozen=True)
class VersionRow:
    """One version of an adapter."""

    number: int
    digest: str
    rank: int
    bytes: int
    dtype: str
    modules: str
    aliases: tuple[str, ...]
    state: Badge
    residency: Badge
    created_at: datetime
    retired: bool
    is_current: bool  # what the bare name means


@dataclass(frozen=True)
class Move:
    """One move of an alias."""

    revision: int
    to: str
    by: str
    at: datetime


@dataclass(frozen=True)
class AliasView:
    """An alias, where it is, and how it came there."""

    name: str
    revision: int
    version: int
    canary: int | None
    percent: float | None
    moves: tuple[Move, ...]
    can_roll_back: bool
    error: str | None = None


@dataclass(frozen=True)
class UseRow:
    """What a caller used of an adapter."""

    who: str
    requests: int
    tokens: int


@dataclass(frozen=True)
class AdapterPage(Page):
    """One adapter. `act` is the address that its forms are posted below."""

    template: ClassVar[str] = "admin/adapter.html"

    name: str
    owner: str | None
    act: str
    description: str
    visibility: tuple[Choice, ...]
    shared_with: str
    versions: tuple[VersionRow, ...]
    aliases: tuple[AliasView, ...]
    uses: tuple[UseRow, ...]
    playground: str
    upload: str
    new_key: str
    model: str
    curl: str
    can_write: bool
    new_alias: str = ""
    alias_error: str | None = None
    wrong: dict[str, str] = field(default_factory=dict)
