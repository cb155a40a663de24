"""What has no page below /admin: an error's page for people, where the API's answer is JSON.

Knows nothing but that it is matched last.
"""

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.visit import PATH, Visiting
from loraplex.platform.errors import NotFound

router = APIRouter(prefix=PATH, route_class=PageRoute, include_in_schema=False)


@router.get("/{rest:path}")
async def show_nothing(visit: Visiting, rest: str) -> Response:
    """Raise `NotFound`."""
    raise NotFound("There is no such page. The screens are in the menu.")
