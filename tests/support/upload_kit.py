"""Uploads in parts over the API, as tests make them, with weights that `fake_compiler` reads."""

import hashlib
from dataclasses import replace
from typing import Any

import httpx

from loraplex.platform.upload_desk import Uploads
from loraplex.platform.upload_jobs import Bounds
from loraplex.platform.upload_run import LiveTrial

PATH = "/v1/uploads"
CONFIG = b'{"r": 8}'
CHECKS = ["received", "unpacked", "config", "weights", "compiled", "canary", "published"]


def digest_of(weights: str, dtype: str = "bf16") -> str:
    """The digest of the image that the fake compiler makes."""
    image = f"an image of {weights}" + ("" if dtype == "bf16" else f" in {dtype}")
    return hashlib.sha256(image.encode()).hexdigest()


def at(offset: int) -> dict[str, str]:
    """The header that says where bytes begin."""
    return {"upload-offset": str(offset)}


async def begin(
    client: httpx.AsyncClient, weights: bytes = b"ok", config: bytes = CONFIG, **wish: Any
) -> str:
    """Begin an upload and send its parts; returns its id."""
    made = await client.post(PATH, json={"name": "poet"} | wish)
    assert made.status_code == 201, made.text
    upload = made.json()["id"]
    for part, content in (("adapter_config", config), ("adapter_model", weights)):
        path = f"{PATH}/{upload}/parts/{part}"
        sent = await client.put(path, content=content, headers=at(0))
        assert sent.status_code == 200, sent.text
    return str(upload)


async def finish(client: httpx.AsyncClient, upload: str) -> dict[str, Any]:
    """Finish an upload and wait for what becomes of it."""
    answer = await client.post(f"{PATH}/{upload}/finish", params={"wait": True})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def bounded(world: Any, *, lease_s: float = 15, patience_s: float = 60, **bounds: Any) -> Uploads:
    """Replace the world's uploads by ones with other bounds, as if the server had started anew."""
    ctx = world.app.state.context
    trial = LiveTrial(world.engine, ctx.vocabulary, world.base.name)
    kept = Bounds(**({"max_open": 8, "max_bytes": 1 << 20, "ttl_s": 3600} | bounds))
    made = Uploads(world.gate, trial, kept, lease_s=lease_s, patience_s=patience_s)
    world.app.state.context = replace(ctx, uploads=made)
    return made
