"""API keys: made, checked, listed and revoked.

A key is `lpx_`, 32 random base-62 characters and their CRC-32 in 6 more, so that a typing error
is told from a wrong key without a look at the database. Only a keyed hash of it is stored.
Knows secrets for as long as a call lasts; refuses to log, store or return one twice.
"""

import hashlib
import hmac
import logging
import re
import secrets
import string
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, cast, get_args

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.locks import FOR_CHANGE
from loraplex.platform.db.models import NAME_LENGTH, ApiKey, Tenant
from loraplex.platform.db.page import Page, fetch_page
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import BadRequest, Forbidden, InvalidKey, NotFound, Unavailable
from loraplex.platform.quotas import UNLIMITED, Limits, TenantLimits
from loraplex.platform.tenants import get_tenant

log = logging.getLogger(__name__)

Scope = Literal["infer", "adapters:read", "adapters:write", "admin"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)

_BASE62: Final = string.digits + string.ascii_uppercase + string.ascii_lowercase
_RANDOM, _CHECK = 32, 6
_PATTERN: Final = re.compile(rf"lpx_([0-9A-Za-z]{{{_RANDOM}}})([0-9A-Za-z]{{{_CHECK}}})")
_USED_EVERY: Final = timedelta(minutes=1)


@dataclass(frozen=True)
class Principal:
    """Who calls: a key, its tenant (None: an operator), what it may do, and what holds it.

    `limits` are the tenant's and `key_limits` the key's own; `adapters` are the names of those that
    it may use, None for all.
    """

    key_id: str
    tenant_id: str | None
    scopes: frozenset[Scope]
    limits: TenantLimits
    key_limits: Limits = UNLIMITED
    adapters: frozenset[str] | None = None

    @property
    def is_operator(self) -> bool:
        """Whether the key belongs to no tenant and may administer all."""
        return self.tenant_id is None and "admin" in self.scopes


class KeyRing:
    """Makes and checks keys; holds the pepper, without which stored hashes are of no use."""

    def __init__(self, pepper: bytes) -> None:
        self._pepper = pepper

    async def create(
        self,
        session: AsyncSession,
        tenant_id: str | None,
        name: str,
        scopes: Collection[str],
        expires_at: datetime | None = None,
    ) -> tuple[ApiKey, str]:
        """Make a key and return it with its secret, which is never seen again.

        Raises `BadRequest` for a bad name, scope or expiry, `NotFound` for an unknown tenant.
        """
        if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
            raise BadRequest(
                f"A key's name has 1 to {NAME_LENGTH} printable characters.", param="name"
            )
        if expires_at is not None and _aware(expires_at) <= utc_now():
            raise BadRequest("A key's expiry must be in the future.", param="expires_at")
        if tenant_id is not None:
            await get_tenant(session, tenant_id)
        secret = _new_secret()
        key = ApiKey(
            tenant_id=tenant_id,
            name=name,
            digest=self._digest(secret),
            redacted=f"{secret[:8]}…",
            scopes=_checked_scopes(tenant_id, scopes),
            expires_at=expires_at,
        )
        session.add(key)
        await session.flush()
        return key, secret

    async def authenticate(self, db: Database, secret: str | None) -> Principal:
        """Who holds this secret.

        Raises `InvalidKey`, always the same, when it is missing, malformed, unknown, revoked or
        expired; `Forbidden` when its tenant is suspended.
        """
        if secret is None or not _is_well_formed(secret):
            raise InvalidKey
        digest = self._digest(secret)
        async with db.read(None) as session:
            found = await session.execute(
                select(ApiKey, Tenant)
                .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
                .where(ApiKey.digest == digest)
            )
            key, tenant = found.one_or_none() or (None, None)
        if key is None or not hmac.compare_digest(key.digest, digest) or not _is_live(key):
            raise InvalidKey
        if tenant is not None and tenant.suspended_at is not None:
            raise Forbidden("This tenant is suspended. Ask the operator to resume it.")
        await _note_use(db, key)
        return Principal(
            key_id=key.id,
            tenant_id=key.tenant_id,
            scopes=frozenset(cast("list[Scope]", key.scopes)),
            limits=TenantLimits() if tenant is None else TenantLimits.of(tenant),
            key_limits=Limits.of(key),
            adapters=None if key.adapters is None else frozenset(key.adapters),
        )

    def _digest(self, secret: str) -> str:
        return hmac.new(self._pepper, secret.encode(), hashlib.sha256).hexdigest()


async def get_key(session: AsyncSession, key_id: str, *, lock: bool = False) -> ApiKey:
    """The key of this id, locked if it is to be changed; raises `NotFound`."""
    key = await session.get(ApiKey, key_id, with_for_update=FOR_CHANGE if lock else None)
    if key is None:
        raise NotFound(f"There is no key {key_id[:64]!r}.")
    return key


async def list_keys(
    session: AsyncSession,
    *,
    tenant_id: str | None = None,
    after: str | None = None,
    limit: int = 100,
) -> Page[ApiKey]:
    """Keys in the order they were made, revoked ones too; of one tenant, if it is given."""
    statement = select(ApiKey)
    if tenant_id is not None:
        statement = statement.where(ApiKey.tenant_id == tenant_id)
    return await fetch_page(session, statement, ApiKey.id, after=after, limit=limit)


async def revoke_key(session: AsyncSession, key_id: str) -> ApiKey:
    """Make a key useless from now on; twice is once. Raises `NotFound`."""
    key = await get_key(session, key_id, lock=True)
    if key.revoked_at is None:
        key.revoked_at = utc_now()
    return key


async def _note_use(db: Database, key: ApiKey) -> None:
    now = utc_now()
    stale = now - _USED_EVERY
    if key.last_used_at is not None and key.last_used_at > stale:
        return
    unused = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= stale)
    statement = update(ApiKey).where(ApiKey.id == key.id, unused).values(last_used_at=now)
    try:
        async with db.session(None) as session:
            await session.execute(statement)
    except Unavailable as error:  # a busy database is no reason to refuse a good key
        log.warning("the use of key %s was not noted: %s", key.id, error)


def _new_secret() -> str:
    body = "".join(secrets.choice(_BASE62) for _ in range(_RANDOM))
    return f"lpx_{body}{_checksum(body)}"


def _is_well_formed(secret: str) -> bool:
    match = _PATTERN.fullmatch(secret)
    return match is not None and _checksum(match[1]) == match[2]


def _checksum(body: str) -> str:
    number, digits = zlib.crc32(body.encode()), ""
    for _ in range(_CHECK):
        number, digit = divmod(number, len(_BASE62))
        digits = _BASE62[digit] + digits
    return digits


def _is_live(key: ApiKey) -> bool:
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > utc_now())


def _aware(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise BadRequest("A key's expiry needs a timezone, such as 'Z'.", param="expires_at")
    return moment


def _checked_scopes(tenant_id: str | None, scopes: Collection[str]) -> list[str]:
    unknown = sorted({*scopes} - {*SCOPES})
    if unknown or not scopes:
        raise BadRequest(f"A key's scopes are one or more of {', '.join(SCOPES)}.", param="scopes")
    if tenant_id is None and "infer" in scopes:
        raise BadRequest(
            "An operator's key cannot infer, because no tenant would be charged; "
            "make a key for a tenant.",
            param="scopes",
        )
    return sorted({*scopes})
