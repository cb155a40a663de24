"""Users of the admin pages, and browsers without a browser in which they are signed in."""

from loraplex.platform.admin.sessions import open_session
from loraplex.platform.admin.visit import COOKIE
from loraplex.platform.audit import SYSTEM
from loraplex.platform.passwords import hash_password
from loraplex.platform.users import create_user, set_password

PASSWORD = "a long sentence is a good one"
OURS = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}
STRANGER, VIEWER, ADMIN, OPERATOR = "stranger", "viewer", "admin", "operator"


async def make_user(world, role, tenant="acme", name=None):
    """A user with the password, and its id."""
    tenant_id = None if role == OPERATOR else world.tenants[tenant]
    async with world.db.session(None) as session:
        user = await create_user(session, tenant_id, name or role, role, actor=SYSTEM)
    hashed = await hash_password(PASSWORD)
    async with world.db.session(None) as session:
        await set_password(session, user.id, hashed, actor=SYSTEM)
    return user.id


async def visitor(world, role, **options):
    """A browser in which a user of this role is signed in; a stranger where None is given."""
    client = world.client(None)
    client.headers.update(OURS | {"accept": "text/html"})
    if role != STRANGER:
        token = await open_session(world.db, await make_user(world, role, **options))
        client.headers["cookie"] = f"{COOKIE}={token}"
    return client
