"""Limits as routes take and give them: of a tenant, a key or an adapter; null is no limit."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

from loraplex.platform.api.schemas import Body
from loraplex.platform.quotas import BOUNDS


def within(name: str, example: float, description: str) -> Any:
    """A limit's field, with its bounds."""
    least, most = BOUNDS[name]
    return Field(ge=least, le=most, description=description, examples=[example])


Requests = Annotated[int, within("requests_per_minute", 120, "Requests in any minute.")]
Tokens = Annotated[int, within("tokens_per_minute", 50_000, "Tokens, in and out, in a minute.")]
Concurrency = Annotated[int, within("max_concurrency", 8, "Requests at the same time.")]
DayTokens = Annotated[int, within("tokens_per_day", 1_000_000, "Tokens in a UTC day.")]
MonthTokens = Annotated[int, within("tokens_per_month", 20_000_000, "Tokens in a UTC month.")]


class LimitsIn(Body):
    """Limits that a body may set."""

    requests_per_minute: Requests | None = None
    tokens_per_minute: Tokens | None = None
    max_concurrency: Concurrency | None = None
    tokens_per_day: DayTokens | None = None
    tokens_per_month: MonthTokens | None = None


class LimitsOut(BaseModel):
    """Limits that hold."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_concurrency: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
