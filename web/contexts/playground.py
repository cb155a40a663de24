"""The playground: one prompt to the base and adapters side by side."""

from dataclasses import dataclass
from typing import ClassVar

from loraplex.web.contexts.shell import Choice, Page


@dataclass(frozen=True)
class Answer:
    """What one model said, where the page was made without scripts."""

    model: str
    text: str
    facts: str
    error: str | None = None


@dataclass(frozen=True)
class PlaygroundPage(Page):
    """The form and the answers. `ask` streams one model's answer."""

    template: ClassVar[str] = "admin/playground.html"

    models: tuple[Choice, ...]
    prompt: str
    system: str
    max_tokens: int
    temperature: float
    act: str
    ask: str
    answers: tuple[Answer, ...]
    curl: str
    python: str
    more: str = ""  # models by name, beside those to choose from
    tenants: tuple[Choice, ...] = ()
    tenant: str | None = None
