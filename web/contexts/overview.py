"""The overview: what the server does now and has done in the last minutes."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from loraplex.web.contexts.shell import Page


@dataclass(frozen=True)
class Tile:
    """One number."""

    label: str
    value: str
    small: str = ""


@dataclass(frozen=True)
class Sample:
    """The values of a chart's series at one moment; None where there is none."""

    at: datetime
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """Series over time; the page draws it from the table that shows its values."""

    name: str
    title: str
    unit: str
    series: tuple[str, ...]
    samples: tuple[Sample, ...]

    @property
    def columns(self) -> dict[str, str]:
        """Of the table that shows its values."""
        return {"Time": ""} | dict.fromkeys(self.series, "number")


@dataclass(frozen=True)
class Share:
    """A part of a whole, in bytes."""

    label: str
    bytes: int
    start: float  # of the bar's width, 0 to 100
    width: float


@dataclass(frozen=True)
class Overview(Page):
    """The first screen. `live` is the address of the part that changes by itself."""

    template: ClassVar[str] = "admin/overview.html"

    base: str
    engine: str | None
    live: str
    tiles: tuple[Tile, ...]
    charts: tuple[Chart, ...]
    refusals: tuple[tuple[str, int], ...]  # cause, requests
    memory: tuple[Share, ...]
    memory_total: int
    memory_free: int
    adapters: int
    first_steps: bool


@dataclass(frozen=True)
class OverviewLive(Overview):
    """The part of it that changes by itself."""

    template: ClassVar[str] = "admin/overview_live.html"
