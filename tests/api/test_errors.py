"""One error shape for everything, and what surrounds every response."""

import json

import pytest
from redis.exceptions import ConnectionError as RedisDown

from loraplex.platform.api.envelope import MAX_JSON_BYTES
from loraplex.platform.app import allowed_hosts
from loraplex.platform.quotas import TenantLimits
from loraplex.platform.settings import Settings

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
JSON = {"content-type": "application/json"}


async def refused(world, status, method="POST", path=PATH, **options):
    """The error of a request that must be refused with this status."""
    async with world.client() as client:
        answer = await client.request(method, path, **options)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert list(answer.json()) == ["error"]
    return error


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"nonsense", b'{"model": ', b"[" * 100_000, b"\xff\xfe", b'{"a": ' + b"1" * 5000],
    ids=["open", "empty", "word", "cut off", "deep", "binary", "long number"],
)
async def test_a_body_that_is_not_json_is_a_400(world, content):
    await refused(world, 400, content=content, headers=JSON)


async def test_json_that_is_no_object_is_a_400(world):
    for value in ([], 5, "text", None, True):
        await refused(world, 400, json=value)


async def test_json_under_another_content_type_is_told_what_is_missing(world):
    error = await refused(
        world,
        400,
        content=json.dumps({"model": "tiny-base", "prompt": "a"}),
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert "content-type" in error["message"]


async def test_missing_fields_are_named(world):
    error = await refused(world, 400, json={"prompt": "a"})
    assert error["param"] == "model"
    assert "required" in error["message"]


async def test_a_body_over_the_limit_is_a_413_announced_or_not(world):
    big = b'{"prompt": "' + b"x" * MAX_JSON_BYTES + b'"}'

    async def chunks():
        for at in range(0, len(big), 1 << 16):
            yield big[at : at + (1 << 16)]

    for content in (big, chunks()):
        error = await refused(world, 413, content=content, headers=JSON)
        assert str(MAX_JSON_BYTES) in error["message"]
        assert error["code"] == "request_too_large"


async def test_paths_and_methods_that_are_not_there(world):
    assert (await refused(world, 404, path="/v1/nothing"))["code"] == "not_found"
    error = await refused(world, 405, "PUT", "/v1/models")
    assert error["code"] == "method_not_allowed"
    assert (await refused(world, 404, "GET", "/static/nothing.css"))["code"] == "not_found"
    assert (await refused(world, 404, "GET", "/static/../pages.py"))["code"] == "not_found"


async def test_a_fault_of_ours_tells_its_request_and_nothing_else(world, caplog, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a secret path")

    monkeypatch.setattr("loraplex.platform.api.generate.make_job", broken)
    async with world.client() as client:
        answer = await client.post(PATH, json={"model": "tiny-base", "prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert "a secret path" in caplog.text  # the log has it


async def test_every_response_has_an_id_of_its_own_and_safe_headers(world):
    ids = set()
    async with world.client() as client:
        for path in ("/", "/healthz", "/v1/models", "/v1/nothing", "/static/loraplex.css"):
            answer = await client.get(path, headers={"x-request-id": "mine"})
            ids.add(answer.headers["x-request-id"])
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "access-control-allow-origin" not in answer.headers
            assert "server" not in answer.headers
    assert len(ids) == 5
    assert all(each.startswith("req_") for each in ids)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("", 400),
    ],
)
async def test_only_our_own_hosts_are_answered(world, host, status):
    async with world.client() as client:
        answer = await client.get("/healthz", headers={"host": host})
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("host", "named", "expected"),
    [
        ("127.0.0.1", None, {"localhost", "127.0.0.1", "::1"}),
        ("10.0.0.5", "a.example, b.example", {"10.0.0.5", "a.example", "b.example"}),
        ("127.0.0.1", "*", {"*"}),
        ("0.0.0.0", None, {"*"}),
        ("0.0.0.0", "a.example", {"a.example"}),
    ],
)
def test_hosts_follow_from_the_address_and_the_settings(host, named, expected):
    hosts = set(allowed_hosts(Settings(host=host, allowed_hosts=named)))
    assert expected <= hosts
    assert ("*" in hosts) == ("*" in expected)


async def test_when_redis_is_down_budgets_are_refused_not_waved_through(world, monkeypatch):
    async def down(*_: object, **__: object) -> None:
        raise RedisDown("connection refused")

    await world.add_tenant("thrifty", TenantLimits(tokens_per_day=1000))
    monkeypatch.setitem(world.limiter._scripts._scripts, "admit", down)
    async with world.client("thrifty") as client:
        answer = await client.post(PATH, json={"model": "tiny-base", "prompt": "a"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "limiter_down"
    assert int(answer.headers["retry-after"]) >= 1
    assert world.engine.requests == []


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/adapters", "GET, POST"),
        ("/v1/adapters/poet/aliases/prod", "DELETE, PUT"),
        ("/healthz", "GET, HEAD"),
        ("/v1/models", "GET"),
    ],
)
async def test_a_405_lists_all_methods_of_the_path(world, path, methods):
    async with world.client() as client:
        answer = await client.request("TRACE", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
