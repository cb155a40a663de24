"""Uploads: what is published, what is refused and why, and that nothing is left behind."""

import asyncio
import hashlib
import io
import struct
import zipfile
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from loraplex.platform.archive import REQUIRED

pytestmark = pytest.mark.anyio

PATH = "/v1/adapters"
CONFIG, WEIGHTS = REQUIRED
CONFIG_JSON = b'{"r": 8}'


def files(weights=b"ok", config=CONFIG_JSON):
    return {"adapter_config": ("c", config), "adapter_model": ("m", weights)}


def zipped(entries, compression=zipfile.ZIP_DEFLATED):
    """A zip of `(name or ZipInfo, content)` pairs."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return {"archive": ("a.zip", buffer.getvalue())}


GOOD = [(CONFIG, CONFIG_JSON), (WEIGHTS, b"ok")]


@pytest.fixture
async def client(world):
    async with world.client("acme", timeout=60) as opened:
        yield opened
    assert list(world.settings.quarantine_dir.iterdir()) == []  # whatever a test did


async def test_an_upload_is_published_as_the_next_version(world, client):
    first = await client.post(PATH, data={"name": "poet"}, files=files())
    second = await client.post(PATH, data={"name": "poet"}, files=files(b"4"))
    assert (first.status_code, second.status_code) == (201, 201)
    got = second.json()
    image = b"an image of 4"
    assert got["digest"] == hashlib.sha256(image).hexdigest()
    assert (got["id"], got["name"], got["version"]) == ("poet@2", "poet", 2)
    assert (got["rank"], got["bytes"]) == (4, len(image))
    assert got["report"]["modules"] == {"q_proj": 2}
    assert got["digest"] in world.gate.store
    shown = (await client.get(f"{PATH}/poet")).json()
    assert (shown["version"], shown["digest"]) == (2, got["digest"])
    versions = (await client.get(f"{PATH}/poet/versions")).json()["data"]
    assert {version["id"] for version in versions} == {"poet@1", "poet@2"}
    answer = await client.post("/v1/completions", json={"model": "poet", "prompt": "a"})
    assert answer.json()["model"] == "poet@2"
    assert world.engine.requests[-1].image == got["digest"]


async def test_a_zip_of_the_two_files_is_the_same_upload(world, client):
    plain = await client.post(PATH, data={"name": "poet"}, files=files())
    entries = [*GOOD, ("README.md", "hello")]
    packed = await client.post(PATH, data={"name": "poet"}, files=zipped(entries))
    assert packed.status_code == 201
    assert packed.json()["digest"] == plain.json()["digest"]


async def test_a_rejection_lists_every_reason(world, client):
    answer = await client.post(PATH, data={"name": "poet"}, files=files(b"reject"))
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"] == "adapter_rejected"
    assert [reason["code"] for reason in error["reasons"]] == ["weights_nan", "module_unknown"]
    assert all(reason["message"] in error["message"] for reason in error["reasons"])
    assert (await client.get(f"{PATH}/poet")).status_code == 404


async def test_a_rank_over_the_servers_limit_is_rejected(world, client):
    answer = await client.post(PATH, data={"name": "poet"}, files=files(b"600"))
    assert answer.status_code == 422
    assert answer.json()["error"]["reasons"][0]["code"] == "rank_too_large"


async def test_a_compiler_that_breaks_down_is_a_fault_of_ours(world, client, caplog):
    for weights in (b"crash", b"babble"):
        answer = await client.post(PATH, data={"name": "poet"}, files=files(weights))
        assert answer.status_code == 500
        assert "secret" not in answer.text
    assert "a secret path" in caplog.text


async def test_a_compiler_that_hangs_is_killed(world, client):
    world.gate.compiler._timeout_s = 0.5
    answer = await client.post(PATH, data={"name": "poet"}, files=files(b"hang"))
    assert answer.status_code == 422
    assert answer.json()["error"]["reasons"][0]["code"] == "too_slow"
    world.gate.compiler._timeout_s = 20
    answer = await client.post(PATH, data={"name": "poet"}, files=files())
    assert answer.status_code == 201  # its turn is not held by the dead


@pytest.mark.parametrize(
    ("name", "status"),
    [("", 400), ("Poet", 400), ("a@1", 400), ("../x", 400), ("x" * 64, 400), ("tiny-base", 409)],
)
async def test_a_name_that_cannot_be_is_refused_before_anything_is_compiled(client, name, status):
    answer = await client.post(PATH, data={"name": name}, files=files(b"crash"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "name")


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({}, files()),
        ({"name": "poet"}, {"adapter_config": ("c", b"{}")}),
        ({"name": "poet"}, {"adapter_model": ("m", b"ok")}),
        ({"name": "poet"}, files() | zipped(GOOD)),
        ({"name": "poet"}, files() | {"optimizer": ("o", b"x")}),
        ({"name": "poet", "color": "red"}, files()),
        ({"name": "x" * 300}, files()),
        ({"name": ["poet", "bard"]}, files()),
    ],
)
async def test_a_form_that_is_not_one_adapter_is_refused(client, data, parts):
    answer = await client.post(PATH, data=data, files=parts)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_no_form_or_is_cut_off_is_refused(client):
    form = client.build_request("POST", PATH, data={"name": "poet"}, files=files())
    content = b"".join([chunk async for chunk in form.stream])
    kind = form.headers["content-type"]
    for body, content_type in (
        (b"{}", "application/json"),
        (b"", kind),
        (b"nonsense", kind),
        (content[:-60], kind),
        (content, "multipart/form-data"),
        (content, ""),
    ):
        answer = await client.post(PATH, content=body, headers={"content-type": content_type})
        assert answer.status_code == 400, (body, content_type)


async def test_a_body_over_the_limit_is_refused_announced_or_not(client):
    big = files(b"x" * (1 << 20))
    announced = await client.post(PATH, data={"name": "poet"}, files=big)
    form = client.build_request("POST", PATH, data={"name": "poet"}, files=big)

    async def unannounced():
        async for chunk in form.stream:
            yield chunk

    headers = {"content-type": form.headers["content-type"]}
    streamed = await client.post(PATH, content=unannounced(), headers=headers)
    for answer in (announced, streamed):
        assert answer.status_code == 413
        assert str(1 << 20) in answer.json()["error"]["message"]


def link(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o120777 << 16
    return info


def device(name):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o020666 << 16
    return info


@pytest.mark.parametrize(
    ("entries", "codes"),
    [
        ([("../" + CONFIG, b"{}"), *GOOD], {"archive_path"}),
        ([("/etc/passwd", b"x"), *GOOD], {"archive_path"}),
        ([("C:\\x", b"x"), *GOOD], {"archive_path"}),
        ([("a\\..\\..\\x", b"x"), *GOOD], {"archive_path"}),
        (
            [("folder/" + name, content) for name, content in GOOD],
            {"archive_nesting", "archive_missing"},
        ),
        ([("folder/", b""), *GOOD], {"archive_nesting"}),
        ([("setup.py", b"x"), *GOOD], {"archive_name"}),
        ([GOOD[0], ("adapter_model.bin", b"x")], {"archive_pickle", "archive_missing"}),
        ([(link(CONFIG), b"/etc/passwd"), GOOD[1]], {"archive_link"}),
        ([(device(CONFIG), b""), GOOD[1]], {"archive_link"}),
        ([*GOOD, ("Adapter_Config.json", b"{}")], {"archive_name", "archive_clash"}),
        ([GOOD[0]], {"archive_missing"}),
        ([], {"archive_missing"}),
        (
            [("../x", b""), ("evil.sh", b""), (link("README.md"), b"x")],
            {"archive_path", "archive_name", "archive_link", "archive_missing"},
        ),
        ([(f"f{i}", b"") for i in range(20)], {"archive_entries"}),
    ],
)
async def test_a_zip_with_anything_else_in_it_is_refused_with_every_reason(client, entries, codes):
    answer = await client.post(PATH, data={"name": "poet"}, files=zipped(entries))
    assert answer.status_code == 422, answer.text
    reasons = answer.json()["error"]["reasons"]
    assert {reason["code"] for reason in reasons} == codes
    assert all("zip -j" in reason["message"] for reason in reasons)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
async def test_a_zip_with_a_name_twice_is_refused(client):
    answer = await client.post(PATH, data={"name": "poet"}, files=zipped([*GOOD, GOOD[0]]))
    codes = [reason["code"] for reason in answer.json()["error"]["reasons"]]
    assert (answer.status_code, codes) == (422, ["archive_clash"])


async def test_a_zip_that_explodes_is_stopped_while_it_unpacks(client):
    bomb = zipped([GOOD[0], (WEIGHTS, b"\0" * (64 << 20))])
    assert len(bomb["archive"][1]) < 1 << 20
    answer = await client.post(PATH, data={"name": "poet"}, files=bomb)
    assert answer.status_code == 413
    assert "unpacks" in answer.json()["error"]["message"]


async def test_a_zip_that_understates_its_size_is_refused(client):
    content = bytearray(zipped([GOOD[0], (WEIGHTS, b"\0" * (64 << 20))])["archive"][1])
    true_size = struct.pack("<L", 64 << 20)
    assert content.count(true_size) == 2
    lie = content.replace(true_size, struct.pack("<L", 100))
    parts = {"archive": ("a.zip", bytes(lie))}
    answer = await client.post(PATH, data={"name": "poet"}, files=parts)
    assert answer.status_code in (413, 422)


async def test_zips_of_other_kinds_and_broken_ones_are_refused(client):
    good = zipped(GOOD)["archive"][1]
    encrypted = bytearray(good)
    encrypted[encrypted.find(b"PK\x01\x02") + 8] |= 1
    corrupt = bytearray(zipped(GOOD, zipfile.ZIP_STORED)["archive"][1])
    at = corrupt.find(b"ok")
    corrupt[at : at + 2] = b"no"
    locator = b"PK\x06\x07" + bytes(16)
    end = good.rfind(b"PK\x05\x06")
    cases = {
        "archive_encrypted": bytes(encrypted),
        "archive_method": zipped(GOOD, zipfile.ZIP_BZIP2)["archive"][1],
        "archive_zip64": good[:end] + locator + good[end:],
    }
    broken = {"archive_broken": [b"", b"PK", b"nonsense" * 100, good[:-30], bytes(corrupt)]}
    for code, contents in ({key: [value] for key, value in cases.items()} | broken).items():
        for content in contents:
            answer = await client.post(
                PATH, data={"name": "poet"}, files={"archive": ("a.zip", content)}
            )
            assert answer.status_code == 422, (code, answer.text)
            codes = {reason["code"] for reason in answer.json()["error"]["reasons"]}
            assert codes == {code}


async def test_a_caller_who_leaves_ends_the_compiler_and_leaves_nothing(world):
    async with world.client() as client:
        form = client.build_request("POST", PATH, data={"name": "poet"}, files=files(b"hang"))
        content = b"".join([chunk async for chunk in form.stream])
    quarantine = world.settings.quarantine_dir

    def hanging():
        return [log for log in quarantine.glob("*/image-bf16.log") if log.stat().st_size]

    async with world.listening() as url:
        for sent, reached in (
            (content[:-100], lambda: [*quarantine.iterdir()]),
            (content, hanging),
        ):
            await leave(world, url, form.headers["content-type"], content, sent, reached)
            await world.until(lambda: not list(quarantine.iterdir()))
        async with world.client() as client:  # the compiler is free again
            answer = await client.post(PATH, data={"name": "poet"}, files=files())
    assert answer.status_code == 201


async def leave(world, url, content_type, content, sent, reached) -> None:
    """Send a part of an upload, wait until the server got there, and hang up."""
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {world.keys['acme']}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + sent)
    await writer.drain()
    await world.until(reached)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_deleting_an_adapter_frees_its_name_and_no_number(client):
    for weights in (b"4", b"5"):
        await client.post(PATH, data={"name": "poet"}, files=files(weights))
    deleted = await client.delete(f"{PATH}/poet")
    assert deleted.json() == {"id": "poet", "object": "adapter", "deleted": True}
    assert (await client.get(f"{PATH}/poet")).json()["error"]["code"] == "model_not_found"
    again = await client.post(PATH, data={"name": "poet"}, files=files(b"6"))
    assert again.json()["id"] == "poet@3"  # a number never means other weights
    gone = await client.post("/v1/completions", json={"model": "poet@1", "prompt": "a"})
    assert gone.status_code == 404


async def test_a_tenants_adapters_are_its_own(world, client):
    await client.post(PATH, data={"name": "poet"}, files=files())
    async with world.client("globex") as other:
        assert (await other.get(PATH)).json()["data"] == []
        assert (await other.get(f"{PATH}/poet")).status_code == 404
        assert (await other.delete(f"{PATH}/poet")).status_code == 404
        own = await other.post(PATH, data={"name": "poet"}, files=files(b"7"))
        assert own.json()["id"] == "poet@1"
    assert (await client.get(f"{PATH}/poet")).json()["rank"] == 8


async def test_an_operator_acts_for_the_tenant_it_names(world, client):
    acme = {"tenant_id": world.tenants["acme"]}
    async with world.client("operator") as operator:
        made = await operator.post(PATH, params=acme, data={"name": "poet"}, files=files())
        assert made.status_code == 201
        assert (await operator.get(PATH)).json()["error"]["param"] == "tenant_id"
        nobody = {"tenant_id": "ten_nobody"}
        assert (await operator.get(PATH, params=nobody)).status_code == 404
    assert (await client.get(PATH)).json()["data"][0]["name"] == "poet"
    foreign = {"tenant_id": world.tenants["globex"]}
    assert (await client.get(PATH, params=foreign)).status_code == 404
