"""Puts the API together from parts that others made and own.

Knows routers, middleware and their order; refuses to start, stop or configure a part.
"""

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from starlette.staticfiles import StaticFiles

from loraplex.engine.client import EngineClient
from loraplex.engine.images import BaseManifest
from loraplex.platform.api import (
    adapters,
    aliases,
    cache,
    failures,
    generate,
    health,
    keys,
    models,
    site,
    tenants,
    usage,
)
from loraplex.platform.api.context import Context
from loraplex.platform.api.envelope import AllowedHosts, BoundedBody, Envelope
from loraplex.platform.chat_template import ChatTemplate
from loraplex.platform.db.session import Database
from loraplex.platform.keys import KeyRing
from loraplex.platform.limits import Limiter
from loraplex.platform.metrics import Metrics
from loraplex.platform.prefix_state import PrefixState
from loraplex.platform.scopes import Scopes
from loraplex.platform.settings import Settings
from loraplex.platform.text import Vocabulary
from loraplex.platform.uploads import Gate
from loraplex.web.pages import STATIC

ROUTERS = (generate, models, adapters, aliases, tenants, keys, usage, cache, health, site)
EVERYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 (compared with, not bound to)


def create_app(
    settings: Settings,
    *,
    base: BaseManifest,
    db: Database,
    keys: KeyRing,
    limiter: Limiter,
    engine: EngineClient,
    gate: Gate,
    prefixes: PrefixState,
) -> FastAPI:
    """The ASGI app; all its parts are ready or will become so, and outlive it.

    Reads the base's tokenizer and chat template; raises `FileNotFoundError` or `ValueError` when
    they are missing or broken.
    """
    model_dir = Path(base.path)
    context = Context(
        settings=settings,
        base=base,
        vocabulary=Vocabulary(model_dir),
        template=ChatTemplate.load(model_dir),
        db=db,
        keys=keys,
        limiter=limiter,
        engine=engine,
        gate=gate,
        metrics=Metrics(engine, settings.metrics_tenants),
        scopes=Scopes(settings.scope_key(), settings.share_base, settings.share_public),
        prefixes=prefixes,
        started_at=int(time.time()),
    )
    app = FastAPI(
        title="Loraplex",
        version=version("loraplex"),
        summary="OpenAI's API for many LoRA adapters on one base model.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    for module in ROUTERS:
        app.include_router(module.router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    failures.install(app)
    _surround(app, context.metrics, allowed_hosts(settings))
    return app


def _surround(app: FastAPI, metrics: Metrics, hosts: Sequence[str]) -> None:
    """Add middleware; the one that is added last sees a request first."""
    app.add_middleware(BoundedBody)
    app.add_middleware(AllowedHosts, hosts=hosts)
    app.add_middleware(Envelope, metrics=metrics)


def allowed_hosts(settings: Settings) -> list[str]:
    """Hosts that the server answers to: any, where it listens everywhere and none is named."""
    named = [host.strip() for host in (settings.allowed_hosts or "").split(",") if host.strip()]
    if settings.host in EVERYWHERE and not named:
        return ["*"]
    return ["localhost", "127.0.0.1", "::1", settings.host, *named]
