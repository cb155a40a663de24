"""What every route may use: the app's collaborators, in one frozen object that it did not make."""

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from loraplex.engine.client import EngineClient
from loraplex.engine.images import BaseManifest
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
    engine: EngineClient
    gate: Gate
    metrics: Metrics
    scopes: Scopes
    prefixes: PrefixState
    started_at: int

    @property
    def context_tokens(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ready = self.engine.info
        return ready.max_model_len if ready else self.base.max_position_embeddings


def get_context(request: Request) -> Context:
    """The context of the app that serves this request."""
    return cast("Context", request.app.state.context)


def get_request_id(request: Request) -> str:
    """The id that the server gave this request."""
    return cast("str", request.state.request_id)


Ctx = Annotated[Context, Depends(get_context)]
RequestId = Annotated[str, Depends(get_request_id)]
