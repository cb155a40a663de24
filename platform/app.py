"""Puts the API together from parts that others made and own.

Knows routers, middleware and their order; refuses to start, stop or configure a part.
"""

import functools
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fastapi import APIRouter, Depends, FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.routing import BaseRoute
from starlette.staticfiles import StaticFiles

from loraplex.engine.client import EngineClient
from loraplex.engine.images import BaseManifest
from loraplex.platform.admin.screens import SCREENS
from loraplex.platform.api import (
    adapters,
    aliases,
    audit,
    bases,
    cache,
    documented,
    failures,
    generate,
    health,
    idempotent,
    keys,
    messages,
    models,
    quota,
    responses,
    site,
    storage,
    tenants,
    uploads,
    usage,
    users,
    versions,
    vllm,
)
from loraplex.platform.api.auth import KeyFirst, guard
from loraplex.platform.api.context import Context, while_open
from loraplex.platform.api.envelope import AllowedHosts, BoundedBody, Envelope
from loraplex.platform.api.short_way import DEMANDS
from loraplex.platform.api.slow_body import PromptBody
from loraplex.platform.bookkeeping import Books
from loraplex.platform.chat_template import ChatTemplate
from loraplex.platform.db.session import Database
from loraplex.platform.drain import Drain
from loraplex.platform.keys import KeyRing
from loraplex.platform.limits import Limiter
from loraplex.platform.metrics import Metrics
from loraplex.platform.prefix_state import PrefixState
from loraplex.platform.scopes import Scopes
from loraplex.platform.settings import Settings
from loraplex.platform.text import Vocabulary
from loraplex.platform.traces import Traces
from loraplex.platform.upload_desk import open_uploads
from loraplex.platform.upload_run import LiveTrial
from loraplex.platform.uploads import Gate
from loraplex.web.pages import STATIC

ROUTERS = (
    generate,
    responses,
    messages,
    models,
    adapters,
    uploads,
    versions,
    aliases,
    bases,
    audit,
    tenants,
    keys,
    users,
    quota,
    usage,
    cache,
    storage,
    vllm,
    health,
    site,
)
NO_TELEMETRY: Final[TelemetryConfig] = {  # the framework's own: ours is `traces`
    "tracing": False,
    "metrics": False,
    "logs": False,
}
EVERYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 (compared with, not bound to)


def create_app(
    settings: Settings,
    *,
    base: BaseManifest,
    db: Database,
    keys: KeyRing,
    limiter: Limiter,
    books: Books,
    engine: EngineClient,
    gate: Gate,
    prefixes: PrefixState,
    drain: Drain | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """The ASGI app; all its parts are ready or will become so, and outlive it.

    Reads the base's tokenizer and chat template; raises `FileNotFoundError` or `ValueError` when
    they are missing or broken.
    """
    model_dir = Path(base.path)
    vocabulary = Vocabulary(model_dir)
    context = Context(
        settings=settings,
        base=base,
        vocabulary=vocabulary,
        template=ChatTemplate.load(model_dir),
        db=db,
        keys=keys,
        limiter=limiter,
        books=books,
        engine=engine,
        gate=gate,
        uploads=open_uploads(settings, gate, LiveTrial(engine, vocabulary, base.name)),
        metrics=Metrics(engine, settings.metrics_tenants, settings.metrics_adapters),
        scopes=Scopes(settings.scope_key(), settings.share_base, settings.share_public),
        prefixes=prefixes,
        started_at=int(time.time()),
        drain=drain or Drain(),
        traces=traces or Traces(),
    )
    app = FastAPI(
        title="Loraplex",
        version=version("loraplex"),
        summary="OpenAI's and Anthropic's APIs for many LoRA adapters on one base model.",
        docs_url=None,
        redoc_url=None,
        telemetry=NO_TELEMETRY,
        routes=[*routes()],
    )
    app.state.context = context
    db.renamed.append(context.names.clear)
    context.metrics.watch_quotas(lambda: limiter.is_degraded)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    routers = [module.router for module in ROUTERS]
    failures.install(app, routers)
    idempotent.install(app)
    documented.install(app, routers)
    _surround(app, context, allowed_hosts(settings))
    return app


@functools.cache
def routes() -> Sequence[BaseRoute]:
    """All routes, with what each depends on: worked out at its first request, in any app."""
    every = APIRouter(generate_unique_id_function=documented.operation_id)
    for module in ROUTERS:
        demands = [Depends(demand) for demand in _demands(module)]
        every.include_router(module.router, dependencies=demands)
    for screen in SCREENS:
        every.include_router(screen.router, dependencies=[Depends(while_open), Depends(guard)])
    return every.routes


def _demands(module: ModuleType) -> Sequence[Callable[..., Any]]:
    """The dependencies of all of a module's routes."""
    if module in (generate, responses, messages):
        return DEMANDS
    open_only = () if module is health else (while_open,)
    return (*open_only, guard, idempotent.once)


def _surround(app: FastAPI, context: Context, hosts: Sequence[str]) -> None:
    """Add middleware; the one that is added last sees a request first."""
    app.add_middleware(KeyFirst)
    app.add_middleware(PromptBody)
    app.add_middleware(BoundedBody)
    app.add_middleware(AllowedHosts, hosts=hosts)
    app.add_middleware(
        Envelope, metrics=context.metrics, drain=context.drain, traces=context.traces
    )


def allowed_hosts(settings: Settings) -> list[str]:
    """Hosts that the server answers to: any, where it listens everywhere and none is named."""
    named = [host.strip() for host in (settings.allowed_hosts or "").split(",") if host.strip()]
    if settings.host in EVERYWHERE and not named:
        return ["*"]
    return ["localhost", "127.0.0.1", "::1", settings.host, *named]
