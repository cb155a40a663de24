"""What surrounds every admin page: who is signed in, where they can go, what just happened."""

from dataclasses import dataclass
from typing import ClassVar, Literal

Tone = Literal["good", "warn", "bad", "plain"]


@dataclass(frozen=True)
class Viewer:
    """Who is signed in; `tenant` is the name of their tenant, None for an operator."""

    name: str
    role: str
    tenant: str | None


@dataclass(frozen=True)
class Tab:
    """One screen in the navigation."""

    label: str
    href: str
    group: str  # tabs of one stand together
    current: bool = False


@dataclass(frozen=True)
class Notice:
    """What just happened, or what went wrong and how to mend it."""

    tone: Tone
    text: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shell:
    """The frame of a page."""

    version: str
    viewer: Viewer
    tabs: tuple[Tab, ...]
    notice: Notice | None = None


@dataclass(frozen=True)
class Badge:
    """A state in a word."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Choice:
    """An option of a select or a group of boxes."""

    value: str
    label: str
    chosen: bool = False


@dataclass(frozen=True)
class Pager:
    """Where the neighbours of a page of a list are; None where there is none."""

    first: str | None = None
    following: str | None = None


@dataclass(frozen=True)
class Page:
    """A page inside the frame; a subclass names its template."""

    template: ClassVar[str]

    shell: Shell


@dataclass(frozen=True)
class ErrorPage(Page):
    """A page that cannot be shown, and what to do about it."""

    template: ClassVar[str] = "admin/error.html"

    title: str
    text: str
