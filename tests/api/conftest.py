"""A whole API in one event loop: real SQLite, real Redis, a fake engine, real sockets on demand."""

import asyncio
import inspect
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from redis.asyncio import Redis
from sqlalchemy import select
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from loraplex.engine.client.fake import READY, FakeEngine
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.platform.app import create_app
from loraplex.platform.audit import SYSTEM
from loraplex.platform.bookkeeping import Books
from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.db.models import UsageRecord
from loraplex.platform.db.session import Database
from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.ids import new_id
from loraplex.platform.key_terms import SCOPES
from loraplex.platform.keys import KeyRing
from loraplex.platform.limits import Limiter, connect
from loraplex.platform.prefix_state import PrefixState
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.registry import add_version
from loraplex.platform.settings import Settings
from loraplex.platform.tenants import create_tenant
from loraplex.platform.text import BYTE_ALPHABET
from loraplex.platform.uploads import Gate
from loraplex.platform.usage_journal import Journal

BASE = "tiny-base"
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
RING = KeyRing(b"a pepper for tests")
FAKE_COMPILER = Path(__file__).with_name("fake_compiler.py")


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> BaseManifest:
    """A base without weights, whose tokens are the 256 bytes and one special end token."""
    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = dict(BYTE_ALPHABET)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return BaseManifest(
        name=BASE,
        path=str(folder),
        fingerprint="0" * 64,
        num_layers=2,
        hidden_size=16,
        vocab_size=257,
        max_position_embeddings=READY.max_model_len,
        eos_token_ids=(256,),
        modules={"q_proj": (16, 16)},
    )


async def new_key(session: Any, tenant_id: str | None, *scopes: str, **terms: Any) -> str:
    """Make a key and return its secret."""
    _, secret = await RING.create(session, tenant_id, "test", scopes, actor=SYSTEM, **terms)
    return secret


@dataclass(frozen=True)
class Seed:
    """A database file with two tenants, and a key for each and for an operator."""

    file: Path
    tenants: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    async def fill(self) -> None:
        db = Database(f"sqlite+aiosqlite:///{self.file}")
        await db.migrate()
        async with db.session(None) as session:
            for name in ("acme", "globex"):
                self.tenants[name] = (await create_tenant(session, name, actor=SYSTEM)).id
                self.keys[name] = await new_key(session, self.tenants[name], *SCOPES)
            scopes = ("admin", "adapters:read", "adapters:write")
            self.keys["operator"] = await new_key(session, None, *scopes)
        await db.dispose()


@pytest.fixture(scope="session")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Seed:
    made = Seed(tmp_path_factory.mktemp("seed") / "loraplex.db")
    anyio.run(made.fill)
    return made


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    folder = tmp_path_factory.mktemp("redis")
    with EmbeddedRedis(folder / "data", folder / "run") as server:
        yield server


class Tap:
    """A `hold` for the fake engine that lets so many tokens out, and more when told to."""

    def __init__(self, tokens: int) -> None:
        self._permits = asyncio.Semaphore(tokens)

    async def wait(self) -> None:
        await self._permits.acquire()

    def release(self) -> None:
        self._permits.release()


@dataclass
class World:
    """One API with its parts, two tenants (`acme`, `globex`) and an operator, keys by name."""

    settings: Settings
    base: BaseManifest
    db: Database
    limiter: Limiter
    engine: FakeEngine
    gate: Gate
    prefixes: PrefixState
    app: FastAPI
    tenants: dict[str, str]
    keys: dict[str, str]

    async def add_tenant(self, name: str, limits: TenantLimits | None = None) -> str:
        """Make a tenant and a key `name` that may do all a tenant's key can."""
        async with self.db.session(None) as session:
            tenant = await create_tenant(session, name, limits, actor=SYSTEM)
        self.tenants[name] = tenant.id
        self.keys[name] = await self.make_key(tenant.id, *SCOPES)
        return tenant.id

    async def make_key(self, tenant_id: str | None, *scopes: str, **terms: Any) -> str:
        async with self.db.session(None) as session:
            return await new_key(session, tenant_id, *scopes, **terms)

    async def add_adapter(self, tenant: str, name: str, digest: str = "a" * 64) -> str:
        """Publish a version without an image; returns its immutable id."""
        async with self.db.session(self.tenants[tenant]) as session:
            version = await add_version(
                session,
                self.tenants[tenant],
                name,
                digest=digest,
                base=self.base.fingerprint,
                base_name=self.base.name,
                report={"rank": 8, "bytes": 1000},
                actor=SYSTEM,
            )
        return f"{name}@{version.number}"

    def hold_to(self, limiter: Limiter) -> None:
        """Have this limiter admit from now on, and settle."""
        context = self.app.state.context
        books = Books(self.db, limiter, context.books._journal)
        self.limiter, self.app.state.context = (
            limiter,
            replace(context, limiter=limiter, books=books),
        )

    def client(self, key: str | None = "acme", **options: Any) -> httpx.AsyncClient:
        """A client of the app without a socket, with the key of that name (None: no key)."""
        transport = httpx.ASGITransport(app=self.app)
        headers = {"authorization": f"Bearer {self.keys.get(key, key)}"} if key else {}
        return httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers, **options
        )

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The app behind a real socket; yields its URL."""
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task

    @asynccontextmanager
    async def sdk(self, key: str = "acme", **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        """The official SDK, unmodified, over a real socket."""
        async with self.listening() as url:
            base_url, api_key = f"{url}/v1", self.keys.get(key, key)
            options = {"max_retries": 0} | options
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, **options) as client:
                yield client

    def tap(self, tokens: int) -> Tap:
        """Let the engine say so many tokens, and no more until `release`."""
        self.engine.hold = Tap(tokens)
        return self.engine.hold

    async def until(self, probe: Callable[[], Any], seconds: float = 20) -> Any:
        """Ask until the answer, which may have to be awaited, is true; then return it."""
        async with asyncio.timeout(seconds):
            while True:
                answer = probe()
                if answer := await answer if inspect.isawaitable(answer) else answer:
                    return answer
                await asyncio.sleep(0.005)

    async def records(self, tenant_id: str | None = None) -> list[UsageRecord]:
        """The ledger, with what is still to be written: of a tenant, or of all."""
        await self.app.state.context.books.flush()
        async with self.db.read(tenant_id) as session:
            return list(await session.scalars(select(UsageRecord)))

    async def usage_rows(self, tenant: str = "acme") -> list[dict[str, Any]]:
        """Totals of a tenant by adapter, as the API tells them."""
        async with self.client(tenant) as client:
            return (await client.get("/v1/usage")).json()["data"]


@pytest.fixture
async def redis(redis_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A patient client: what is under test is not this machine's speed."""
    client = connect(redis_server.url, timeout_s=10.0)
    yield client
    await client.aclose()


@pytest.fixture
async def world(
    tiny_base: BaseManifest, seed: Seed, redis: Redis, tmp_path: Path
) -> AsyncIterator[World]:
    settings = Settings(data_dir=tmp_path, max_upload_bytes=1 << 20)
    settings.open_data_dir()
    shutil.copy(seed.file, tmp_path / "loraplex.db")
    db, limiter, engine = Database(settings.database), Limiter(redis), FakeEngine()
    command = (sys.executable, str(FAKE_COMPILER))
    gate = Gate(
        quarantine=settings.quarantine_dir,
        max_bytes=settings.max_upload_bytes,
        compiler=AdapterCompiler(tmp_path / "base.json", timeout_s=20, command=command),
        store=ImageStore(settings.image_store),
        db=db,
        base=tiny_base,
    )
    prefixes = PrefixState(redis, new_id("rep"), engine)
    books = Books(db, limiter, Journal(redis, settings.journal, timeout_s=10.0))
    app = create_app(
        settings,
        base=tiny_base,
        db=db,
        keys=RING,
        limiter=limiter,
        books=books,
        engine=engine,
        gate=gate,
        prefixes=prefixes,
    )
    tenants, keys, uploads = dict(seed.tenants), dict(seed.keys), app.state.context.uploads
    yield World(settings, tiny_base, db, limiter, engine, gate, prefixes, app, tenants, keys)
    await uploads.close()
    await app.state.context.books.flush()
    await db.dispose()
