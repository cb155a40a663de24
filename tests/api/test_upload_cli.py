"""The command that uploads: through connections that break, with every check and every reason."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from anyio import to_thread
from typer.testing import CliRunner

from loraplex.platform.cli import app, sending

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def breaking(url: str, after: int, times: int) -> AsyncIterator[str]:
    """A way to `url` that breaks so many connections, each after so many bytes of requests."""
    address, left = urlsplit(url), times

    async def pump(reader, writer, limit: int | None) -> None:
        with contextlib.suppress(ConnectionError):
            while (limit is None or limit > 0) and (data := await reader.read(4096)):
                writer.write(data)
                await writer.drain()
                limit = None if limit is None else limit - len(data)
        writer.close()

    async def pass_on(reader, writer) -> None:
        nonlocal left
        breaks, left = left > 0, left - 1
        back_reader, back_writer = await asyncio.open_connection(address.hostname, address.port)
        there = asyncio.create_task(pump(reader, back_writer, after if breaks else None))
        back = asyncio.create_task(pump(back_reader, writer, None))
        await asyncio.wait([there, back])

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert left <= 0, "no connection broke"


@pytest.fixture
def adapter(tmp_path):
    """A folder with an adapter, which is what the fake compiler reads in the weights."""

    def make(weights: str):
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / "adapter_config.json").write_text('{"r": 8}')
        (folder / "adapter_model.safetensors").write_text(weights)
        return folder

    return make


async def run(world, url: str, *words: str):
    settings = {"LORAPLEX_URL": url, "LORAPLEX_API_KEY": world.keys["acme"]}
    return await to_thread.run_sync(lambda: CliRunner(env=settings).invoke(app, [*words]))


async def test_an_upload_goes_on_where_the_connection_broke(world, adapter, monkeypatch):
    monkeypatch.setattr(sending, "PIECE", 40_000)
    monkeypatch.setattr(sending, "PAUSES_S", (0.01,) * 8)
    weights = "".join(f"{i:x}" for i in range(30_000))
    async with world.listening() as url, breaking(url, after=60_000, times=3) as way:
        words = ("adapters", "upload", "poet", str(adapter(weights)), "--alias", "prod", "--json")
        done = await run(world, way, *words, "--variant", "bf16", "--variant", "int8")
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["id"] == "poet@1"
        listed = await run(world, url, "uploads", "list", "--json")
    (upload,) = json.loads(listed.stdout)
    assert (upload["state"], upload["alias"]) == ("ready", "prod")
    assert upload["variants"] == ["bf16", "int8"]
    for check in ("received", "weights", "canary", "published"):
        assert f"{check}: passed" in done.stderr


async def test_a_refusal_is_told_check_by_check_with_every_reason(world, adapter):
    async with world.listening() as url:
        done = await run(world, url, "adapters", "upload", "poet", str(adapter("reject")))
        (upload,) = (await run(world, url, "uploads", "list", "--state", "rejected")).stdout.split(
            "\n"
        )[1:-1]
        shown = await run(world, url, "uploads", "show", upload.split()[0])
    assert done.exit_code == 1
    for said in (done.stderr, shown.stderr):
        assert "weights: failed" in said
        assert "- A weight is NaN. Train again.\n- There is no module x_proj." in said
    assert "rejected" in shown.stdout


async def test_an_upload_is_cancelled(world):
    async with world.client("acme") as client:
        made = (await client.post("/v1/uploads", json={"name": "poet"})).json()
        async with world.listening() as url:
            for _ in range(2):
                done = await run(world, url, "uploads", "cancel", made["id"])
                assert done.stdout == f"{made['id']} is cancelled\n"
        shown = (await client.get(f"/v1/uploads/{made['id']}")).json()
    assert shown["state"] == "cancelled"
