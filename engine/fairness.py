"""Who goes next: virtual token counters over tenants, ageing priorities within each.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). The waiting tenant with
the least counter (`counters.py`) is served first, so tenants that always have jobs waiting get
service in proportion to their weights, however many jobs each of them brings. A tenant that comes
back from idleness is lifted to the others: what it did not use is no credit. Nor is what a tenant's
own caps kept from it.

Nothing waits for ever. Whoever is served before another tenant draws level with it; whoever is
served before another job of its tenant has a better priority, but each `age_s` of waiting outweighs
one step of priority.

This file knows tenants, priorities and times of arrival; it refuses to know blocks, images, what a
job consists of, and the time that it is.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from loraplex.engine.counters import Account, Counters


class Job(Protocol):
    """What the queue asks of a job."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def priority(self) -> int:
        """Among its tenant's own, the lowest first."""

    @property
    def arrived(self) -> float:
        """When it came, in seconds."""


J = TypeVar("J", bound=Job)


class BrokenQueue(Exception):
    """The queue's books contradict each other or what runs."""


class Served(NamedTuple):
    """What a tenant has had since it became known, and how many jobs it has now."""

    tenant: str
    counter: float
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    running: int
    waiting: int


class _Entry(NamedTuple, Generic[J]):
    """A job in its tenant's heap; the ticket is unique, so jobs themselves are never compared."""

    fresh: bool  # False: it was preempted, and goes before those that were not
    rank: float
    arrived: float  # among equal ranks the oldest goes first, whichever was preempted first
    ticket: int
    job: J


@dataclass(slots=True)
class _Tenant(Generic[J]):
    account: Account
    heap: list[_Entry[J]] = field(default_factory=list)  # those removed linger until they surface
    waiting: int = 0
    running: int = 0
    held: bool = False  # when it was last asked, its caps kept it from being served
    turn: int = 0  # among equal counters, the lowest first


class FairQueue(Generic[J]):
    """The jobs that wait, and how many run, of each tenant. Jobs are told apart by identity.

    `age_s`: seconds of waiting that outweigh one step of priority.
    `remember`: idle tenants are forgotten, the longest idle first, while more than these are known.
    """

    def __init__(self, counters: Counters, age_s: float = 10.0, remember: int = 4096) -> None:
        self._counters, self._age_s, self._remember = counters, age_s, remember
        self._tenants: dict[str, _Tenant[J]] = {}  # those with jobs
        self._tickets: dict[J, int] = {}  # of the waiting jobs
        self._next_ticket = count(1)
        self._last_served = ""

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[J]:
        return iter(self._tickets)

    def waiting(self, tenant: str) -> int:
        """How many of the tenant's jobs wait."""
        known = self._tenants.get(tenant)
        return known.waiting if known else 0

    def running(self, tenant: str) -> int:
        """How many of the tenant's jobs run."""
        known = self._tenants.get(tenant)
        return known.running if known else 0

    def push(self, job: J) -> None:
        """Add a new job; a tenant that had none waiting is lifted to those that had."""
        self._push(job, fresh=True)

    def push_preempted(self, job: J) -> None:
        """Add a job that ran; it goes before its tenant's others."""
        self._push(job, fresh=False)

    def peek(self, admissible: Callable[[J], bool]) -> J | None:
        """The job to serve next, or None when none is admissible.

        Of the tenants in order of their counters, each is asked about its first job, until one is
        admissible. `admissible` says whether the tenant's own caps allow the job and nothing else:
        where memory is short the caller waits with the job in hand, lest large jobs starve.
        """
        turns = [
            (tenant.account.counter, tenant.turn, name)
            for name, tenant in self._tenants.items()
            if tenant.waiting
        ]
        heapify(turns)
        while turns:
            name = heappop(turns)[2]
            tenant = self._tenants[name]
            job = self._first(tenant)
            if admissible(job):
                self._release(name, tenant)
                return job
            tenant.held = True
        return None

    def take(self, job: J) -> None:
        """Take a waiting job out to be served; KeyError when it does not wait."""
        self._tenants[job.tenant].turn = next(self._next_ticket)
        self._last_served = job.tenant
        self._drop(job)

    def remove(self, job: J) -> bool:
        """Take a job out without serving it; False when it does not wait."""
        if job not in self._tickets:
            return False
        self._drop(job)
        return True

    def started(self, job: J) -> None:
        """The job runs."""
        self._tenant(job.tenant).running += 1

    def ended(self, job: J) -> None:
        """The job runs no longer: it ended, or it was preempted."""
        self._tenants[job.tenant].running -= 1
        self._forget_if_idle(job.tenant)

    def order(self, running: Iterable[J]) -> list[J]:
        """The jobs, most entitled first; the first to be preempted is the last.

        By their tenants' counters, then by aged priority; equals stay in the order given.
        """
        return sorted(running, key=lambda job: (self._counters.value(job.tenant), self._rank(job)))

    def services(self) -> list[Served]:
        """What each known tenant has had and has now; whose policy is the oldest comes first."""
        return [
            Served(
                name,
                self._counters.value(name),
                *self._counters.tokens(name),
                self.running(name),
                self.waiting(name),
            )
            for name in self._counters
        ]

    def check_integrity(self, running: Iterable[J]) -> None:
        """Raise `BrokenQueue` unless the books agree with each other and with what runs."""
        runs: dict[str, int] = {}
        for job in running:
            if job in self._tickets:
                raise BrokenQueue(f"a job of {job.tenant!r} runs and waits")
            runs[job.tenant] = runs.get(job.tenant, 0) + 1
        for name in runs.keys() | self._tenants.keys():
            if runs.get(name, 0) != self.running(name):
                raise BrokenQueue(f"{name!r} runs {runs.get(name, 0)}, not {self.running(name)}")
        self._check_waiting()

    def _check_waiting(self) -> None:
        found: set[J] = set()
        for name, tenant in self._tenants.items():
            live = {entry.job for entry in tenant.heap if self._is_live(entry)}
            if len(live) != tenant.waiting or any(job.tenant != name for job in live):
                raise BrokenQueue(f"{name!r} has {tenant.waiting} waiting, but {len(live)} queued")
            if tenant.account is not self._counters.account(name):
                raise BrokenQueue(f"{name!r} has two accounts")
            if not (tenant.waiting or tenant.running):
                raise BrokenQueue(f"{name!r} is idle and still here")
            found |= live
        if found != self._tickets.keys():
            raise BrokenQueue("jobs wait that no tenant's queue holds")

    def _rank(self, job: J) -> float:
        """Aged priority in seconds, lowest first; since all age alike, it does not change."""
        return job.priority * self._age_s + job.arrived

    def _tenant(self, name: str) -> _Tenant[J]:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._counters.account(name))
        return tenant

    def _push(self, job: J, fresh: bool) -> None:
        tenant = self._tenant(job.tenant)
        ticket = next(self._next_ticket)
        if not tenant.waiting:
            self._counters.lift(job.tenant, self._level())
            tenant.turn = ticket
        self._tickets[job] = ticket
        tenant.waiting += 1
        heappush(tenant.heap, _Entry(fresh, self._rank(job), job.arrived, ticket, job))

    def _level(self) -> float:
        """The least counter of the tenants that wait to be served, else of the last one served."""
        return min(
            (
                tenant.account.counter
                for tenant in self._tenants.values()
                if tenant.waiting and not tenant.held
            ),
            default=self._counters.value(self._last_served),
        )

    def _release(self, name: str, tenant: _Tenant[J]) -> None:
        """The tenant's caps keep it back no longer: it is lifted as if it had been idle."""
        if tenant.held:
            self._counters.lift(name, self._level())
            tenant.held = False

    def _first(self, tenant: _Tenant[J]) -> J:
        while not self._is_live(tenant.heap[0]):
            heappop(tenant.heap)
        return tenant.heap[0].job

    def _is_live(self, entry: _Entry[J]) -> bool:
        return self._tickets.get(entry.job) == entry.ticket

    def _drop(self, job: J) -> None:
        del self._tickets[job]
        tenant = self._tenants[job.tenant]
        tenant.waiting -= 1
        if 2 * tenant.waiting < len(tenant.heap):
            tenant.heap = [entry for entry in tenant.heap if self._is_live(entry)]
            heapify(tenant.heap)
        if not tenant.waiting:
            tenant.held = False
            self._forget_if_idle(job.tenant)

    def _forget_if_idle(self, name: str) -> None:
        tenant = self._tenants[name]
        if tenant.waiting or tenant.running:
            return
        del self._tenants[name]
        excess = max(0, len(self._counters) - self._remember)
        idle = (known for known in self._counters if known not in self._tenants)
        for known in list(islice(idle, excess)):
            self._counters.forget(known)
