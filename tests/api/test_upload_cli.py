"""The command that uploads: through connections that break, with every check and every reason."""

import asyncio
import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from anyio import to_thread
from typer.testing import CliRunner

from loraplex.platform.cli import app, sending

pytestmark = pytest.mark.anyio


class Way:
    """A way to `url` that breaks `times` connections, each after so many bytes of requests."""

    def __init__(self, url: str, after: int, times: float) -> None:
        self._there, self._after, self._left = urlsplit(url), after, times
        self.broke = asyncio.Event()

    async def pass_on(self, reader, writer) -> None:
        breaks, self._left = self._left > 0, self._left - 1
        host, port = self._there.hostname, self._there.port
        back_reader, back_writer = await asyncio.open_connection(host, port)
        limit = self._after if breaks else None
        there = asyncio.create_task(self._pump(reader, back_writer, limit))
        back = asyncio.create_task(self._pump(back_reader, writer, None))
        await asyncio.wait([there, back])

    async def _pump(self, reader, writer, limit: int | None) -> None:
        with contextlib.suppress(ConnectionError):
            while (limit is None or limit > 0) and (data := await reader.read(4096)):
                writer.write(data)
                await writer.drain()
                limit = None if limit is None else limit - len(data)
        writer.close()
        if limit is not None and limit <= 0:
            self._after = 0 if self._left == math.inf else self._after
            self.broke.set()


@asynccontextmanager
async def breaking(url: str, after: int, times: float = math.inf) -> AsyncIterator[tuple[str, Way]]:
    """The URL of such a way, and itself; where it breaks all, those after the first at once."""
    way = Way(url, after, times)
    server = await asyncio.start_server(way.pass_on, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", way
    assert way.broke.is_set(), "no connection broke"


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
    async with world.listening() as url, breaking(url, 60_000, times=3) as (way, _):
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


MAIN = "from loraplex.platform.cli import main; main()"
WEIGHTS = "".join(f"{i:x}" for i in range(30_000))


async def left_over(world, said: str) -> tuple[list[str], dict]:
    """The command that an interrupted one says to go on with, without the URL, and the upload."""
    shown = re.search("To go on with it:\n  loraplex (.+)\n", said)
    assert shown, said
    words = shlex.split(shown[1])
    place = words.index("--url")
    del words[place : place + 2]
    async with world.client("acme") as client:
        upload = (await client.get(f"/v1/uploads/{words[words.index('--resume') + 1]}")).json()
    assert f"The upload is {upload['id']}." in said
    assert upload["state"] == "uploading"
    assert world.keys["acme"] not in said
    return words, upload


async def test_an_upload_that_was_cut_off_is_gone_on_with_by_another_run(
    world, adapter, monkeypatch
):
    monkeypatch.setattr(sending, "PIECE", 40_000)
    monkeypatch.setattr(sending, "PAUSES_S", (0.0,) * 3)
    folder = adapter(WEIGHTS)
    async with world.listening() as url:
        async with breaking(url, 60_000) as (way, _):
            words = ("adapters", "upload", "poet", str(folder), "--alias", "prod")
            cut = await run(world, way, *words, "--url", way)
            assert (cut.exit_code, sending.GONE in cut.stderr) == (1, True)
        words, upload = await left_over(world, cut.stderr)
        parts = {part["part"]: part for part in upload["parts"]}
        assert 0 < parts["adapter_model"]["offset"] < len(WEIGHTS)
        digest = hashlib.sha256(WEIGHTS.encode()).hexdigest()
        assert parts["adapter_model"]["sha256"] == digest
        for _ in range(2):  # a second time it is published already
            done = await run(world, url, *words, "--json")
            assert json.loads(done.stdout)["id"] == "poet@1", done.stderr
    async with world.client("acme") as client:
        (alias,) = (await client.get("/v1/adapters/poet/aliases")).json()["data"]
    assert alias["id"] == "poet@prod"


async def test_ctrl_c_says_how_to_go_on(world, adapter):
    folder = adapter(WEIGHTS)
    async with world.listening() as url:
        async with breaking(url, 60_000) as (way, itself):
            line = [sys.executable, "-c", MAIN, "adapters", "upload", "poet"]
            process = await asyncio.create_subprocess_exec(
                *(*line, str(folder), "--url", way),
                env=os.environ | {"LORAPLEX_API_KEY": world.keys["acme"]},
                stderr=asyncio.subprocess.PIPE,
            )
            await itself.broke.wait()
            process.send_signal(signal.SIGINT)
            _, said = await process.communicate()
        words, _ = await left_over(world, said.decode())
        done = await run(world, url, *words)
    assert (process.returncode, done.exit_code) == (130, 0), (said, done.output)


async def test_only_the_same_adapter_is_gone_on_with(world, adapter):
    folder = adapter("ok")
    announced = hashlib.sha256(b"ok").hexdigest()
    body = {"name": "poet", "sizes": {"adapter_model": 2}, "sha256": {"adapter_model": announced}}
    async with world.client("acme") as client, world.listening() as url:
        upload = (await client.post("/v1/uploads", json=body)).json()["id"]
        weights = folder / "adapter_model.safetensors"

        async def refusal(name: str, *more: str, resume: str = upload) -> str:
            words = ("adapters", "upload", name, str(folder), "--resume", resume, *more)
            done = await run(world, url, *words)
            assert done.exit_code == 1
            return done.stderr

        for other in ("no", "ok."):
            weights.write_text(other)
            assert f"{weights} is not the file" in " ".join((await refusal("poet")).split())
        weights.write_text("ok")
        assert "is of the adapter 'poet', not of 'bard'" in await refusal("bard")
        assert "There is no upload" in await refusal("poet", resume="upl_nobody")
        assert "leave --alias" in await refusal("poet", "--alias", "prod")
        await client.delete(f"/v1/uploads/{upload}")
        told = await refusal("poet")
        assert f"The upload {upload} is cancelled." in told
        assert "To go on" not in told


async def test_a_key_that_is_bound_to_an_adapter_is_enough(world, adapter):
    terms = {"adapters": ["poet"]}
    scopes = ("adapters:read", "adapters:write")
    secret = await world.make_key(world.tenants["acme"], *scopes, **terms)
    folder = str(adapter("ok"))
    async with world.listening() as url:
        for name, code in (("poet", 0), ("bard", 1)):
            words = ("adapters", "upload", name, folder, "--api-key", secret)
            done = await run(world, url, *words)
            assert done.exit_code == code, done.output
    assert "'bard' is none of them" in done.stderr


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
