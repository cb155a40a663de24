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

from loraplex.engine.images import ImageStore
from loraplex.platform.settings import Settings

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


def begin(client: httpx.Client, **wish: object) -> str:
    made = client.post(PATH, json={"name": "poet"} | wish)
    assert made.status_code == 201, made.text
    upload = made.json()["id"]
    config = f"{PATH}/{upload}/parts/adapter_config"
    assert client.put(config, content=CONFIG, headers=at(0)).is_success
    return str(upload)


def finish(client: httpx.Client, upload: str, weights: bytes) -> None:
    client.put(f"{PATH}/{upload}/parts/adapter_model", content=weights, headers=at(0))
    assert client.post(f"{PATH}/{upload}/finish").status_code == 202


def begin_what_is_refused_later(served: FakeServed, store: ImageStore) -> tuple[str, str]:
    """An upload whose image is being tried, and its tenant's key, whose storage is used up now."""
    with served.client(served.said["Operator key"]) as operator:
        tenant = operator.post("/v1/tenants", json={"name": "poor"}).json()["id"]
        scopes = ["adapters:read", "adapters:write"]
        body = {"name": "test", "tenant_id": tenant, "scopes": scopes}
        key = operator.post("/v1/keys", json=body).json()["secret"]
        with served.client(key) as client:
            finish(client, upload := begin(client), b"ok")
        eventually(lambda: digest_of(b"ok") in store, "the image is in the store")
        changed = operator.patch(f"/v1/tenants/{tenant}", json={"storage_bytes": 1})
        assert changed.is_success, changed.text
    return upload, key


def digest_of(weights: bytes) -> str:
    return hashlib.sha256(b"an image of " + weights).hexdigest()


def test_uploads_go_on_after_the_server_was_killed(tmp_path: Path) -> None:
    """One is in the midst of a part; the compiler hangs on the other, and dies with its server.

    A third is being tried in an engine that says no token. It is refused by the next process, and
    its image leaves the store.
    """
    data = tmp_path / "data"
    content = b"".join(f"{number:x}".encode() for number in range(200_000))
    half = len(content) // 2
    store = ImageStore(Settings(data_dir=data).image_store)
    with fake_serving(data, token_ms=3_600_000) as served, served.client() as client:
        refused, key = begin_what_is_refused_later(served, store)
        finish(client, checked := begin(client, name="bard"), b"slow")
        eventually((data / "quarantine" / checked / "tried").exists, "the compiler has begun")
        compiler = served.child(b"fake_compiler.py")
        sent = begin(client, sha256={"adapter_model": hashlib.sha256(content).hexdigest()})
        part = f"{PATH}/{sent}/parts/adapter_model"
        assert client.put(part, content=content[:half], headers=at(0)).json()["offset"] == half
        with send_half(served, part, half, content[half:]):
            served.end(signal.SIGKILL)
    eventually(lambda: not _is_alive(compiler), "the compiler ended with its server")
    assert digest_of(b"ok") in store
    with fake_serving(data) as served, served.client() as client, served.client(key) as poor:
        reached = size_of(served, part)
        assert half <= reached < len(content)
        client.put(part, content=content[reached:], headers=at(reached))
        client.post(f"{PATH}/{sent}/finish")
        for upload, weights in ((checked, b"slow"), (sent, content)):
            done = eventually(partial(_in_state, client, upload, "ready"), "it is published")
            assert done["report"]["variants"]["bf16"]["digest"] == digest_of(weights)
            versions = client.get(f"/v1/adapters/{done['name']}/versions").json()["data"]
            assert [version["id"] for version in versions] == [done["version"]]
        done = eventually(partial(_in_state, poor, refused, "rejected"), "it is refused")
        assert done["reasons"][0]["code"] == "insufficient_quota"
        assert digest_of(b"ok") not in store
        eventually(lambda: not list((data / "quarantine").iterdir()), "nothing is left over")


def _in_state(client: httpx.Client, upload: str, state: str) -> Any:
    """The upload once it is in this state; whatever it is in, asking for it never fails."""
    answer = client.get(f"{PATH}/{upload}")
    assert answer.status_code == 200, answer.text
    return answer.json() if answer.json()["state"] == state else None


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
