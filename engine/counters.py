"""Weighted virtual token counters: what each tenant has had, in the currency of fairness.

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a counter grows by the
cost of its tenant's tokens over its weight. This file knows tenants, policies and tokens; it
refuses to know jobs, and who is served next (`fairness.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from loraplex.engine.protocol import Policy


@dataclass(slots=True)
class Account:
    """A tenant's policy, its counter, and the tokens that it had."""

    policy: Policy = field(default_factory=Policy)
    counter: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0


class Counters:
    """Virtual token counters: what each tenant's tokens cost, over its weight."""

    def __init__(self, input_cost: float = 1.0, output_cost: float = 2.0) -> None:
        self._input_cost, self._output_cost = input_cost, output_cost
        self._accounts: dict[str, Account] = {}  # in order of their newest policy

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[str]:
        """The known tenants, first those whose policy is the oldest."""
        return iter(self._accounts)

    def set_policy(self, tenant: str, policy: Policy) -> None:
        """Put a policy in place of the tenant's last; its weight is positive.

        Call it right before the tenant's job is pushed: policies of idle tenants are forgotten.
        """
        account = self._accounts.pop(tenant, None) or Account()
        account.policy = policy
        self._accounts[tenant] = account

    def account(self, tenant: str) -> Account:
        """The tenant's account, a new one if there is none; it stays the same until forgotten."""
        return self._accounts.setdefault(tenant, Account())

    def policy(self, tenant: str) -> Policy:
        """The tenant's newest policy."""
        return self._known(tenant).policy

    def value(self, tenant: str) -> float:
        """The tenant's counter, in tokens; 0 for one that is unknown."""
        return self._known(tenant).counter

    def tokens(self, tenant: str) -> tuple[int, int, int]:
        """The tenant's prompt tokens, generated tokens and cached tokens."""
        account = self._known(tenant)
        return account.prompt_tokens, account.generated_tokens, account.cached_tokens

    def charge(
        self,
        tenant: str,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """Count tokens; cached ones cost nothing.

        Prompt tokens are due when they are scheduled: charged only after their step, they would let
        one tenant take all the places that a step has free.
        """
        account = self.account(tenant)
        cost = self._input_cost * prompt_tokens + self._output_cost * generated_tokens
        account.counter += cost / account.policy.weight
        account.prompt_tokens += prompt_tokens
        account.generated_tokens += generated_tokens
        account.cached_tokens += cached_tokens

    def lift(self, tenant: str, level: float) -> None:
        """Raise the tenant's counter to at least `level`."""
        account = self.account(tenant)
        account.counter = max(account.counter, level)

    def forget(self, tenant: str) -> None:
        """Forget a tenant; if it comes back, it is a new one."""
        self._accounts.pop(tenant, None)

    def _known(self, tenant: str) -> Account:
        return self._accounts.get(tenant) or Account()
