"""What a newcomer finds after the first start: a demo tenant, two keys, the example adapters.

Everything is made through the same code as by hand, and once: a key that still opens is kept, an
adapter that was published for this base or deleted on purpose is left alone. Knows the examples'
place and their base's shape; refuses to know HTTP.
"""

import shutil
from pathlib import Path

from sqlalchemy import or_, select

from loraplex.engine.images import BaseManifest
from loraplex.platform import credentials
from loraplex.platform.audit import SYSTEM
from loraplex.platform.console import Report
from loraplex.platform.credentials import Credentials
from loraplex.platform.db.models import Adapter, AdapterVersion, User
from loraplex.platform.db.session import Database
from loraplex.platform.errors import ApiError, Forbidden, InvalidKey
from loraplex.platform.keys import KeyRing
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.registry import list_adapters
from loraplex.platform.sign_in import LONGEST, invite
from loraplex.platform.tenants import create_tenant, find_tenant
from loraplex.platform.upload_desk import Uploads
from loraplex.platform.upload_parts import FILES, Part
from loraplex.platform.uploads import Gate
from loraplex.platform.users import create_user

TENANT = "demo"
OPERATOR = "operator"
LIMITS = TenantLimits(requests_per_minute=600, tokens_per_minute=200_000, max_concurrency=64)
TENANT_SCOPES = ("infer", "adapters:read", "adapters:write")
OPERATOR_SCOPES = ("admin", "adapters:read", "adapters:write")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "adapters"
PARTS: tuple[Part, ...] = ("adapter_config", "adapter_model")
SHAPE = (30, 576, 49_152)  # SmolLM2-135M's layers, hidden size and vocabulary


async def ensure_credentials(db: Database, keys: KeyRing, data_dir: Path, url: str) -> Credentials:
    """Return the demo tenant's and the operator's keys, made and kept at the first start."""
    kept = credentials.read(data_dir)
    async with db.session(None) as session:
        tenant = await find_tenant(session, TENANT) or await create_tenant(
            session, TENANT, LIMITS, actor=SYSTEM
        )
    api_key = kept.api_key if kept else None
    operator_key = kept.operator_key if kept else None
    found = Credentials(
        url=url,
        tenant_id=tenant.id,
        api_key=await _key(db, keys, api_key, tenant.id, TENANT_SCOPES),
        operator_key=await _key(db, keys, operator_key, None, OPERATOR_SCOPES),
    )
    if found != kept:
        credentials.write(data_dir, found)
    return found


async def first_sign_in(db: Database, keys: KeyRing) -> str | None:
    """A code that signs the first operator in once, made at every start until somebody has."""
    async with db.session(None) as session:
        if await session.scalar(select(User.id).where(User.signed_in_at.is_not(None)).limit(1)):
            return None
        known = await session.scalar(select(User).where(User.name == OPERATOR))
        user = known or await create_user(session, None, OPERATOR, "operator", actor=SYSTEM)
        code, _ = await invite(session, keys.peppers, user.id, LONGEST, actor=SYSTEM)
        return code


async def _key(
    db: Database, keys: KeyRing, kept: str | None, tenant_id: str | None, scopes: tuple[str, ...]
) -> str:
    """Return the kept key if it still belongs to this tenant (None: the operator), or a new one."""
    try:
        if (await keys.authenticate(db, kept)).tenant_id == tenant_id:
            return str(kept)
    except Forbidden:  # the key is right, but its tenant is suspended
        return str(kept)
    except InvalidKey:
        pass
    async with db.session(None) as session:
        _, secret = await keys.create(session, tenant_id, "first start", scopes, actor=SYSTEM)
    return secret


async def publish_examples(uploads: Uploads, tenant_id: str, report: Report) -> None:
    """Upload the example adapters that this base lacks, or say why there are none."""
    if not EXAMPLES.is_dir():
        report("the example adapters are not in this installation")
        return
    gate = uploads.gate
    if not fits(gate.base):
        report(f"the example adapters are for another base than {gate.base.name}")
        return
    done = await _settled(gate, tenant_id)
    for source in sorted(path for path in EXAMPLES.iterdir() if path.is_dir()):
        if source.name not in done:
            report(f"compiling {source.name}")
            await _publish(uploads, tenant_id, source, report)


def fits(base: BaseManifest) -> bool:
    """Whether the example adapters were trained on a base of this shape."""
    return (base.num_layers, base.hidden_size, base.vocab_size) == SHAPE


async def _settled(gate: Gate, tenant_id: str) -> set[str]:
    """Names that need no upload: published for this very base, or deleted."""
    statement = (
        select(Adapter.name)
        .outerjoin(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(or_(Adapter.deleted_at.is_not(None), AdapterVersion.base == gate.base.fingerprint))
    )
    async with gate.db.read(tenant_id) as session:
        return set(await session.scalars(statement))


async def _publish(uploads: Uploads, tenant_id: str, source: Path, report: Report) -> None:
    files = [source / FILES[part] for part in PARTS]
    size = sum(path.stat().st_size for path in files)
    async with uploads.draft(tenant_id, SYSTEM, size) as (draft, folder):
        for path in files:
            shutil.copyfile(path, folder.path / path.name)
        try:
            await uploads.publish(draft, source.name, SYSTEM)
        except ApiError as error:
            report(f"{source.name} was refused: {error.message}")


async def adapter_names(db: Database, tenant_id: str) -> list[str]:
    """Return the names that the tenant may give as a model, up to a hundred."""
    async with db.read(tenant_id) as session:
        return [adapter.name for adapter in (await list_adapters(session, tenant_id)).items]
