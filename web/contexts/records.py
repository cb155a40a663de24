"""Usage, the audit log, users, and the system's own state."""

from dataclasses import dataclass, field
from datetime import date, datetime
from typing import ClassVar

from loraplex.web.contexts.shell import Badge, Choice, Page, Pager


@dataclass(frozen=True)
class UsageRow:
    """Sums over one group."""

    group: tuple[str, ...]
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Span:
    """Days that are often asked for."""

    label: str
    href: str
    current: bool


@dataclass(frozen=True)
class UsagePage(Page):
    """Totals over the days from `since` to `until`."""

    template: ClassVar[str] = "admin/usage.html"

    since: date
    until: date
    groups: tuple[Choice, ...]
    headings: tuple[str, ...]
    rows: tuple[UsageRow, ...]
    total: UsageRow
    days: tuple[tuple[date, int], ...]  # tokens of each, for a chart; none for one day or many
    spans: tuple[Span, ...]
    csv: str
    tenants: tuple[Choice, ...] = ()  # that an operator may look at


@dataclass(frozen=True)
class AuditRow:
    """One change."""

    at: datetime
    who: str
    action: str
    target: str
    same: str  # address of all changes of the target
    details: str
    tenant: str | None


@dataclass(frozen=True)
class AuditPage(Page):
    """Changes, the newest first."""

    template: ClassVar[str] = "admin/audit.html"

    action: str
    target: str
    rows: tuple[AuditRow, ...]
    pager: Pager
    csv: str


@dataclass(frozen=True)
class UserRow:
    """Who may sign in."""

    name: str
    role: str
    tenant: str | None
    state: Badge
    disabled: bool
    signed_in_at: datetime | None
    act: str
    is_self: bool


@dataclass(frozen=True)
class UsersPage(Page):
    """The users, and the form for a new one."""

    template: ClassVar[str] = "admin/users.html"

    rows: tuple[UserRow, ...]
    roles: tuple[Choice, ...]
    url: str  # where they sign in
    act: str
    pager: Pager
    name: str = ""
    tenant: str = ""
    wrong: dict[str, str] = field(default_factory=dict)  # by field
    invitation: tuple[str, str] | None = None  # for whom, and the code, this once


@dataclass(frozen=True)
class PartRow:
    """A part of the system and how it is."""

    name: str
    state: Badge
    detail: str


@dataclass(frozen=True)
class SystemPage(Page):
    """Engines, stores, and the settings in force."""

    template: ClassVar[str] = "admin/system.html"

    health: tuple[PartRow, ...]
    engine: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str, str], ...]  # variable, value, meaning
