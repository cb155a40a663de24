"""/v1/audit: who changed what, newest first, as JSON or as CSV."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Header, Query
from pydantic import Field
from starlette.responses import Response

from loraplex.platform.api.auth import allow
from loraplex.platform.api.context import Ctx
from loraplex.platform.api.moments import Moment
from loraplex.platform.api.schemas import After, Listed, Named, PageSize, listed, seconds
from loraplex.platform.api.whose import administered
from loraplex.platform.audit import list_entries
from loraplex.platform.db.models import AuditEntry
from loraplex.platform.keys import Principal

CSV: Final = "text/csv"
COLUMNS: Final = (
    "id",
    "created_at",
    "tenant_id",
    "actor",
    "action",
    "target",
    "details",
    "request_id",
)
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets run
ANSWER: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {CSV: {}}}}

router = APIRouter(prefix="/v1/audit", tags=["audit"])
Reading = Annotated[Principal, Depends(allow("admin"))]
Action = Annotated[
    str | None, Query(max_length=64, description="Such changes only.", examples=["alias.moved"])
]
By = Annotated[
    str | None, Query(max_length=64, description="A key's or a user's.", examples=["key_01jxyz"])
]
Target = Annotated[
    str | None, Query(max_length=256, description="Of this only.", examples=["poet@prod"])
]
Since = Annotated[
    Moment | None,
    Query(description="ISO 8601 with a timezone.", examples=["2026-01-01T00:00:00Z"]),
]
Tenant = Annotated[
    str | None, Query(max_length=64, description="For operators: one tenant's changes only.")
]


class AuditOut(Named):
    """One change."""

    id: str = Field(examples=["aud_01jxyz"])
    object: Literal["audit.entry"] = "audit.entry"
    created_at: int = Field(examples=[1767225600])
    tenant_id: str | None = Field(description="Whose it is; null: nobody's.")
    actor: str = Field(description="The id of a key or a user, or `system`.")
    action: str = Field(examples=["alias.moved"])
    target: str = Field(description="The id or name of what changed.", examples=["poet@prod"])
    details: dict[str, Any] = Field(examples=[{"version": 7, "revision": 3, "canary": None}])
    request_id: str | None = Field(description="The request that it came with.")

    @classmethod
    def of(cls, row: AuditEntry) -> "AuditOut":
        """From a row."""
        return cls(
            id=row.id,
            created_at=seconds(row.created_at),
            tenant_id=row.tenant_id,
            actor=row.actor,
            action=row.action,
            target=row.target,
            details=row.details,
            request_id=row.request_id,
        )


@router.get("", response_model=Listed[AuditOut], responses=ANSWER)
async def list_audit_entries(
    principal: Reading,
    ctx: Ctx,
    action: Action = None,
    actor: By = None,
    target: Target = None,
    since: Since = None,
    tenant_id: Tenant = None,
    after: After = None,
    limit: PageSize = 100,
    form: Annotated[
        Literal["json", "csv"] | None,
        Query(alias="format", description="How to answer; goes before `Accept`."),
    ] = None,
    accept: Annotated[str | None, Header(include_in_schema=False)] = None,
) -> Listed[AuditOut] | Response:
    """Changes, the newest first: a tenant's own, or all for an operator.

    `format=csv`, or `Accept: text/csv`, gives the same page as a table.
    """
    wanted = administered(principal, tenant_id)
    async with ctx.db.read(principal.tenant_id) as session:
        page = await list_entries(
            session,
            tenant_id=wanted,
            action=action,
            actor=actor,
            target=target,
            since=since,
            before=after,
            limit=limit,
        )
    if form == "csv" or (form is None and (accept or "").startswith(CSV)):
        return Response(_table(page.items), media_type=CSV)
    return listed(page, [AuditOut.of(row) for row in page.items])


def _table(rows: Sequence[AuditEntry]) -> str:
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(COLUMNS)
    for row in rows:
        told = {
            **{name: getattr(row, name) for name in COLUMNS},
            "created_at": row.created_at.isoformat(),
            "details": json.dumps(row.details, sort_keys=True),
        }
        table.writerow([_cell(told[name]) for name in COLUMNS])
    return text.getvalue()


def _cell(value: str | None) -> str:
    """Text that no spreadsheet takes for a formula."""
    return f"'{value}" if value and value.startswith(FORMULA) else value or ""
