"""`loraplex serve` with a scripted engine: the real server, database and Redis, and no model.

What is left of a request's time is the platform's own, and a fault test need not wait for weights.

    python benchmarks/fake_house.py --data-dir DIR [--base base.json] [--token-ms 5]

Options that are not named here are variables, as `LORAPLEX_DRAIN_S`. The base's tokenizer is that
of `--base`, else one whose tokens are single bytes. The engine says the prompt backwards, a token
each `--token-ms`. Prints the banner of `loraplex serve`; the demo tenant has an adapter `echo`.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from loraplex.engine.client import EngineClient
from loraplex.engine.client.fake import READY, FakeEngine
from loraplex.engine.images import BaseManifest
from loraplex.engine.protocol import Chunk, Event, Generate, Ready
from loraplex.platform import boot, demo, opening, serve
from loraplex.platform.audit import SYSTEM
from loraplex.platform.keys import KeyRing
from loraplex.platform.registry import add_version, list_adapters
from loraplex.platform.settings import Settings
from loraplex.platform.text import BYTE_ALPHABET
from loraplex.platform.upload_desk import Uploads

ADAPTER = "echo"
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class PacedEngine(FakeEngine):
    """A fake engine that says a token every so many seconds."""

    def __init__(self, info: Ready, token_s: float) -> None:
        super().__init__(info=info)
        self._token_s = token_s

    async def generate(self, request: Generate) -> AsyncGenerator[Event, None]:
        """Run a request as the script says, at the pace of a real engine."""
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    await asyncio.sleep(self._token_s)
                yield event


class FakeHouse(serve.House):
    """A house whose base is not prepared and whose engine is a script."""

    def __init__(self, settings: Settings, base: BaseManifest, token_s: float) -> None:
        super().__init__(settings)
        self._base, self._token_s = base, token_s

    async def _prepare(self) -> BaseManifest:
        return self._base

    def _opening(self, base: BaseManifest) -> "FakeOpening":
        made = FakeOpening(
            self._settings,
            base,
            self._base_file,
            steps=self._steps,
            stack=self._stack,
            drain=self._drain,
        )
        made.token_s = self._token_s
        return made


class FakeOpening(opening.Opening):
    """Opens a scripted engine, and publishes one adapter without an image."""

    token_s = 0.0

    async def _start_engine(self) -> EngineClient:
        info = msgspec.structs.replace(READY, base=self._base.fingerprint)
        return PacedEngine(info, self.token_s) if self.token_s else FakeEngine(info=info)

    async def _welcome(self, uploads: Uploads, keys: KeyRing, url: str) -> list[str]:
        db = uploads.gate.db
        found = await demo.ensure_credentials(db, keys, self._base_file.parents[1], url)
        async with db.session(found.tenant_id) as session:
            if not (await list_adapters(session, found.tenant_id)).items:
                await add_version(session, found.tenant_id, ADAPTER, **self._version())
        return opening.banner(found, [ADAPTER], self._base.name)

    def _version(self) -> dict[str, Any]:
        return {
            "digest": "a" * 64,
            "base": self._base.fingerprint,
            "base_name": self._base.name,
            "report": {"rank": 8, "bytes": 1000},
            "actor": SYSTEM,
        }


def make_base(folder: Path) -> BaseManifest:
    """A base without weights, whose tokens are the 256 bytes and one special end token."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_ALPHABET), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return BaseManifest(
        name="tiny-base",
        path=str(folder),
        fingerprint="0" * 64,
        num_layers=2,
        hidden_size=16,
        vocab_size=257,
        max_position_embeddings=READY.max_model_len,
        eos_token_ids=(256,),
        modules={"q_proj": (16, 16)},
    )


def read_base(file: Path) -> BaseManifest:
    """A prepared base, changed so that no example adapter is compiled for it."""
    kept = msgspec.json.decode(file.read_bytes(), type=BaseManifest)
    return msgspec.structs.replace(kept, num_layers=1)


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--base", type=Path, help="base.json of a prepared base")
    parser.add_argument("--token-ms", type=float, default=0.0)
    given = parser.parse_args()
    settings = boot.read_settings(data_dir=given.data_dir, port=given.port)
    base = read_base(given.base) if given.base else make_base(given.data_dir / "tiny-base")
    serve.live(FakeHouse(settings, base, given.token_ms / 1000))


if __name__ == "__main__":
    main()
