"""vLLM's routes for adapters: its bodies and words, our gate, and no file outside the folder."""

import dataclasses
import os
from pathlib import Path

import pytest

from loraplex.platform.adapter_folder import open_files

pytestmark = pytest.mark.anyio
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NAMES = ("adapter_config.json", "adapter_model.safetensors")


def write(folder: Path, weights: str = "ok") -> Path:
    folder.mkdir(parents=True)
    for name, text in zip(NAMES, ('{"r": 8}', weights), strict=True):
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def root(world, tmp_path):
    """The operator's folder, which the server is told of."""
    root = tmp_path / "adapters"
    root.mkdir()
    context = world.app.state.context
    allowed = context.settings.model_copy(update={"adapter_dir": root})
    world.app.state.context = dataclasses.replace(context, settings=allowed)
    return root


@pytest.fixture
async def client(world):
    async with world.client("acme", timeout=60) as opened:
        yield opened
    assert list(world.settings.quarantine_dir.iterdir()) == []


async def test_a_folder_is_published_and_the_name_is_deleted_again(world, client, root):
    write(root / "acme" / "poet")
    loaded = await client.post(LOAD, json={"lora_name": "poet", "lora_path": "poet"})
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'poet' added successfully."
    answer = await client.post("/v1/completions", json={"model": "poet", "prompt": "a"})
    assert answer.json()["model"] == "poet@1"
    unloaded = await client.post(UNLOAD, json={"lora_name": "poet", "lora_int_id": 1})
    assert unloaded.status_code == 200
    assert unloaded.text == "Success: LoRA adapter 'poet' removed successfully."
    assert unloaded.headers["content-type"].startswith("text/plain")
    gone = await client.post("/v1/completions", json={"model": "poet", "prompt": "a"})
    assert gone.status_code == 404


async def test_a_name_that_is_there_is_loaded_again_only_in_place(client, root):
    body = {"lora_name": "poet", "lora_path": str(write(root / "acme" / "poet"))}
    assert (await client.post(LOAD, json=body)).status_code == 200
    again = await client.post(LOAD, json=body)
    assert again.status_code == 400
    assert "has already been loaded" in again.json()["error"]["message"]
    in_place = await client.post(LOAD, json=body | {"load_inplace": True})
    assert in_place.status_code == 200
    assert (await client.get("/v1/adapters/poet")).json()["version"] == 2


async def test_a_name_that_is_not_there_cannot_be_unloaded(world, client, root):
    await world.add_adapter("globex", "poet")
    answer = await client.post(UNLOAD, json={"lora_name": "poet"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The lora adapter 'poet' cannot be found."


async def test_the_gate_is_the_same(client, root):
    write(root / "acme" / "bad", "reject")
    answer = await client.post(LOAD, json={"lora_name": "poet", "lora_path": "bad"})
    assert answer.status_code == 422
    reasons = [reason["code"] for reason in answer.json()["error"]["reasons"]]
    assert reasons == ["weights_nan", "module_unknown"]
    assert (await client.get("/v1/adapters/poet")).status_code == 404


async def test_an_operator_may_use_the_whole_folder_for_a_tenant(world, client, root):
    write(root / "shared" / "poet")
    tenant = {"tenant_id": world.tenants["acme"]}
    body = {"lora_name": "poet", "lora_path": "shared/poet"}
    async with world.client("operator", timeout=60) as operator:
        assert (await operator.post(LOAD, json=body, params=tenant)).status_code == 200
        assert (await operator.post(LOAD, json=body)).status_code == 400
    assert (await client.get("/v1/adapters/poet")).status_code == 200


async def test_without_a_folder_nothing_is_loaded(client):
    answer = await client.post(LOAD, json={"lora_name": "poet", "lora_path": "poet"})
    assert answer.status_code == 404
    assert "LORAPLEX_ADAPTER_DIR" in answer.json()["error"]["message"]


@pytest.mark.parametrize("missing", ["lora_name", "lora_path"])
async def test_both_fields_are_needed(client, root, missing):
    body = {"lora_name": "poet", "lora_path": "poet"}
    answer = await client.post(LOAD, json={k: v for k, v in body.items() if k != missing})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == missing


async def test_nothing_outside_the_callers_folder_is_read(client, root, tmp_path):
    outside = write(tmp_path / "outside")
    other = write(root / "globex" / "poet")
    own = write(root / "acme" / "own")
    (root / "acme" / "link").symlink_to(outside)
    (root / "acme" / "loop").symlink_to(root / "acme" / "loop")
    for name, folder in (("half", outside), ("pipe", own)):
        (root / "acme" / name).mkdir()
        (root / "acme" / name / NAMES[0]).symlink_to(folder / NAMES[0])
    os.mkfifo(root / "acme" / "pipe" / NAMES[1])
    (root / "acme" / "half" / NAMES[1]).symlink_to(own / NAMES[1])
    paths = [
        *(str(path) for path in (outside, other, "/", "/etc/passwd", root)),
        *("../globex/poet", "../../outside", "link", "loop", "half", "pipe", "absent", "."),
        *("a\0b", "x" * 4000, "own/../../globex/poet"),
    ]
    messages = set()
    for path in paths:
        answer = await client.post(LOAD, json={"lora_name": "poet", "lora_path": path})
        assert answer.status_code == 404, path
        error = answer.json()["error"]
        assert error["param"] == "lora_path"
        messages.add(error["message"].partition("'. ")[2])
    assert len(messages) == 1  # what is there and what is not look alike


def test_links_below_the_root_are_followed(tmp_path):
    """As in a Hugging Face cache, whose snapshots are links to blobs."""
    blobs = write(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for name in NAMES:
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    opened = open_files(tmp_path, "snapshots/main", dict(zip("ab", NAMES, strict=True)))
    for (_, descriptor), name in zip(opened.items(), NAMES, strict=True):
        assert os.read(descriptor, 100) == (blobs / name).read_bytes()
        os.close(descriptor)
