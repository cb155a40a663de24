"""The pages before the frame: signing in, and choosing a password."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class SignIn:
    """The form of name and password; `first` while nobody has signed in yet."""

    template: ClassVar[str] = "admin/signin.html"

    version: str
    name: str = ""
    error: str | None = None
    first: bool = False
    onward: str = ""  # the page that was asked for


@dataclass(frozen=True)
class SetPassword:
    """The form for a password, after a one-time sign-in or at one's own wish."""

    template: ClassVar[str] = "admin/password.html"

    version: str
    name: str
    shortest: int  # characters
    longest: int
    changes: bool  # there is one already
    error: str | None = None
