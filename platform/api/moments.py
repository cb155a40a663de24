"""Days and moments in query strings: as ISO 8601 writes them, never as bare numbers."""

from datetime import UTC, date, datetime
from typing import Annotated, Any

from fastapi import Query
from pydantic import AfterValidator, AwareDatetime, BeforeValidator


def _written(value: Any) -> Any:
    """Pydantic would take a number for seconds since the epoch."""
    if isinstance(value, str) and "-" not in value[1:]:
        raise ValueError("it is written as ISO 8601 does, such as 2026-11-30")
    return value


def in_utc(moment: datetime) -> datetime:
    """Far from Greenwich, the first and the last hours of the calendar are outside UTC's."""
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("its year in UTC must be from 1 to 9999") from None


Day = Annotated[
    date | None,
    BeforeValidator(_written),
    Query(description="A UTC day; it is included.", examples=["2026-11-30"]),
]
Moment = Annotated[AwareDatetime, BeforeValidator(_written), AfterValidator(in_utc)]
