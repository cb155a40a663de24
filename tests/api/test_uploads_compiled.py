"""Uploads through the real compiler, for the demo base."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from loraplex.engine.images import read_header
from loraplex.platform.audit import SYSTEM
from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.upload_desk import Uploads, open_uploads
from loraplex.platform.upload_run import LiveTrial

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
async def uploads(world, demo_base, demo_base_file: Path) -> Uploads:
    """The world's uploads, for the demo base and through the real compiler."""
    compiler = AdapterCompiler(demo_base_file, timeout_s=120)
    gate = replace(world.gate, max_bytes=1 << 30, compiler=compiler, base=demo_base)
    trial = LiveTrial(world.engine, world.app.state.context.vocabulary, demo_base.name)
    made = open_uploads(world.settings, gate, trial)
    world.app.state.context = replace(world.app.state.context, gate=gate, uploads=made)
    return made


async def publish(uploads: Uploads, tenant_id: str, content: bytes):
    async with uploads.draft(tenant_id, SYSTEM, len(content)) as (draft, folder):
        folder.file("adapter_config").write_bytes(CONFIG)
        folder.file("adapter_model").write_bytes(content)
        return await uploads.publish(draft, "poet", SYSTEM)


async def test_a_lora_becomes_an_image_under_its_digest(world, uploads, demo_base, tmp_path):
    version = await publish(uploads, world.tenants["acme"], weights(demo_base.hidden_size))
    assert (version.number, version.rank) == (1, 4)
    assert version.report["modules"] == {"q_proj": 1}
    with uploads.gate.store.fetch(version.digest, tmp_path).open("rb") as file:
        header = read_header(file)
    assert header.base == demo_base.fingerprint
    assert version.image_bytes > header.block_bytes
    again = await publish(uploads, world.tenants["acme"], weights(demo_base.hidden_size))
    assert (again.number, again.digest) == (2, version.digest)


async def test_what_is_wrong_with_weights_is_told_through_the_api(world, uploads, demo_base):
    wrong = weights(demo_base.hidden_size, **{f"{PREFIX}.lora_A.weight": np.zeros((4, 7), "f4")})
    async with world.client("acme", timeout=120) as client:
        for content in (wrong, b"\x80\x04 a pickle", b""):
            files = {"adapter_config": ("c", CONFIG), "adapter_model": ("m", content)}
            answer = await client.post("/v1/adapters", data={"name": "poet"}, files=files)
            assert answer.status_code == 422, answer.text
            assert answer.json()["error"]["reasons"]
