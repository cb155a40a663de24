"""Idempotency keys: what is sent twice is done once, and answered the same."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import select

from loraplex.platform.api import idempotent
from loraplex.platform.db.models import IdempotentRequest
from loraplex.platform.db.types import utc_now

pytestmark = pytest.mark.anyio

FILES = {"adapter_config": ("c", b'{"r": 8}'), "adapter_model": ("m", b"ok")}
KEY = {"Idempotency-Key": "once"}
SCOPES = ["infer"]


def same(first, second) -> bool:
    """Whether the second answer is the first one again, and says so."""
    assert idempotent.REPLAYED not in first.headers
    assert second.headers[idempotent.REPLAYED] == "true"
    return (first.status_code, first.json()) == (second.status_code, second.json())


async def rows(world) -> list[IdempotentRequest]:
    async with world.db.read(None) as session:
        return list(await session.scalars(select(IdempotentRequest)))


async def test_what_is_sent_twice_is_done_once(world):
    async with world.client("operator") as client:
        answers = [
            await client.post("/v1/tenants", json={"name": "twice"}, headers=KEY) for _ in range(2)
        ]
        assert answers[0].status_code == 201
        assert same(*answers)
        names = [row["name"] for row in (await client.get("/v1/tenants")).json()["data"]]
    assert names.count("twice") == 1


async def test_a_secret_is_told_once_and_kept_nowhere(world):
    async with world.client("acme") as client:
        body = {"name": "ci", "scopes": SCOPES}
        first, second = [await client.post("/v1/keys", json=body, headers=KEY) for _ in range(2)]
        kept = (await client.get("/v1/keys")).json()["data"]
    secret = first.json()["secret"]
    assert secret.startswith("lpx_")
    assert second.json() == first.json() | {"secret": None}
    assert [row["name"] for row in kept].count("ci") == 1
    (row,) = await rows(world)
    assert secret not in str(row.body)
    assert row.body["secret"] is None


async def test_a_key_means_one_request(world):
    async with world.client("acme") as client:
        body = {"name": "ci", "scopes": SCOPES}
        assert (await client.post("/v1/keys", json=body, headers=KEY)).status_code == 201
        other = body | {"name": "cd"}
        for path, sent in (("/v1/keys", other), ("/v1/uploads", body), ("/v1/keys?a=1", body)):
            refused = await client.post(path, json=sent, headers=KEY)
            assert refused.status_code == 409, path
            assert refused.json()["error"]["code"] == "idempotency_mismatch"
            assert refused.headers["x-should-retry"] == "false"
        new = await client.post("/v1/keys", json=other, headers={"Idempotency-Key": "another"})
        assert new.status_code == 201


async def test_a_key_is_its_senders_own(world):
    body = {"name": "poet"}
    async with world.client("acme") as ours, world.client("globex") as theirs:
        mine = await ours.post("/v1/uploads", json=body, headers=KEY)
        other = await theirs.post("/v1/uploads", json=body, headers=KEY)
    assert mine.json()["id"] != other.json()["id"]
    assert idempotent.REPLAYED not in other.headers


async def test_a_form_is_known_by_its_content_whatever_its_boundary(world):
    async with world.client("acme", timeout=60) as client:
        first, second = [
            await client.post("/v1/adapters", data={"name": "poet"}, files=FILES, headers=KEY)
            for _ in range(2)
        ]
        assert first.json()["id"] == "poet@1"
        assert same(first, second)
        for data, files in (
            ({"name": "bard"}, FILES),
            ({"name": "poet"}, FILES | {"adapter_model": ("m", b"no")}),
        ):
            other = await client.post("/v1/adapters", data=data, files=files, headers=KEY)
            assert other.json()["error"]["code"] == "idempotency_mismatch"
        shown = (await client.get("/v1/adapters/poet")).json()
    assert shown["version"] == 1


async def test_a_refusal_is_kept_but_not_what_time_or_rights_may_change(world):
    rejected = FILES | {"adapter_model": ("m", b"reject")}
    async with world.client("acme", timeout=60) as client:
        first, second = [
            await client.post("/v1/adapters", data={"name": "poet"}, files=rejected, headers=KEY)
            for _ in range(2)
        ]
        assert first.status_code == 422
        assert same(first, second)
        for sent, status in (({"name": "No"}, 400), ({"name": "poet"}, 201)):
            named = {"Idempotency-Key": "corrected"}
            answer = await client.post("/v1/uploads", json=sent, headers=named)
            assert answer.status_code == status
        crash = FILES | {"adapter_model": ("m", b"crash")}
        for files, status in ((crash, 500), (FILES, 201)):
            named = {"Idempotency-Key": "mended"}
            answer = await client.post(
                "/v1/adapters", data={"name": "poet"}, files=files, headers=named
            )
            assert answer.status_code == status


async def test_while_the_first_is_answered_the_second_is_told_to_come_back(world):
    hang = FILES | {"adapter_model": ("m", b"hang")}
    quarantine = world.settings.quarantine_dir
    async with world.client("acme", timeout=60) as client:
        sent = {"data": {"name": "poet"}, "files": hang, "headers": KEY}
        first = asyncio.create_task(client.post("/v1/adapters", **sent))
        await world.until(lambda: list(quarantine.glob("*/image-bf16.log")))
        second = await client.post("/v1/adapters", **sent)
        assert second.json()["error"]["code"] == "still_running"
        assert second.headers["retry-after"] == "1"
        assert second.headers["x-should-retry"] == "true"
        first.cancel()
        await asyncio.wait([first])
        sent["files"] = FILES
        assert (await client.post("/v1/adapters", **sent)).status_code == 201


async def test_what_a_dead_server_began_may_be_sent_again_and_a_day_later_all_is_new(world):
    async with world.client("acme") as client:
        made = await client.post("/v1/uploads", json={"name": "poet"}, headers=KEY)
        (row,) = await rows(world)
        body, hour = row.body, timedelta(hours=1)
        for hours, status, is_new in ((1, None, True), (23, 201, False), (25, 201, True)):
            async with world.db.session(None) as session:
                (kept,) = await session.scalars(select(IdempotentRequest))
                kept.created_at, kept.status = utc_now() - hours * hour, status
                kept.body = body if status else None
            again = await client.post("/v1/uploads", json={"name": "poet"}, headers=KEY)
            assert again.status_code == 201
            assert (idempotent.REPLAYED not in again.headers) == is_new
            assert (again.json()["id"] != made.json()["id"]) == is_new or not is_new


@pytest.mark.parametrize("name", ["", "x" * 256, "caf\u00e9"])
async def test_a_key_that_is_none_is_refused(world, name):
    async with world.client("acme") as client:
        headers = {"Idempotency-Key": name.encode()}
        answer = await client.post("/v1/uploads", json={"name": "poet"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_who_may_not_ask_is_refused_whatever_is_kept(world):
    reader = await world.make_key(world.tenants["acme"], "adapters:read")
    for key, status in ((reader, 403), ("lpx_none", 401), (None, 401)):
        async with world.client(key) as client:
            answer = await client.post("/v1/uploads", json={"name": "poet"}, headers=KEY)
        assert answer.status_code == status
    assert await rows(world) == []


async def test_a_generation_is_not_remembered(world):
    async with world.client("acme") as client:
        asked = {"model": world.base.name, "prompt": "a", "max_tokens": 1}
        answers = [await client.post("/v1/completions", json=asked, headers=KEY) for _ in range(2)]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert await rows(world) == []


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_boundary_is_cut_out_wherever_the_pieces_end(size):
    def digest(boundary: bytes) -> str:
        body = b"--" + boundary + b"\r\nabcabcab xyzxyzxy\r\n--" + boundary + b"--\r\n"
        kind = b"multipart/form-data; boundary=" + boundary
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "query_string": b"",
            "headers": [(b"content-type", kind), (b"content-length", b"%d" % len(body))],
        }
        seen = idempotent.Fingerprint(scope)
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        for number, piece in enumerate(pieces, 1):
            more = number < len(pieces)
            seen.see({"type": "http.request", "body": piece, "more_body": more})
        assert seen.is_whole
        return seen.text

    assert digest(b"abcabcabd") == digest(b"xyzxyzxyw") == digest(b"short")
