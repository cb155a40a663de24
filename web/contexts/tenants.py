"""Tenants: the list, and one with its limits and what it uses of them."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from loraplex.web.contexts.shell import Badge, Page, Pager


@dataclass(frozen=True)
class TenantRow:
    """One line of the list."""

    name: str
    href: str
    state: Badge
    running: int
    waiting: int
    tokens_today: int
    created_at: datetime


@dataclass(frozen=True)
class TenantsPage(Page):
    """The list of tenants whose names begin with `query`."""

    template: ClassVar[str] = "admin/tenants.html"

    query: str
    rows: tuple[TenantRow, ...]
    pager: Pager
    new_name: str = ""
    error: str | None = None


@dataclass(frozen=True)
class LimitField:
    """A limit in a form, and how much of it is used; None where that is not counted."""

    name: str
    label: str
    hint: str
    value: str
    used: str | None = None
    share: float | None = None  # 0 to 1
    error: str | None = None


@dataclass(frozen=True)
class TenantPage(Page):
    """One tenant."""

    template: ClassVar[str] = "admin/tenant.html"

    id: str
    name: str
    act: str
    state: Badge
    suspended: bool
    limits: tuple[LimitField, ...]
    facts: tuple[tuple[str, str], ...]
    refusals: tuple[tuple[datetime, str, str], ...]  # when, which request, and the sentence
    adapters: str
    keys: str
    usage: str
    can_write: bool
    wrong: dict[str, str] = field(default_factory=dict)
