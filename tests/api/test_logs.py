"""Logs: one line a request with its id and caller, JSON that parses, and never a secret."""

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from loraplex.engine.client.fake import FakeEngine
from loraplex.platform import logs, redaction
from loraplex.platform.redaction import Redactor, redact
from loraplex.platform.settings import Settings

pytestmark = pytest.mark.anyio
KEY = "lpx_" + "aB3" * 12 + "zz"
PASSWORD = "hunter2-hunter2"


class Written(io.StringIO):
    """What a handler of ours wrote."""

    @property
    def objects(self) -> list[dict]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def written() -> Iterator[Written]:
    """All records as JSON lines, of every logger."""
    with _writing("json", Redactor(PASSWORD)) as stream:
        yield stream


class _writing:
    def __init__(self, form: logs.LogFormat, redactor: Redactor) -> None:
        self._stream = Written()
        self._handler = logs.handler_of(form, redactor, self._stream)

    def __enter__(self) -> Written:
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.DEBUG)
        root.addHandler(self._handler)
        return self._stream

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger().setLevel(self._level)


def access_lines(written: Written) -> list[dict]:
    return [line for line in written.objects if line["logger"] == "loraplex.access"]


async def test_each_request_is_one_line_with_its_id_its_caller_and_how_it_ended(
    world, written
) -> None:
    async with world.client("acme") as client:
        body = {"model": "tiny-base", "prompt": "abc", "max_tokens": 3}
        done = await client.post("/v1/completions", json=body)
        lost = await client.get("/v1/adapters/none")
    async with world.client(KEY) as client:
        stranger = await client.get("/v1/models")
        await client.get("/healthz")
    first, second, third, probe = access_lines(written)
    assert first["request_id"] == done.headers["x-request-id"]
    assert first["tenant_id"] == world.tenants["acme"]
    assert first["key_id"].startswith("key_")
    assert (first["method"], first["route"], first["status"]) == ("POST", "/v1/completions", 200)
    assert first["ms"] > 0
    assert (second["route"], second["status"]) == ("/v1/adapters/{name}", 404)
    assert second["request_id"] == lost.headers["x-request-id"]
    assert third["status"] == stranger.status_code == 401
    assert "tenant_id" not in third and "key_id" not in third
    assert (probe["route"], probe["level"]) == ("/healthz", "debug")
    assert {line["level"] for line in (first, second, third)} == {"info"}


async def test_what_a_request_logs_carries_its_id(world, written, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(f"could not open postgresql://u:{PASSWORD}@db/x for {KEY}")

    monkeypatch.setattr(FakeEngine, "generate", broken)
    async with world.client("acme") as client:
        failed = await client.post("/v1/completions", json={"model": "tiny-base", "prompt": "a"})
    assert failed.status_code == 500
    (line,) = [line for line in written.objects if "exception" in line]
    assert line["request_id"] == failed.headers["x-request-id"]
    assert "RuntimeError" in line["exception"]
    for secret in (PASSWORD, KEY, world.keys["acme"]):
        assert secret not in written.getvalue()


SHAPES = (
    "{0}",
    "x-api-key: {0}",
    "Authorization: Bearer {0}",
    "authorization=bearer {0}; rest",
    "{{'x-api-key': '{0}', 'accept': '*/*'}}",
    '{{"authorization": "Bearer {0}"}}',
    "[(b'x-api-key', b'{0}'), (b'accept', b'*/*')]",
    "GET /v1/models?api_key={0}&limit=3",
    "GET /v1/models/{0}?x=1",
    "LORAPLEX_KEY_PEPPER={0}",
    "https://user:{0}@host:1/path",
    "headers = Headers({{'cookie': 'session={0}'}})",
    "set-cookie: session={0}; HttpOnly",
    "password='{0}'",
)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("secret", [KEY, KEY.replace("_", "%5F"), KEY[:20]])
def test_a_key_is_hidden_wherever_it_stands(shape: str, secret: str) -> None:
    shown = redact(shape.format(secret))
    assert secret.partition("_")[2] not in shown or "_" not in secret
    assert secret[8:] not in shown


@pytest.mark.parametrize("shape", SHAPES[1:8] + SHAPES[9:])
def test_what_a_name_says_is_secret_is_hidden_whatever_it_looks_like(shape: str) -> None:
    assert "correct-horse" not in redact(shape.format("correct-horse"))


@given(st.text(max_size=30), st.text(max_size=30))
def test_a_secret_that_was_told_is_hidden_in_any_text(before: str, after: str) -> None:
    secret = "p@ss/word:1"
    redactor = Redactor(secret, None, "")
    assert secret not in redactor(f"{before}{secret}{after}")
    assert "p%40ss%2Fword%3A1" not in redactor(f"{before}p%40ss%2Fword%3A1{after}")


@pytest.mark.parametrize(
    "text",
    [
        "POST /v1/chat/completions 200",
        "http://127.0.0.1:8000/v1/adapters/pirate@prod",
        "the key key_01abc is revoked; max_tokens: 5",
        "image sha256 " + "0f" * 32,
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


MARKS = ["lpx_", "hf_", "sk-", "GHP_", "ghp_", "AKIA", "://", "Bearer ", "baſic ", "BASIC ", "İ"]
NAMED = ["api_key", "Authorization", "passw", "ord", "'", '"', ":", "=", ",", "@", " ", "\n"]
SAID = st.lists(st.sampled_from([*MARKS, *NAMED, "abcdef", "0123456789", "secretsecret"]))


@given(SAID.map("".join))
def test_a_rule_is_left_out_only_where_it_changes_nothing(said: str) -> None:
    by_all = said
    for _, pattern, replacement in redaction._RULES:
        by_all = pattern.sub(replacement, by_all)
    assert redact(said) == by_all


def test_records_of_every_kind_are_redacted_and_stay_json(written: Written) -> None:
    log = logging.getLogger("uvicorn.error")
    log.info("bad request %r", {"x-api-key": KEY}, extra={"fields": {"url": f"/?k={KEY}"}})
    log.warning("%d", KEY)  # cannot be formatted: no reason to fail, or to print it raw
    try:
        raise ValueError(KEY) from RuntimeError(f"redis://:{PASSWORD}@cache/0")
    except ValueError:
        log.exception('with\na newline and "quotes" for %s', KEY, stack_info=True)
    engine = create_engine("sqlite://", hide_parameters=False)
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT :key FROM nowhere"), {"key": KEY})
    except SQLAlchemyError as error:
        log.error("%s", error)
    assert KEY not in written.getvalue()
    assert PASSWORD not in written.getvalue()
    assert len(written.objects) == 4
    assert all({"time", "level", "logger", "message"} <= set(line) for line in written.objects)
    assert "ValueError" in written.objects[2]["exception"]
    assert "stack" in written.objects[2]


def test_text_lines_are_redacted_too() -> None:
    with _writing("text", Redactor()) as stream:
        logging.getLogger("x").error("k %s", KEY, extra={"fields": {"path": "/v1", "k": KEY}})
    line = stream.getvalue()
    assert KEY not in line
    assert "ERROR x k lpx_…" in line and "path=/v1" in line


async def test_a_server_that_cannot_read_a_request_says_so_without_it(world, written) -> None:
    import anyio

    async with world.listening() as url:
        host, _, port = url.removeprefix("http://").partition(":")
        stream = await anyio.connect_tcp(host, int(port))
        async with stream:
            await stream.send(f"GET / HTTP/1.1\r\nx-api-key {KEY}\r\n\r\n".encode())
            with pytest.raises(anyio.EndOfStream):
                while True:
                    await stream.receive()
    assert KEY not in written.getvalue()


def test_the_root_has_one_handler_and_takes_warnings(monkeypatch, capsys) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    levels = {name: logging.getLogger(name).level for name in logs.CHATTY}
    logs.configure("json", "info", Redactor())
    try:
        assert len(root.handlers) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn(f"about {KEY}", UserWarning, stacklevel=1)
        logs.relay("2026-11-30T00:00:00Z WARNING engine.report memory is short")
        logs.relay("ready")
    finally:
        logging.captureWarnings(False)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["py.warnings", "engine.report", "loraplex.engine"]


def test_the_settings_know_their_secrets(tmp_path) -> None:
    settings = Settings(
        data_dir=tmp_path,
        database_url="postgresql://u:p%40ssw0rd@db/x",
        redis_url="rediss://:cachesecret@cache/0",
        image_store_url="s3://bucket/images",
        key_pepper="0123456789abcdef",
    )
    redactor = Redactor(*settings.given_secrets)
    said = redactor("p@ssw0rd p%40ssw0rd cachesecret 0123456789abcdef")
    assert said == "… … … …"
