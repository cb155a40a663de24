"""The order in which idle images give up their place.

First go those that have been idle for longer than `ttl_s`, then the least recently released. Each
tenant keeps its `tenant_minimum` youngest images, those that are in use among them: they go only
when nothing else is left, or when their time is over. Every operation takes O(log n) time, and
looking at the first k images in order O(k log k).

This file knows digests, tenants and times. It refuses to know bytes, and what becomes of an image.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

Stamp = tuple[float, int]  # when an image became idle, and which of those that did so then
SLACK = 64  # dead entries that a heap may carry whatever its size


class _Queue:
    """Idle images by stamp: a heap, of which dead entries go when they come up or are many."""

    def __init__(self) -> None:
        self.stamps: dict[str, Stamp] = {}
        self._heap: list[tuple[Stamp, str]] = []

    def put(self, digest: str, stamp: Stamp) -> None:
        self.stamps[digest] = stamp
        heapq.heappush(self._heap, (stamp, digest))
        if len(self._heap) > 2 * len(self.stamps) + SLACK:
            self._heap = [(stamp, digest) for digest, stamp in self.stamps.items()]
            heapq.heapify(self._heap)

    def remove(self, digest: str) -> None:
        del self.stamps[digest]

    def __iter__(self) -> Iterator[tuple[Stamp, str]]:
        """Oldest first, without taking anything out."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        heap = self._heap
        front, last = [(heap[0], 0)] if heap else [], None
        while front:
            entry, at = heapq.heappop(front)
            if entry != last and self._is_live(entry):  # one that left and came back is there twice
                yield entry
            last = entry
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(front, (heap[child], child))

    def _is_live(self, entry: tuple[Stamp, str]) -> bool:
        return self.stamps.get(entry[1]) == entry[0]


@dataclass
class _Tenant:
    """A tenant's images; of the idle ones `kept` are the youngest. Both are oldest first."""

    used: set[str] = field(default_factory=set)
    common: OrderedDict[str, Stamp] = field(default_factory=OrderedDict)
    kept: OrderedDict[str, Stamp] = field(default_factory=OrderedDict)


class EvictionOrder:
    """Knows of each image whether it is in use, or since when not, and whose it was last."""

    def __init__(self, tenant_minimum: int = 0, ttl_s: float | None = None) -> None:
        self._minimum, self._ttl = tenant_minimum, ttl_s
        self._count = itertools.count()
        self._owner: dict[str, str | None] = {}
        self._tenants: dict[str | None, _Tenant] = {}
        self._common, self._kept = _Queue(), _Queue()

    def use(self, digest: str, tenant: str) -> None:
        """From now on `tenant` uses the image: it is not in the order."""
        before = self._take(digest)
        self._owner[digest] = tenant
        self._tenants.setdefault(tenant, _Tenant()).used.add(digest)
        self._balance({before, tenant})

    def rest(self, digest: str, now: float) -> None:
        """The image is idle from now on, and the youngest; it stays with the tenant that used it.

        One that is new is nobody's, and no minimum keeps it.
        """
        tenant = self._take(digest)
        self._owner[digest] = tenant
        stamp = (now, next(self._count))
        if tenant is not None:
            self._tenants.setdefault(tenant, _Tenant()).kept[digest] = stamp
            self._kept.put(digest, stamp)
            self._balance({tenant})
        else:
            self._common.put(digest, stamp)

    def forget(self, digest: str) -> None:
        """The image is gone, or is not to be in the order."""
        self._balance({self._take(digest)})

    def oldest(self, now: float) -> Iterator[tuple[str, float]]:
        """The idle images in order, and since when they are idle."""
        limit = -float("inf") if self._ttl is None else now - self._ttl

        def rank(entry: tuple[Stamp, str]) -> tuple[bool, Stamp]:
            stamp, digest = entry
            return digest in self._kept.stamps and stamp[0] >= limit, stamp

        for (since, _), digest in heapq.merge(self._common, self._kept, key=rank):
            yield digest, since

    def of(self, tenant: str) -> list[str]:
        """A tenant's own idle images, the least recently released first."""
        known = self._tenants.get(tenant)
        return [*known.common, *known.kept] if known else []

    def owner(self, digest: str) -> str | None:
        """Whose an image is; None for one that is nobody's, or not known."""
        return self._owner.get(digest)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the queues do not agree with the tenants' images."""
        tenants = self._tenants.values()
        common = {d: s for t in tenants for d, s in t.common.items()}
        common |= {d: s for d, s in self._common.stamps.items() if self._owner[d] is None}
        kept = {d: s for t in tenants for d, s in t.kept.items()}
        used = [d for t in tenants for d in t.used]
        rules = {
            "common images": common == self._common.stamps,
            "kept images": kept == self._kept.stamps,
            "every image has one place": sorted(self._owner) == sorted([*common, *kept, *used]),
            "minimum": all(self._is_balanced(t) for t in tenants),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise RuntimeError(f"the order of eviction is inconsistent: {', '.join(broken)}")

    def _is_balanced(self, tenant: _Tenant) -> bool:
        idle = [*tenant.common.values(), *tenant.kept.values()]
        kept = min(len(idle), max(0, self._minimum - len(tenant.used)))
        return idle == sorted(idle) and len(tenant.kept) == kept

    def _take(self, digest: str) -> str | None:
        """Take an image out, if it is there, and say whose it was; `_balance` is to follow."""
        name = self._owner.pop(digest, None)
        for queue in (self._common, self._kept):
            if digest in queue.stamps:
                queue.remove(digest)
        if tenant := self._tenants.get(name):
            tenant.used.discard(digest)
            tenant.common.pop(digest, None)
            tenant.kept.pop(digest, None)
        return name

    def _balance(self, names: set[str | None]) -> None:
        """Let these tenants keep as many of their images as they may."""
        for name in names & self._tenants.keys():
            tenant = self._tenants[name]
            most = max(0, self._minimum - len(tenant.used))
            while len(tenant.kept) > most:
                digest, stamp = tenant.kept.popitem(last=False)
                tenant.common[digest] = stamp
                self._kept.remove(digest)
                self._common.put(digest, stamp)
            while tenant.common and len(tenant.kept) < most:
                digest, stamp = tenant.common.popitem()
                tenant.kept[digest] = stamp
                tenant.kept.move_to_end(digest, last=False)
                self._common.remove(digest)
                self._kept.put(digest, stamp)
            if not (tenant.used or tenant.common or tenant.kept):
                del self._tenants[name]
