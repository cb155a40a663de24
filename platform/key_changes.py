"""Keys as rows: listed, changed and revoked. No secret is seen here.

Knows the `api_keys` table; refuses to know hashes, and which caller may do it.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.db.models import ApiKey
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import Conflict
from loraplex.platform.key_terms import check_adapters, check_expiry, check_name
from loraplex.platform.keys import get_key
from loraplex.platform.quotas import Limits


async def list_keys(
    session: AsyncSession,
    *,
    tenant_id: str | None = None,
    after: str | None = None,
    limit: int = 100,
) -> Page[ApiKey]:
    """Keys, the newest first, revoked ones too; of one tenant, if it is given."""
    statement = select(ApiKey)
    if tenant_id is not None:
        statement = statement.where(ApiKey.tenant_id == tenant_id)
    return await fetch_page(
        session, statement, ApiKey.id, after=after, limit=limit, descending=True
    )


async def change_key(
    session: AsyncSession, key_id: str, given: Mapping[str, Any], *, actor: Actor
) -> ApiKey:
    """Change what is given of a key: `name`, `adapters`, `expires_at` and its `Limits`.

    Raises `NotFound`, `BadRequest` for a bad value, and `Conflict` for a revoked key.
    """
    key = await get_key(session, key_id, lock=True)
    if key.revoked_at is not None:
        raise Conflict("The key is revoked; make a new one.")
    limits = Limits(**{name: given.get(name, now) for name, now in vars(Limits.of(key)).items()})
    if "name" in given:
        check_name(given["name"])
    if "adapters" in given:
        check_adapters(given["adapters"], key.scopes, key.tenant_id)
    if "expires_at" in given:
        check_expiry(given["expires_at"], utc_now())
    for column, value in {**given, **vars(limits)}.items():
        setattr(key, column, value)
    if given:
        told = {name: _plain(value) for name, value in given.items()}
        await audit.note(
            session, actor, "key.changed", key.id, tenant_id=key.tenant_id, changed=told
        )
    return key


async def revoke_key(session: AsyncSession, key_id: str, *, actor: Actor) -> ApiKey:
    """Make a key useless from now on; twice is once. Raises `NotFound`."""
    key = await get_key(session, key_id, lock=True)
    if key.revoked_at is None:
        key.revoked_at = utc_now()
        await audit.note(session, actor, "key.revoked", key.id, tenant_id=key.tenant_id)
    return key


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value
