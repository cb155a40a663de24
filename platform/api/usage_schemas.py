"""What /v1/usage gives: sums over groups, as JSON or as CSV."""

import csv
import io
from collections.abc import Iterable
from datetime import date
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from loraplex.platform.usage import UsageTotal

EXAMPLE: JsonDict = {
    "object": "usage",
    "tenant_id": None,
    "key_id": None,
    "adapter": "support",
    "model": None,
    "arm": None,
    "day": "2026-11-30",
    "requests": 42,
    "prompt_tokens": 12_600,
    "completion_tokens": 5_040,
    "cached_tokens": 9_216,
    "total_tokens": 17_640,
}


class UsageOut(BaseModel):
    """Sums over one group; what was not grouped by is null, as is the adapter of the bare base."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    object: Literal["usage"] = "usage"
    tenant_id: str | None
    key_id: str | None
    adapter: str | None
    model: str | None = Field(description="The immutable id: an adapter's version, or the base.")
    arm: str | None = Field(description="Of a canary split: `stable` or `canary`.")
    day: date | None = Field(description="A UTC day.")
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(description="Of the prompts' tokens, those not computed anew.")
    total_tokens: int = Field(description="Prompts and completions together.")

    @classmethod
    def of(cls, total: UsageTotal) -> "UsageOut":
        """From a total of the ledger."""
        return cls(**vars(total), total_tokens=total.total_tokens)


class UsageList(BaseModel):
    """Totals of all groups asked for."""

    object: Literal["list"] = "list"
    data: list[UsageOut]


COLUMNS = tuple(name for name in UsageOut.model_fields if name != "object")


def as_csv(totals: Iterable[UsageOut]) -> str:
    """A header and a line for each group (RFC 4180).

    A field that a spreadsheet would take for a formula begins with an apostrophe.
    """
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for total in totals:
        row = total.model_dump(mode="json")
        writer.writerow([_harmless(row[name]) for name in COLUMNS])
    return file.getvalue()


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value
