"""Tenants' accounts of bytes, by themselves: against sums over a plain list of what was added."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loraplex.engine.allowances import Allowances, Claim

HELD = {Claim.COMING, Claim.READY, Claim.USED}
STAYING = {Claim.READY, Claim.USED, Claim.IDLE}
tenants, claims = st.sampled_from("xy"), st.sampled_from(list(Claim))


class AccountsMachine(RuleBasedStateMachine):
    """Images come, go and change what they are; the model adds all of them up each time."""

    def __init__(self) -> None:
        super().__init__()
        self.allowances = Allowances()
        self.images: list[tuple[str, Claim, int]] = []
        self.limits: dict[str, int | None] = {}

    @rule(tenant=tenants, claim=claims, size=st.integers(0, 9))
    def add(self, tenant: str, claim: Claim, size: int) -> None:
        self.allowances.add(tenant, claim, size)
        self.images.append((tenant, claim, size))

    @rule(data=st.data(), claim=st.none() | claims)
    def move(self, data: st.DataObject, claim: Claim | None) -> None:
        if not self.images:
            return
        tenant, before, size = self.images.pop(data.draw(st.integers(0, len(self.images) - 1)))
        self.allowances.remove(tenant, before, size)
        if claim is not None:
            self.add(tenant, claim, size)

    @rule(tenant=tenants, limit=st.none() | st.integers(1, 20))
    def limit(self, tenant: str, limit: int | None) -> None:
        self.allowances.set_limit(tenant, limit)
        self.limits[tenant] = limit

    @rule()
    def tidy(self) -> None:
        self.allowances.tidy()
        left = {tenant for tenant, _, _ in self.images}
        self.limits = {t: limit for t, limit in self.limits.items() if t in left}

    @invariant()
    def accounts_are_sums(self) -> None:
        for tenant in "xy":
            own = [(claim, size) for name, claim, size in self.images if name == tenant]
            limit = self.limits.get(tenant)
            most = float("inf") if limit is None else limit
            held = [size for claim, size in own if claim in HELD]
            staying = [size for claim, size in own if claim in STAYING]
            idle = [size for claim, size in own if claim is Claim.IDLE]
            on_device = [size for claim, size in own if claim in (Claim.USED, Claim.IDLE)]
            assert self.allowances.resident(tenant) == sum(on_device)
            assert self.allowances.may_have(tenant, 3) == (not held or sum(held) + 3 <= most)
            assert self.allowances.may_keep(tenant) == (len(held) <= 1 or sum(held) <= most)
            is_over = bool(idle) and len(staying) > 1 and sum(staying) > most
            assert (tenant in self.allowances.over) == is_over
            barred = any(claim is Claim.BARRED for claim, _ in own)
            assert self.allowances.is_barred(tenant) == barred


def test_a_tenant_without_images_is_forgotten_with_its_limit() -> None:
    allowances = Allowances()
    for i in range(100):
        allowances.set_limit(f"t{i}", 5)
        allowances.add(f"t{i}", Claim.USED, 7)
        allowances.remove(f"t{i}", Claim.USED, 7)
    allowances.tidy()
    assert not allowances._accounts
    assert not allowances.over


TestAccountsMachine = AccountsMachine.TestCase
TestAccountsMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
