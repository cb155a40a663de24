"""Spoiled adapters through the real POST and compiler: answered with reasons, never with a 5xx."""

import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.upload_desk import open_uploads
from loraplex.platform.upload_run import LiveTrial

pytestmark = pytest.mark.anyio

FUZZ = Path(__file__).resolve().parents[1] / "fuzz" / "__main__.py"
PARTS = {"adapter_config.json": "adapter_config", "adapter_model.safetensors": "adapter_model"}


@pytest.fixture(scope="module")
def fuzz() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FUZZ)))


async def test_a_spoiled_adapter_is_answered_with_reasons(world, fuzz, tmp_path):
    base = fuzz.Gate(tmp_path).base
    (tmp_path / "base.json").write_bytes(msgspec.json.encode(base))
    compiler = AdapterCompiler(tmp_path / "base.json", timeout_s=60)
    gate = replace(world.gate, max_bytes=fuzz.MAX_BYTES, compiler=compiler, base=base)
    trial = LiveTrial(world.engine, world.app.state.context.vocabulary, base.name)
    uploads = open_uploads(world.settings, gate, trial)
    world.app.state.context = replace(world.app.state.context, gate=gate, uploads=uploads)
    seen = {}
    async with world.client("acme", timeout=120) as client:
        for i in range(8):
            case = fuzz.HOSTILE["make"](f"2:{i}")
            files = {PARTS[name]: (name, content) for name, content in case.files.items()}
            if case.archive is not None:
                files = {"archive": ("a.zip", case.archive)}
            answer = await client.post("/v1/adapters", data={"name": "fuzzed"}, files=files)
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
            assert answer.status_code in (201, 413, 422), (i, case.done, answer.text)
            if answer.status_code == 422:
                reasons = answer.json()["error"]["reasons"]
                assert all(reason["code"] and reason["message"] for reason in reasons)
                assert "parity_failed" not in {reason["code"] for reason in reasons}
    assert min(seen[201], seen[422]) > 0
    assert not [p for p in world.settings.data_dir.rglob("*") if p.name in PARTS], "all is swept"
