"""The gate on a real model: what the canary makes of good adapters and of bad ones.

Images that the compiler would refuse are built by hand and put into the running server's store.
"""

import json
import os
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from loraplex.engine.client.local import LocalEngine
from loraplex.engine.image_builder import ImageBuilder, SliceData
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.engine.protocol import Finished, Generate, Sampling
from loraplex.platform import canary
from loraplex.platform.boot import ENGINE_SOCKET
from loraplex.platform.errors import AdapterRejected, ImageUnusable
from loraplex.platform.settings import Settings
from loraplex.platform.sockets import socket_path
from loraplex.platform.text import Vocabulary

pytestmark = pytest.mark.anyio
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
NAMES = ("adapter_config", "adapter_model")
READY_S = 60.0


@pytest.fixture
async def engine(served):
    """A second client of the running server's engine."""
    run = Settings(data_dir=served.data_dir).run_dir
    client = LocalEngine(f"ipc://{socket_path(run, ENGINE_SOCKET)}")
    await client.start()
    await client.wait_ready(READY_S)
    yield client
    await client.close()


def bf16(value: float, count: int) -> bytes:
    bits = np.full(count, value, np.float32).view(np.uint32) >> 16
    return bits.astype("<u2").tobytes()


def image(
    base: BaseManifest,
    folder: Path,
    *,
    a: float,
    b: float,
    fingerprint: str | None = None,
    invocation: tuple[int, ...] = (),
) -> tuple[Path, str]:
    """An image of rank 1 on the first layer's values, all of A and of B the same number."""
    builder = ImageBuilder(fingerprint or base.fingerprint, "bf16", invocation)
    q, k, v = (base.modules[name][1] for name in ("q_proj", "k_proj", "v_proj"))
    slices = [SliceData(0, q), SliceData(0, k), SliceData(1, v, bf16(b, v))]
    scale = np.ones(1, "<f4").tobytes()
    builder.add(0, "qkv", base.hidden_size, bf16(a, base.hidden_size), scale, slices)
    path = folder / "image.safetensors"
    return path, builder.finish(path)


@pytest.fixture
def tried(served, demo_base, engine, tmp_path):
    """Puts an image into the server's store and tries it; removes it afterwards."""
    store = ImageStore(Settings(data_dir=served.data_dir).image_store)
    vocabulary = Vocabulary(Path(demo_base.path))

    async def tried(**of: object) -> canary.CanaryReport:
        path, digest = image(demo_base, tmp_path, **of)
        store.put(path, digest)
        try:
            return await canary.try_image(
                engine, vocabulary, digest, of.get("invocation", ()), base_name=demo_base.name
            )
        finally:
            store.delete(digest)

    return tried


async def test_a_slight_effect_is_enough(tried) -> None:
    report = await tried(a=0.01, b=0.01)
    assert 1e-4 < report.max_delta < 1
    assert 0 < report.kl < 0.01
    assert report.load_ms > 0


async def test_an_activated_adapter_has_its_effect_behind_its_invocation(tried) -> None:
    report = await tried(a=0.1, b=0.1, invocation=(100, 200))
    assert report.max_delta > 1e-3


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"a": 0.5, "b": 0.0}, "no_effect"),
        ({"a": 1e-12, "b": 1e-12}, "no_effect"),
        ({"a": 1e38, "b": 1e38}, "output_not_finite"),
        ({"a": 0.01, "b": 0.01, "fingerprint": "f" * 64}, "image_mismatch"),
    ],
)
async def test_a_bad_image_is_refused_with_its_word(tried, of, reason) -> None:
    with pytest.raises(AdapterRejected) as refused:
        await tried(**of)
    assert [each["code"] for each in refused.value.reasons] == [reason]


async def test_an_image_that_is_not_there_is_our_fault(served, demo_base, engine) -> None:
    vocabulary = Vocabulary(Path(demo_base.path))
    with pytest.raises(ImageUnusable):
        await canary.try_image(engine, vocabulary, "ab" * 32, base_name=demo_base.name)


def test_the_demo_adapters_passed_and_their_reports_say_how_far_they_move(served) -> None:
    with served.http(served.api_key) as client:
        for name in served.adapters:
            report = client.get(f"/v1/adapters/{name}/versions/1").json()["report"]
            states = {check["name"]: check["state"] for check in report["checks"]}
            assert set(states.values()) == {"passed"}, states
            found = report["canary"]
            assert found["tokens_changed"] > 0.3
            assert found["kl"] > 0.05
            assert found["text"] != found["base_text"]


def send(client: httpx.Client, name: str, change) -> httpx.Response:
    """Upload the pirate with its tensors changed."""
    source = EXAMPLES / "pirate"
    tensors = safetensors.torch.load_file(source / "adapter_model.safetensors")
    weights = safetensors.torch.save({key: change(key, x) for key, x in tensors.items()})
    config = (source / "adapter_config.json").read_bytes()
    files = dict(zip(NAMES, (("c", config), ("m", weights)), strict=True))
    return client.post("/v1/adapters", data={"name": name}, files=files)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda key, x: x * 0 if "lora_B" in key else x, "no_effect"),
        (lambda key, x: torch.full_like(x, 1e30), "output_not_finite"),
    ],
    ids=["zero", "huge"],
)
def test_an_upload_that_cannot_serve_is_refused_and_leaves_nothing(served, change, reason) -> None:
    store = ImageStore(Settings(data_dir=served.data_dir).image_store)
    before = {file.name for file in store.files()}
    with served.http(served.new_tenant(f"gate-{reason.replace('_', '-')}")) as client:
        answer = send(client, "bad", change)
        assert answer.status_code == 422, answer.text
        assert [each["code"] for each in answer.json()["error"]["reasons"]] == [reason]
        assert client.get("/v1/adapters/bad").status_code == 404
    assert {file.name for file in store.files()} == before


async def test_a_deletion_drains(served, engine) -> None:
    """A stream goes on, and a request that was resolved before the deletion begins after it."""
    store = ImageStore(Settings(data_dir=served.data_dir).image_store)
    key = served.new_tenant("drained")
    with served.http(key) as client, served.http(served.operator_key) as operator:
        digest = send(client, "brief", lambda _, x: x * 0.9).json()["digest"]
        path = store.fetch(digest, served.data_dir)
        os.utime(path, (1, 1))
        body = {"model": "brief", "prompt": "a", "max_tokens": 200, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            assert client.delete("/v1/adapters/brief").status_code == 200
            assert client.post("/v1/completions", json=body).status_code == 404
            collected = operator.post("/v1/storage/collect", json={}).json()
            assert digest not in collected["digests"]
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert sum(line.startswith("data: {") for line in rest) > 100
    late = Generate("late", (1, 2, 3), Sampling(4, ignore_eos=True), digest, tenant="late")
    last = [event async for event in engine.generate(late)][-1]
    assert isinstance(last, Finished), last
    assert digest in store


def test_the_commands_show_and_clear_the_store(served, house) -> None:
    def run(*words: str) -> str:
        line = [house.command, "storage", *words, "--data-dir", str(served.data_dir)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rows = {row["name"]: row for row in json.loads(run("show", "--json"))}
    assert len(served.adapters) <= rows["demo"]["images"] <= rows["demo"]["adapters"]
    assert rows["demo"]["bytes"] > 1 << 20
    assert json.loads(run("collect", "--dry-run", "--json"))["dry_run"] is True
    assert "demo" in run("show")
