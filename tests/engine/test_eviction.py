"""The order of eviction against a plain sort, over uses, rests and losses in any order."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loraplex.engine.eviction import SLACK, EvictionOrder


def digests(order: EvictionOrder, now: float = 100.0) -> str:
    return "".join(digest for digest, _ in order.oldest(now))


def test_the_least_recently_released_goes_first() -> None:
    order = EvictionOrder()
    for now, digest in enumerate("abcd"):
        order.rest(digest, now)
    order.use("b", "t")
    assert digests(order) == "acd"
    order.rest("b", 5)
    assert list(order.oldest(6)) == [("a", 0), ("c", 2), ("d", 3), ("b", 5)]


def test_a_tenant_keeps_its_youngest_till_nothing_else_is_left() -> None:
    order = EvictionOrder(tenant_minimum=1)
    for now, (digest, tenant) in enumerate(["ax", "bx", "cy", "dz", "ez"]):
        order.use(digest, tenant)
        order.rest(digest, now)
    assert digests(order) == "adbce"
    order.use("a", "x")
    assert digests(order) == "bdce", "what x uses is its youngest"
    order.use("a", "y")
    assert digests(order) == "cdbe", "an image is whose it was last"


def test_time_ends_what_a_tenant_keeps() -> None:
    order = EvictionOrder(tenant_minimum=2, ttl_s=10)
    for now, (digest, tenant) in enumerate(["ax", "by", "cy", "dy"]):
        order.use(digest, tenant)
        order.rest(digest, now)
    assert digests(order, 10) == "bacd"
    assert digests(order, 11) == "abcd"


def test_what_nobody_used_nobody_keeps() -> None:
    order = EvictionOrder(tenant_minimum=5)
    order.use("a", "x")
    order.rest("a", 0)
    order.rest("b", 1)
    assert digests(order) == "ba"


def test_an_image_that_is_kept_on_and_off_has_one_place() -> None:
    order = EvictionOrder(tenant_minimum=1)
    for now, digest in enumerate("ab"):
        order.use(digest, "x")
        order.rest(digest, now)
    for _ in range(3):
        order.use("b", "y")
        order.use("b", "x")
    assert digests(order) == "a"


def test_dead_entries_do_not_pile_up() -> None:
    order = EvictionOrder()
    for now in range(10 * SLACK):
        order.use("a", "x")
        order.rest("a", now)
    assert len(order._common._heap) <= SLACK + 2


class OrderMachine(RuleBasedStateMachine):
    """The images of a few tenants; the model sorts all of them anew each time."""

    names = st.sampled_from("abcdefghijkl")

    @initialize(minimum=st.integers(0, 3), ttl=st.none() | st.integers(0, 20))
    def start(self, minimum: int, ttl: int | None) -> None:
        self.minimum, self.ttl, self.now = minimum, ttl, 0.0
        self.order, self.stamp = EvictionOrder(minimum, ttl), itertools.count()
        self.used: dict[str, str] = {}
        self.idle: dict[str, tuple[float, int, str | None]] = {}

    @rule(digest=names, tenant=st.sampled_from("xyz"))
    def use(self, digest: str, tenant: str) -> None:
        self.order.use(digest, tenant)
        self.idle.pop(digest, None)
        self.used[digest] = tenant

    @rule(digest=names, later=st.integers(0, 4))
    def rest(self, digest: str, later: int) -> None:
        self.now += later
        self.order.rest(digest, self.now)
        tenant = self.used.pop(digest, None) or self.idle.get(digest, (0, 0, None))[2]
        self.idle[digest] = (self.now, next(self.stamp), tenant)

    @rule(digest=names)
    def forget(self, digest: str) -> None:
        self.order.forget(digest)
        self.used.pop(digest, None)
        self.idle.pop(digest, None)

    @invariant()
    def order_is_that_of_the_model(self) -> None:
        if not hasattr(self, "order"):
            return
        self.order.check_integrity()
        young = sorted(self.idle, key=self.idle.__getitem__, reverse=True)
        kept = set()
        for tenant in "xyz":
            own = [d for d in young if self.idle[d][2] == tenant]
            assert self.order.of(tenant) == own[::-1]
            assert all(self.order.owner(digest) == tenant for digest in own)
            left = max(0, self.minimum - list(self.used.values()).count(tenant))
            kept |= set(own[:left])
        if self.ttl is not None:
            kept -= {d for d in kept if self.now - self.idle[d][0] > self.ttl}
        expected = sorted(self.idle, key=lambda d: (d in kept, self.idle[d][:2]))
        assert [d for d, _ in self.order.oldest(self.now)] == expected


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
