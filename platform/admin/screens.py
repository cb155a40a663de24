"""All admin routers, in the order in which they are matched."""

from typing import Final

from loraplex.platform.admin import (
    adapters,
    keys,
    nowhere,
    overview,
    playground,
    records,
    sign_in_pages,
    system,
    tenants,
    uploads,
    users,
)

SCREENS: Final = (
    sign_in_pages,
    overview,
    adapters,
    uploads,
    playground,
    keys,
    tenants,
    users,
    records,
    system,
    nowhere,
)
