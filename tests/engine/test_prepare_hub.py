"""Preparing a base by its Hugging Face id, from a hub on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from loraplex.engine.checkpoint import tensor_shapes
from loraplex.engine.images import BaseManifest
from loraplex.engine.model.config import parse_model_config

COMMIT = "c" * 40
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 3,
}


def model_files() -> dict[str, bytes]:
    """A repository's files: the model, and others that Loraplex has no use for."""
    shapes = tensor_shapes(parse_model_config(CONFIG))
    tensors = {name: np.zeros(shape, np.float16) for name, shape in shapes}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": save(tensors),
        "tokenizer.json": b'{"added_tokens": []}',
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"the same weights again",
        "original/params.json": b"{}",
    }


@dataclass
class Hub:
    """A hub with one repository, `owner/tiny`, and a count of the files it was asked for."""

    files: dict[str, bytes]
    url: str = ""
    sent: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """Body and headers for a path, or None."""
        api = "/api/models/owner/tiny"
        if path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.files]
            body = {"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}
            return json.dumps(body).encode(), {}
        if path == f"{api}/tree/{COMMIT}":
            return json.dumps([self._entry(name) for name in self.files]).encode(), {}
        name = path.removeprefix(f"/owner/tiny/resolve/{COMMIT}/")
        if name not in self.files:
            return None
        return self.files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{self._oid(name)}"'}

    def _oid(self, name: str) -> str:
        return sha1(self.files[name], usedforsecurity=False).hexdigest()

    def _entry(self, name: str) -> dict[str, str | int]:
        size = len(self.files[name])
        return {"type": "file", "path": name, "size": size, "oid": self._oid(name)}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            answer = hub.answer(path)
            if answer is None:
                self.send_error(404)
                return
            body, headers = answer
            self.send_response(200)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
                hub.sent += [path.rpartition(COMMIT + "/")[2]] if "/resolve/" in path else []

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    content = Hub(model_files())
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(content)) as server:
        content.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield content
        server.shutdown()
        thread.join()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def run(model: str, out: Path, url: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url, "HF_HOME": str(out / "home")}
    command = [sys.executable, "-m", "loraplex.engine.prepare", model, "--out", str(out)]
    return subprocess.run(
        command,
        env=os.environ | settings | {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("model", ["owner/tiny", "owner/tiny@v1.0"])
def test_fetches_what_it_needs_once(model: str, hub: Hub, out: Path) -> None:
    done = run(model, out, hub.url)
    assert done.returncode == 0, done.stderr
    manifest = msgspec.json.decode((out / "base.json").read_bytes(), type=BaseManifest)
    assert (manifest.name, manifest.num_layers, manifest.eos_token_ids) == ("tiny", 1, (3,))
    assert sorted(hub.sent) == ["config.json", "model.safetensors", "tokenizer.json"]
    again = run(model, out, "http://127.0.0.1:9")
    assert again.returncode == 0, again.stderr
    assert "downloading" not in again.stderr


def test_a_lost_download_is_fetched_again(hub: Hub, out: Path) -> None:
    run("owner/tiny", out, hub.url)
    manifest = msgspec.json.decode((out / "base.json").read_bytes(), type=BaseManifest)
    weights = Path(manifest.path) / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    assert run("owner/tiny", out, hub.url).returncode == 0
    assert hub.sent.count("model.safetensors") == 2


@pytest.mark.parametrize("case", ["unknown", "unreachable"])
def test_a_failed_download_is_one_sentence(case: str, hub: Hub, out: Path) -> None:
    unknown = case == "unknown"
    model, url = ("owner/other", hub.url) if unknown else ("owner/tiny", "http://127.0.0.1:9")
    done = run(model, out, url)
    assert done.returncode == 2
    assert f"{model} cannot be downloaded" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
