"""The server is killed while it receives and checks uploads: what it acknowledged is not lost."""

import hashlib
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fake_served
import httpx
import pytest
from fake_served import FakeServed, eventually, fake_serving

HOUSE = Path(__file__).resolve().parents[1] / "support" / "upload_house.py"
PATH = "/v1/uploads"
CONFIG = b'{"r": 8}'


@pytest.fixture(autouse=True)
def upload_house(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_served, "HOUSE", HOUSE)


def at(offset: int) -> dict[str, str]:
    return {"upload-offset": str(offset)}


def send_half(served: FakeServed, path: str, offset: int, content: bytes) -> socket.socket:
    """Announce these bytes and send half of them, over a connection that stays open."""
    address = urlsplit(served.url)
    connection = socket.create_connection((address.hostname, address.port))
    head = (
        f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {served.api_key}\r\n"
        f"Upload-Offset: {offset}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content[: len(content) // 2])
    eventually(lambda: size_of(served, path) > offset, "some of it is on the disk")
    return connection


def size_of(served: FakeServed, path: str) -> int:
    with served.client() as client:
        return int(client.head(path).headers["upload-offset"])


def begin(served: FakeServed, **wish: object) -> str:
    with served.client() as client:
        made = client.post(PATH, json={"name": "poet"} | wish)
        assert made.status_code == 201, made.text
        upload = made.json()["id"]
        config = f"{PATH}/{upload}/parts/adapter_config"
        assert client.put(config, content=CONFIG, headers=at(0)).is_success
    return str(upload)


def test_uploads_go_on_after_the_server_was_killed(tmp_path: Path) -> None:
    """One is in the midst of a part; the compiler hangs on the other, and dies with its server."""
    data = tmp_path / "data"
    content = b"".join(f"{number:x}".encode() for number in range(200_000))
    half = len(content) // 2
    with fake_serving(data) as served, served.client() as client:
        checked = begin(served, name="bard")
        client.put(f"{PATH}/{checked}/parts/adapter_model", content=b"slow", headers=at(0))
        assert client.post(f"{PATH}/{checked}/finish").status_code == 202
        eventually((data / "quarantine" / checked / "tried").exists, "the compiler has begun")
        compiler = served.child(b"fake_compiler.py")
        sent = begin(served, sha256={"adapter_model": hashlib.sha256(content).hexdigest()})
        part = f"{PATH}/{sent}/parts/adapter_model"
        assert client.put(part, content=content[:half], headers=at(0)).json()["offset"] == half
        with send_half(served, part, half, content[half:]):
            served.end(signal.SIGKILL)
    eventually(lambda: not _is_alive(compiler), "the compiler ended with its server")
    with fake_serving(data) as served, served.client() as client:
        reached = size_of(served, part)
        assert half <= reached < len(content)
        client.put(part, content=content[reached:], headers=at(reached))
        client.post(f"{PATH}/{sent}/finish")
        for upload, weights in ((checked, b"slow"), (sent, content)):
            done = eventually(partial(_ready, client, upload), "the upload is published")
            variants = done["report"]["variants"]
            image = hashlib.sha256(b"an image of " + weights)
            assert variants["bf16"]["digest"] == image.hexdigest()
            versions = client.get(f"/v1/adapters/{done['name']}/versions").json()["data"]
            assert [version["id"] for version in versions] == [done["version"]]
        eventually(lambda: not list((data / "quarantine").iterdir()), "nothing is left over")


def _ready(client: httpx.Client, upload: str) -> Any:
    shown = client.get(f"{PATH}/{upload}").json()
    return shown if shown.get("state") == "ready" else None


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
