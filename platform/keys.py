"""API keys: made, rotated and checked; and who calls with one.

Only a keyed hash of a secret is stored. Knows secrets for as long as a call lasts; refuses to log,
store or return one twice.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, cast

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform import audit
from loraplex.platform.audit import Actor
from loraplex.platform.db.locks import FOR_CHANGE
from loraplex.platform.db.models import ApiKey, Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.db.types import utc_now
from loraplex.platform.errors import (
    Conflict,
    Forbidden,
    InvalidKey,
    ModelNotFound,
    NotFound,
    Unavailable,
)
from loraplex.platform.key_cache import KeyCache
from loraplex.platform.key_secrets import is_well_formed, new_secret, redacted
from loraplex.platform.key_terms import (
    Scope,
    check_adapters,
    check_expiry,
    check_name,
    check_overlap,
    check_scopes,
)
from loraplex.platform.peppers import Peppers
from loraplex.platform.quotas import UNLIMITED, Limits, TenantLimits
from loraplex.platform.resolving import Resolved
from loraplex.platform.tenants import get_tenant

log = logging.getLogger(__name__)

_USED_EVERY: Final = timedelta(minutes=1)


@dataclass(frozen=True)
class Principal:
    """Who calls: a key, its tenant (None: an operator), what it may do, and what holds it.

    `limits` are the tenant's and `key_limits` the key's own; `adapters` are the names of those that
    it may use, None for all. For a user who has signed in, `key_id` is the user's id.
    """

    key_id: str
    tenant_id: str | None
    scopes: frozenset[Scope]
    limits: TenantLimits
    key_limits: Limits = UNLIMITED
    adapters: frozenset[str] | None = None
    is_user: bool = False

    @property
    def is_operator(self) -> bool:
        """Whether it belongs to no tenant and may administer all."""
        return self.tenant_id is None and "admin" in self.scopes

    def may_use(self, name: str) -> bool:
        """Whether it may use the adapter, or the base, of this name."""
        return self.adapters is None or name in self.adapters

    def check_own(self, name: str, param: str = "name") -> None:
        """Raise `Forbidden` where it may not publish under this name."""
        if not self.may_use(name):
            raise Forbidden(
                f"This key is bound to adapters, and {name[:64]!r} is none of them.", param=param
            )

    def check_adapter(self, resolved: Resolved, model: str) -> None:
        """Raise `ModelNotFound` for what it may not use, as for what is not there."""
        if not self.may_use(resolved.adapter or resolved.model_id):
            raise ModelNotFound(model)


class KeyRing:
    """Makes and checks keys; holds the peppers, without which stored hashes are of no use.

    A key whose hash is under an old pepper is hashed under the newest at its next use. Without a
    `cache` every request reads the database.
    """

    def __init__(
        self,
        pepper: bytes,
        old_peppers: Sequence[bytes] = (),
        cache: KeyCache[Principal] | None = None,
    ) -> None:
        self.peppers = Peppers(pepper, old_peppers)
        self._cache = KeyCache[Principal](ttl_s=0) if cache is None else cache

    async def create(
        self,
        session: AsyncSession,
        tenant_id: str | None,
        name: str,
        scopes: Collection[str],
        expires_at: datetime | None = None,
        *,
        actor: Actor,
        adapters: Collection[str] | None = None,
        limits: Limits = UNLIMITED,
    ) -> tuple[ApiKey, str]:
        """Make a key and return it with its secret, which is never seen again.

        Raises `BadRequest` for a bad name, scope, expiry or adapter, `NotFound` for an unknown
        tenant.
        """
        check_name(name)
        check_expiry(expires_at, utc_now())
        check_scopes(tenant_id, scopes)
        check_adapters(adapters, scopes, tenant_id)
        if tenant_id is not None:
            await get_tenant(session, tenant_id)
        key = ApiKey(
            tenant_id=tenant_id,
            name=name,
            scopes=sorted({*scopes}),
            expires_at=expires_at,
            adapters=None if adapters is None else sorted({*adapters}),
        )
        limits.put(key)
        secret = await self._add(session, key)
        told = {"name": name, "scopes": key.scopes, "adapters": key.adapters}
        await audit.note(session, actor, "key.created", key.id, tenant_id=tenant_id, **told)
        return key, secret

    async def rotate(
        self, session: AsyncSession, key_id: str, overlap: timedelta, *, actor: Actor
    ) -> tuple[ApiKey, str]:
        """Make a key's successor: a new id and secret, all else the same. Returns both.

        The old key expires when the overlap is over, or when it would have. Raises `NotFound`, and
        `Conflict` for a key that is revoked, expired or rotated already.
        """
        check_overlap(overlap)
        old = await get_key(session, key_id, lock=True)
        await _check_rotatable(session, old)
        new = ApiKey(
            tenant_id=old.tenant_id,
            name=old.name,
            scopes=old.scopes,
            expires_at=old.expires_at,
            adapters=old.adapters,
            rotated_from=old.id,
        )
        Limits.of(old).put(new)
        secret = await self._add(session, new)
        ends = utc_now() + overlap
        old.expires_at = ends if old.expires_at is None else min(ends, old.expires_at)
        told = {"successor": new.id, "overlap_s": overlap.total_seconds()}
        await audit.note(session, actor, "key.rotated", old.id, tenant_id=old.tenant_id, **told)
        return new, secret

    async def _add(self, session: AsyncSession, key: ApiKey) -> str:
        secret = new_secret()
        key.digest, key.redacted = self.peppers.digest(secret), redacted(secret)
        session.add(key)
        await session.flush()
        return secret

    async def authenticate(self, db: Database, secret: str | None) -> Principal:
        """Who holds this secret.

        Raises `InvalidKey`, always the same, when it is missing, malformed, unknown, revoked or
        expired; `Forbidden` when its tenant is suspended.
        """
        if secret is None or not is_well_formed(secret):
            raise InvalidKey
        digest = self.peppers.digest(secret)
        if (known := self._cache.get(digest)) is not None:
            return known
        reading = self._cache.begin()
        key, tenant = await self._find(db, secret)
        if tenant is not None and tenant.suspended_at is not None:
            raise Forbidden("This tenant is suspended. Ask the operator to resume it.")
        principal = _principal(key, tenant)
        self._cache.put(digest, principal, reading, _seconds_until(key.expires_at))
        await _note_use(db, key, digest)
        return principal

    def forget(self) -> None:
        """Read keys and tenants anew: this process has just changed some."""
        self._cache.clear()

    async def _find(self, db: Database, secret: str) -> tuple[ApiKey, Tenant | None]:
        digests = self.peppers.digests(secret)
        async with db.read(None) as session:
            found = await session.execute(
                select(ApiKey, Tenant)
                .outerjoin(Tenant, Tenant.id == ApiKey.tenant_id)
                .where(ApiKey.digest.in_(digests))
            )
            key, tenant = found.one_or_none() or (None, None)
        if key is None or not _is_live(key) or not self.peppers.verify(secret, key.digest):
            raise InvalidKey
        return key, tenant


async def get_key(session: AsyncSession, key_id: str, *, lock: bool = False) -> ApiKey:
    """The key of this id, locked if it is to be changed; raises `NotFound`."""
    key = await session.get(ApiKey, key_id, with_for_update=FOR_CHANGE if lock else None)
    if key is None:
        raise NotFound(f"There is no key {key_id[:64]!r}.")
    return key


async def _check_rotatable(session: AsyncSession, key: ApiKey) -> None:
    if not _is_live(key):
        raise Conflict("The key is revoked or expired; make a new one.")
    successor = await session.scalar(select(ApiKey.id).where(ApiKey.rotated_from == key.id))
    if successor is not None:
        raise Conflict(f"The key was rotated already; rotate its successor {successor}.")


async def _note_use(db: Database, key: ApiKey, digest: str) -> None:
    """Note when the key was used, by the minute, and keep its hash under the newest pepper."""
    now = utc_now()
    stale = now - _USED_EVERY
    if key.digest == digest and key.last_used_at is not None and key.last_used_at > stale:
        return
    due = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at <= stale, ApiKey.digest != digest)
    statement = update(ApiKey).where(ApiKey.id == key.id, due)
    try:
        async with db.session(None) as session:
            await session.execute(statement.values(last_used_at=now, digest=digest))
    except Unavailable as error:  # a busy database is no reason to refuse a good key
        log.warning("the use of key %s was not noted: %s", key.id, error)


def _principal(key: ApiKey, tenant: Tenant | None) -> Principal:
    return Principal(
        key_id=key.id,
        tenant_id=key.tenant_id,
        scopes=frozenset(cast("list[Scope]", key.scopes)),
        limits=TenantLimits() if tenant is None else TenantLimits.of(tenant),
        key_limits=Limits.of(key),
        adapters=None if key.adapters is None else frozenset(key.adapters),
    )


def _seconds_until(moment: datetime | None) -> float | None:
    return None if moment is None else (moment - utc_now()).total_seconds()


def _is_live(key: ApiKey) -> bool:
    return key.revoked_at is None and (key.expires_at is None or key.expires_at > utc_now())
