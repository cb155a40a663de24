"""Whose things a caller asks for: a tenant's own, or those of the tenant that an operator names.

Knows callers and tenants' ids; refuses to know what is asked for.
"""

from loraplex.platform.errors import NotFound
from loraplex.platform.keys import Principal


def administered(principal: Principal, named: str | None) -> str | None:
    """The tenant that a request is about; None, all of them, where an operator names none.

    Raises `NotFound` where a tenant's key names another tenant.
    """
    own = principal.tenant_id
    if own is None:
        return named
    if named not in (None, own):
        raise NotFound(f"There is no tenant {named!r}.")
    return own
