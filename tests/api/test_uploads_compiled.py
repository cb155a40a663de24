"""Uploads through the real compiler, for the demo base."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from loraplex.engine.images import read_header
from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.uploads import Gate, Upload

pytestmark = pytest.mark.anyio

CONFIG = b"""{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
"layers_to_transform": [0], "base_model_name_or_path": "somewhere", "task_type": "CAUSAL_LM"}"""
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def weights(hidden: int, **changes: np.ndarray) -> bytes:
    """A rank-4 adapter of the first layer's query projection."""
    random = np.random.default_rng(0)
    tensors = {
        f"{PREFIX}.lora_A.weight": random.normal(size=(4, hidden)).astype(np.float32),
        f"{PREFIX}.lora_B.weight": random.normal(size=(hidden, 4)).astype(np.float32),
    }
    return save(tensors | changes)


@pytest.fixture
def gate(world, demo_base, demo_base_file: Path) -> Gate:
    compiler = AdapterCompiler(demo_base_file, timeout_s=120)
    return Gate(
        world.settings.quarantine_dir, 1 << 30, compiler, world.gate.store, world.db, demo_base
    )


async def publish(gate: Gate, tenant_id: str, content: bytes):
    async with gate.folder() as folder:
        (folder / "adapter_config.json").write_bytes(CONFIG)
        (folder / "adapter_model.safetensors").write_bytes(content)
        upload = Upload("poet", folder, frozenset({"adapter_config", "adapter_model"}))
        return await gate.publish(tenant_id, upload)


async def test_a_lora_becomes_an_image_under_its_digest(world, gate, demo_base, tmp_path):
    version = await publish(gate, world.tenants["acme"], weights(demo_base.hidden_size))
    assert (version.number, version.rank) == (1, 4)
    assert version.report["modules"] == {"q_proj": 1}
    with gate.store.fetch(version.digest, tmp_path).open("rb") as file:
        header = read_header(file)
    assert header.base == demo_base.fingerprint
    assert version.image_bytes > header.block_bytes
    again = await publish(gate, world.tenants["acme"], weights(demo_base.hidden_size))
    assert (again.number, again.digest) == (2, version.digest)


async def test_what_is_wrong_with_weights_is_told_through_the_api(world, gate, demo_base):
    world.app.state.context = replace(world.app.state.context, gate=gate)
    wrong = weights(demo_base.hidden_size, **{f"{PREFIX}.lora_A.weight": np.zeros((4, 7), "f4")})
    async with world.client("acme", timeout=120) as client:
        for content in (wrong, b"\x80\x04 a pickle", b""):
            files = {"adapter_config": ("c", CONFIG), "adapter_model": ("m", content)}
            answer = await client.post("/v1/adapters", data={"name": "poet"}, files=files)
            assert answer.status_code == 422, answer.text
            assert answer.json()["error"]["reasons"]
