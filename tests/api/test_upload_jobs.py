"""Uploads in parts: offsets, checks one by one, reasons, variants, cancelling."""

import hashlib

import pytest
from sqlalchemy import select
from upload_kit import CHECKS, CONFIG, PATH, at, begin, bounded, digest_of, finish

from loraplex.platform.archive import REQUIRED
from loraplex.platform.db.models import ImageVariant

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(world):
    async with world.client("acme", timeout=60) as opened:
        yield opened


async def test_parts_become_a_version_and_every_check_is_told(world, client):
    made = await client.post(PATH, json={"name": "poet", "alias": "prod"})
    upload = made.json()
    assert (made.status_code, upload["state"], upload["parts"]) == (201, "uploading", [])
    assert upload["expires_at"] == upload["created_at"] + 86_400
    part = f"{PATH}/{upload['id']}/parts/adapter_model"
    for offset, piece in ((0, b"o"), (1, b""), (1, b"k")):
        sent = await client.put(part, content=piece, headers=at(offset))
        assert sent.headers["upload-offset"] == str(offset + len(piece))
        assert sent.json()["offset"] == offset + len(piece)
    config = f"{PATH}/{upload['id']}/parts/adapter_config"
    await client.put(config, content=CONFIG, headers=at(0))
    shown = (await client.get(f"{PATH}/{upload['id']}")).json()
    assert {part["part"]: part["offset"] for part in shown["parts"]} == {
        "adapter_config": len(CONFIG),
        "adapter_model": 2,
    }
    accepted = await client.post(f"{PATH}/{upload['id']}/finish")
    assert (accepted.status_code, accepted.json()["state"]) == (202, "validating")
    done = await finish(client, upload["id"])
    assert (done["state"], done["version"], done["reasons"]) == ("ready", "poet@1", [])
    assert [check["name"] for check in done["checks"]] == CHECKS
    assert {check["state"] for check in done["checks"]} == {"passed"}
    report = done["report"]
    assert report["variants"] == {"bf16": {"digest": digest_of("ok"), "bytes": 14}}
    assert report["canary"]["max_delta"] > 0
    assert report["coverage"] == {"q_proj": {"layers": 2, "of": 2}}
    version = (await client.get("/v1/adapters/poet/versions/1")).json()
    assert version["report"] == report
    answer = await client.post("/v1/completions", json={"model": "poet@prod", "prompt": "a"})
    assert answer.json()["model"] == "poet@1"
    assert not (world.settings.quarantine_dir / upload["id"]).exists()


async def test_a_wrong_offset_is_refused_and_told(client):
    made = await client.post(PATH, json={"name": "poet"})
    part = f"{PATH}/{made.json()['id']}/parts/archive"
    await client.put(part, content=b"12345", headers=at(0))
    for offset in (0, 4, 6):
        refused = await client.put(part, content=b"x", headers=at(offset))
        assert (refused.status_code, refused.headers["upload-offset"]) == (409, "5")
        assert refused.json()["error"]["code"] == "wrong_offset"
    for method in (client.get, client.head):
        told = await method(part)
        assert (told.status_code, told.headers["upload-offset"]) == (200, "5")
    missing = await client.put(part, content=b"x")
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "Upload-Offset")


async def test_two_requests_never_write_one_part_at_once(world, client):
    made = (await client.post(PATH, json={"name": "poet"})).json()
    folder = world.gate.folder(made["id"])
    writer = folder.open("archive", 0, 10)
    part = f"{PATH}/{made['id']}/parts/archive"
    busy = await client.put(part, content=b"x", headers=at(0))
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "still_running")
    writer.close()
    assert (await client.put(part, content=b"x", headers=at(0))).status_code == 200


async def test_what_was_announced_is_held_to(client):
    sizes, good = {"adapter_config": len(CONFIG), "adapter_model": 2}, hashlib.sha256(b"ok")
    told = {"sizes": sizes, "sha256": {"adapter_model": good.hexdigest()}}
    upload = await begin(client, **told)
    more = await client.put(f"{PATH}/{upload}/parts/adapter_model", content=b"x", headers=at(2))
    assert more.status_code == 413
    assert (await finish(client, upload))["state"] == "ready"
    damaged = await finish(client, await begin(client, b"on", **told))
    assert (damaged["state"], damaged["reasons"][0]["code"]) == ("rejected", "part_corrupt")
    assert damaged["checks"][0] | {"seconds": 0, "at": 0} == {
        "name": "received",
        "state": "failed",
        "seconds": 0,
        "at": 0,
        "detail": {"codes": ["part_corrupt"]},
    }


async def test_an_upload_that_is_not_complete_is_not_finished(client):
    made = (await client.post(PATH, json={"name": "poet", "sizes": {"archive": 9}})).json()
    path = f"{PATH}/{made['id']}"
    for part, says in ((None, "There are none"), ("archive", "1 of 9"), ("adapter_config", "are")):
        if part:
            await client.put(f"{path}/parts/{part}", content=b"x", headers=at(0))
        refused = await client.post(f"{path}/finish")
        assert refused.status_code == 409
        assert says in refused.json()["error"]["message"]
    assert (await client.get(path)).json()["state"] == "uploading"


async def test_a_part_that_was_announced_is_waited_for(client):
    """What is announced is checked in the end, so that it cannot be left out."""
    for told in ({"sizes": {"archive": 9}}, {"sha256": {"archive": "0" * 64}}):
        upload = await begin(client, **told)
        refused = await client.post(f"{PATH}/{upload}/finish")
        assert refused.status_code == 409
        assert "archive was announced" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("weights", "checks", "codes"),
    [
        (b"config", ["received", "unpacked", "config"], {"config_field"}),
        (b"reject", CHECKS[:4], {"weights_nan", "module_unknown"}),
        (b"600", CHECKS[:5], {"rank_too_large"}),
    ],
)
async def test_a_rejection_tells_which_check_failed_and_every_reason(
    client, weights, checks, codes
):
    done = await finish(client, await begin(client, weights))
    assert (done["state"], done["version"]) == ("rejected", None)
    assert [check["name"] for check in done["checks"]] == checks
    assert [check["state"] for check in done["checks"]] == ["passed"] * (len(checks) - 1) + [
        "failed"
    ]
    assert {reason["code"] for reason in done["reasons"]} == codes
    assert (await client.get("/v1/adapters/poet")).status_code == 404
    assert (await finish(client, done["id"]))["state"] == "rejected"  # twice is once


async def test_a_variant_is_compiled_tried_and_charged_too(world, client):
    done = await finish(client, await begin(client, variants=["bf16", "int8"]))
    assert done["state"] == "ready"
    variants = done["report"]["variants"]
    assert variants["int8"]["digest"] == digest_of("ok", "int8") in world.gate.store
    assert variants["int8"]["canary"]["max_delta"] > 0
    async with world.db.read(None) as session:
        (row,) = await session.scalars(select(ImageVariant))
    assert (row.dtype, row.digest) == ("int8", digest_of("ok", "int8"))
    tried = {asked.image for asked in world.engine.requests}
    assert {digest_of("ok"), digest_of("ok", "int8")} <= tried


async def test_an_adapter_without_effect_is_refused_and_leaves_no_image(world, client):
    world.engine.effect = 0.0
    done = await finish(client, await begin(client))
    assert (done["state"], done["reasons"][0]["code"]) == ("rejected", "no_effect")
    assert done["checks"][-1]["name"] == "canary"
    assert digest_of("ok") not in world.gate.store
    world.engine.effect = 0.125
    await finish(client, await begin(client))
    world.engine.effect = 0.0
    assert (await finish(client, await begin(client)))["state"] == "rejected"
    assert digest_of("ok") in world.gate.store  # the first one's


async def test_while_no_engine_is_ready_the_upload_waits(world, client):
    world.engine.die()
    upload = await begin(client)
    await client.post(f"{PATH}/{upload}/finish")

    async def compiled() -> bool:
        shown = (await client.get(f"{PATH}/{upload}")).json()
        assert shown["state"] == "validating"
        return [check["name"] for check in shown["checks"]] == CHECKS[:5]

    await world.until(compiled)
    world.engine.revive()
    assert (await finish(client, upload))["state"] == "ready"


async def test_an_engine_that_stays_away_is_a_failure_of_ours_with_the_fix(world, client):
    bounded(world, patience_s=0.01)
    world.engine.die()
    done = await finish(client, await begin(client))
    assert (done["state"], done["reasons"][0]["code"]) == ("failed", "engine_unavailable")
    assert "/readyz" in done["reasons"][0]["message"]
    assert digest_of("ok") not in world.gate.store


async def test_a_compiler_that_breaks_down_is_a_failure_of_ours(client):
    done = await finish(client, await begin(client, b"crash"))
    assert (done["state"], done["reasons"][0]["code"]) == ("failed", "internal_error")


async def test_cancelling_works_at_any_moment_before_the_version(world, client):
    idle, hanging = await begin(client), await begin(client, b"hang")
    await client.post(f"{PATH}/{hanging}/finish")
    log = world.settings.quarantine_dir / hanging / "image-bf16.log"
    await world.until(lambda: log.exists() and log.stat().st_size)
    for upload in (idle, hanging):
        for _ in range(2):
            gone = await client.delete(f"{PATH}/{upload}")
            assert (gone.status_code, gone.json()["state"]) == (200, "cancelled")
        assert not (world.settings.quarantine_dir / upload).exists()
    refused = await client.put(f"{PATH}/{idle}/parts/archive", content=b"", headers=at(0))
    assert refused.status_code == 409
    done = await finish(client, await begin(client))  # the compiler is free again
    late = await client.delete(f"{PATH}/{done['id']}")
    assert (late.status_code, done["state"]) == (409, "ready")


async def test_uploads_are_listed_by_page_and_state_and_those_of_one_request_too(client):
    files = {"adapter_config": ("c", CONFIG), "adapter_model": ("m", b"ok")}
    await client.post("/v1/adapters", data={"name": "bard"}, files=files)
    open_ones = [await begin(client) for _ in range(2)]
    first = (await client.get(PATH, params={"limit": 1})).json()
    assert (first["data"][0]["state"], first["data"][0]["name"]) == ("ready", "bard")
    assert first["has_more"]
    rest = (await client.get(PATH, params={"after": first["last_id"]})).json()
    assert [row["id"] for row in rest["data"]] == open_ones
    waiting = (await client.get(PATH, params={"state": "uploading"})).json()
    assert [row["id"] for row in waiting["data"]] == open_ones


async def test_another_tenants_upload_is_not_there(world, client):
    upload = await begin(client)
    async with world.client("globex") as other:
        assert (await other.get(PATH)).json()["data"] == []
        for method, path in (
            ("GET", upload),
            ("DELETE", upload),
            ("POST", f"{upload}/finish"),
            ("GET", f"{upload}/parts/archive"),
            ("PUT", f"{upload}/parts/archive"),
            ("GET", "..%2f..%2fsecrets"),
            ("PUT", "..%2fsecrets/parts/archive"),
        ):
            answer = await other.request(method, f"{PATH}/{path}", headers=at(0))
            assert answer.status_code == 404, (method, path)
    assert (await finish(client, upload))["state"] == "ready"


async def test_the_audit_log_tells_what_became_of_it(world, client):
    ready = await finish(client, await begin(client))
    rejected = await finish(client, await begin(client, b"reject"))
    cancelled = await begin(client)
    await client.delete(f"{PATH}/{cancelled}")
    entries = (await client.get("/v1/audit", params={"limit": 100})).json()["data"]
    entries = [e for e in reversed(entries) if e["action"].startswith(("upload.", "version."))]
    said = [(entry["action"], entry["target"]) for entry in entries]
    assert said == [
        ("upload.created", ready["id"]),
        ("version.published", "poet@1"),
        ("upload.created", rejected["id"]),
        ("upload.rejected", rejected["id"]),
        ("upload.created", cancelled),
        ("upload.cancelled", cancelled),
    ]
    assert len({entry["actor"] for entry in entries}) == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "No"},
        {"name": "poet", "alias": "1"},
        {"name": "poet", "variants": []},
        {"name": "poet", "variants": ["fp4"]},
        {"name": "poet", "sizes": {"optimizer": 1}},
        {"name": "poet", "sizes": {"archive": -1}},
        {"name": "poet", "sha256": {"archive": "x"}},
        {"name": "poet", "color": "red"},
    ],
)
async def test_a_wish_that_cannot_be_is_refused(client, body):
    assert (await client.post(PATH, json=body)).status_code == 400


async def test_files_keep_the_names_that_we_choose(world, client):
    upload = await begin(client)
    names = sorted(path.name for path in (world.settings.quarantine_dir / upload).iterdir())
    assert names == sorted(REQUIRED)
    assert (await client.put(f"{PATH}/{upload}/parts/x.bin", headers=at(0))).status_code == 400
