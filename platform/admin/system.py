"""The system's own state, for operators: what is up, what the engine runs on, which settings hold.

Knows parts and settings; refuses to show a secret.
"""

import json
from collections.abc import Iterator

from fastapi import APIRouter, Request
from starlette.responses import Response

from loraplex.platform.admin.route import PageRoute
from loraplex.platform.admin.shell import page, shell
from loraplex.platform.admin.visit import PATH, Operating
from loraplex.platform.api.context import Context, Ctx
from loraplex.platform.api.health import CHECKS, check_parts
from loraplex.platform.redaction import Redactor
from loraplex.platform.settings import Settings
from loraplex.web.contexts.records import PartRow, SystemPage
from loraplex.web.contexts.shell import Badge
from loraplex.web.words import of_bytes, of_count

router = APIRouter(prefix=PATH, route_class=PageRoute, include_in_schema=False)


@router.get("/system")
async def show_system(request: Request, ctx: Ctx, visit: Operating) -> Response:
    """The screen."""
    found = await check_parts(ctx)
    context = SystemPage(
        shell=shell(request, visit, "System"),
        health=tuple(_part(name, found[name], ctx) for name in CHECKS),
        engine=tuple(_engine(ctx)),
        settings=tuple(settings_shown(ctx.settings)),
    )
    return page(context)


def _part(name: str, state: str, ctx: Context) -> PartRow:
    details = {
        "database": "SQLite" if ctx.db.is_sqlite else "PostgreSQL",
        "redis": "embedded" if ctx.settings.redis_url is None else "at its URL",
        "engine": ctx.engine.info.executor if ctx.engine.info else "starting",
    }
    badge = Badge("up", "good") if state == "ok" else Badge("down", "bad")
    return PartRow(name.capitalize() if name != "redis" else "Redis", badge, details.get(name, ""))


def _engine(ctx: Context) -> Iterator[tuple[str, str]]:
    ready, stats = ctx.engine.info, ctx.engine.stats
    if ready is None:
        yield "State", "starting"
        return
    yield "Base", ctx.base.name
    yield "Fingerprint", f"{ctx.base.fingerprint[:16]}…"
    yield "Executor", f"{ready.executor} on {ready.device}, {ready.dtype}"
    yield "Context", f"{of_count(ready.max_model_len)} tokens"
    yield "Sequences at once", of_count(ready.max_num_seqs)
    yield "KV blocks", f"{of_count(stats.kv_blocks_used)} of {of_count(stats.kv_blocks_total)}"
    yield (
        "Swap",
        f"{of_count(stats.swap_blocks_used)} of {of_count(stats.swap_blocks_total)} blocks",
    )
    yield "Adapters in memory", f"{stats.images_resident}, {of_bytes(stats.image_bytes)}"
    yield "Steps", of_count(stats.steps)
    yield "Preemptions", of_count(stats.preemptions)


def settings_shown(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Every setting by its variable, as it may be shown, and what it means."""
    redact = Redactor(*settings.given_secrets)
    for name, value in settings.model_dump(mode="json").items():
        meaning = Settings.model_fields[name].description or ""
        shown = "–" if value in (None, "", {}, []) else redact(_as_set(value))
        yield f"LORAPLEX_{name.upper()}", shown, meaning


def _as_set(value: object) -> str:
    """A setting's value as its variable has it."""
    return value if isinstance(value, str) else json.dumps(value)
