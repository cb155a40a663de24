"""Whose limits a generating request is held to: its tenant's, its key's, and its adapters'."""

from collections.abc import Iterable

from loraplex.platform.keys import Principal
from loraplex.platform.quotas import Bucket
from loraplex.platform.resolving import Resolved


def own_buckets(principal: Principal, tenant_id: str) -> tuple[Bucket, ...]:
    """The buckets of every request of this key."""
    return (
        Bucket("tenant", tenant_id, principal.limits),
        Bucket("key", principal.key_id, principal.key_limits),
    )


def adapter_buckets(uses: Iterable[Resolved]) -> tuple[Bucket, ...]:
    """One for each adapter.

    Another tenant's has the limits that its owner wishes, and each tenant that uses it a bucket of
    its own.
    """
    limits = {used.adapter_id: used.limits for used in uses if used.adapter_id is not None}
    return tuple(Bucket("adapter", id, each) for id, each in limits.items())


def buckets_of(
    principal: Principal, tenant_id: str, uses: Iterable[Resolved]
) -> tuple[Bucket, ...]:
    """All buckets of a request that uses these adapters."""
    return (*own_buckets(principal, tenant_id), *adapter_buckets(uses))
