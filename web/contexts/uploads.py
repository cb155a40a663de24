"""Uploads: the form, and one upload with its checks as they pass."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal

from loraplex.web.contexts.shell import Badge, Choice, Page

Mark = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class UploadRow:
    """One line of the latest uploads."""

    name: str
    href: str
    state: Badge
    created_at: datetime


@dataclass(frozen=True)
class UploadPage(Page):
    """The form. `jobs` is the address that the browser uploads in parts to."""

    template: ClassVar[str] = "admin/upload.html"

    name: str
    max_bytes: int
    act: str  # where the form goes without scripts
    jobs: str
    recent: tuple[UploadRow, ...]
    tenants: tuple[Choice, ...] = ()  # that an operator may upload for
    error: str | None = None


@dataclass(frozen=True)
class Step:
    """One check of an upload."""

    title: str
    mark: Mark
    detail: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Reason:
    """Why an upload was refused, and what to do."""

    code: str
    text: str


@dataclass(frozen=True)
class Fact:
    """A line of a report."""

    label: str
    value: str


@dataclass(frozen=True)
class JobPage(Page):
    """One upload. While it runs, `live` is where its state comes from; None once it has ended."""

    template: ClassVar[str] = "admin/job.html"

    name: str
    state: Badge
    live: str | None
    steps: tuple[Step, ...]
    reasons: tuple[Reason, ...]
    warnings: tuple[Reason, ...]
    facts: tuple[Fact, ...]
    texts: tuple[tuple[str, str], ...]  # what the base and the adapter said to a probe
    adapter: str | None
    again: str
    cancel: str | None


@dataclass(frozen=True)
class JobLive(JobPage):
    """The part of it that changes by itself."""

    template: ClassVar[str] = "admin/job_live.html"
