"""What every route may use: the app's collaborators, in one frozen object that it did not make."""

from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from loraplex.engine.client import EngineClient
from loraplex.engine.images import BaseManifest
from loraplex.platform.bookkeeping import Books
from loraplex.platform.chat_template import ChatTemplate
from loraplex.platform.db.session import Database
from loraplex.platform.drain import Drain
from loraplex.platform.history import History
from loraplex.platform.key_cache import KeyCache
from loraplex.platform.keys import KeyRing
from loraplex.platform.limits import Limiter
from loraplex.platform.metrics import Metrics
from loraplex.platform.prefix_state import PrefixState
from loraplex.platform.resolving import Resolved
from loraplex.platform.scopes import Scopes
from loraplex.platform.settings import Settings
from loraplex.platform.text import Vocabulary
from loraplex.platform.throttle import Throttle
from loraplex.platform.traces import Traces
from loraplex.platform.upload_desk import Uploads
from loraplex.platform.uploads import Gate


@dataclass(frozen=True)
class Context:
    """The parts that a server is made of; `started_at` is seconds since the epoch."""

    settings: Settings
    base: BaseManifest
    vocabulary: Vocabulary
    template: ChatTemplate | None
    db: Database
    keys: KeyRing
    limiter: Limiter
    books: Books
    engine: EngineClient
    gate: Gate
    uploads: Uploads
    metrics: Metrics
    scopes: Scopes
    prefixes: PrefixState
    started_at: int
    names: KeyCache[Resolved] = field(default_factory=KeyCache[Resolved])
    history: History = field(default_factory=History)
    throttle: Throttle = field(default_factory=Throttle)
    drain: Drain = field(default_factory=Drain)
    traces: Traces = field(default_factory=Traces)

    @property
    def context_tokens(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ready = self.engine.info
        return ready.max_model_len if ready else self.base.max_position_embeddings


def get_context(request: Request) -> Context:
    """The context of the app that serves this request."""
    return cast("Context", request.app.state.context)


async def while_open(request: Request) -> None:
    """A dependency: the server takes new requests; raises `ServerStopping` once it does not."""
    get_context(request).drain.check_open()


def get_request_id(request: Request) -> str:
    """The id that the server gave this request."""
    return cast("str", request.state.request_id)


async def _context(request: Request) -> Context:
    return get_context(request)


async def _request_id(request: Request) -> str:
    return get_request_id(request)


# coroutines, because FastAPI runs plain functions on a thread, which costs more than they do
Ctx = Annotated[Context, Depends(_context)]
RequestId = Annotated[str, Depends(_request_id)]
