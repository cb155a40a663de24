"""A server is told to stop: it refuses what is new, finishes what is in flight, and says so."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_served import CHAT, FakeServed, eventually, fake_serving, start


def body(tokens: int) -> dict:
    return {
        "model": "tiny-base",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": tokens,
        "stream": True,
    }


def begin(served: FakeServed, stream: httpx.Response) -> Iterator[str]:
    """Read the first events of a stream, then tell the server to stop; return what is left."""
    assert stream.status_code == 200
    lines = filter(None, stream.iter_lines())
    for _ in range(5):
        next(lines)
    served.process.send_signal(signal.SIGTERM)
    return lines


def is_stopping(served: FakeServed) -> httpx.Response | None:
    with served.client() as other:
        answer = other.get("/readyz")
    return answer if answer.status_code == 503 else None


def test_what_is_in_flight_is_finished_and_what_is_new_is_refused(tmp_path: Path) -> None:
    with fake_serving(tmp_path / "data", token_ms=20) as served, served.client() as client:
        idle = served.client()
        assert idle.get("/readyz").status_code == 200
        with client.stream("POST", CHAT, json=body(100)) as stream:
            left = begin(served, stream)
            unready = eventually(lambda: is_stopping(served), "it says that it stops")
            refused = idle.post(CHAT, json=body(1))
            *_, last = left
        assert last == "data: [DONE]"
        assert unready.json() == {"status": "stopping", "parts": {}}
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_stopping"
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        idle.close()
        assert served.process.wait(60) == 0


def test_a_stream_that_takes_too_long_ends_with_an_error(tmp_path: Path) -> None:
    with (
        fake_serving(tmp_path / "data", token_ms=20, drain_s="0.2") as served,
        served.client() as client,
    ):
        with client.stream("POST", CHAT, json=body(2000)) as stream:
            *_, last = begin(served, stream)
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_stopping"
        assert served.process.wait(60) == 0


def test_told_twice_it_waits_for_nobody(tmp_path: Path) -> None:
    with fake_serving(tmp_path / "data", token_ms=20) as served, served.client() as client:
        with (
            pytest.raises(httpx.RemoteProtocolError),
            client.stream("POST", CHAT, json=body(2000)) as stream,
        ):
            left = begin(served, stream)
            eventually(lambda: is_stopping(served), "it has heard the first signal")
            served.process.send_signal(signal.SIGTERM)
            *_, _ = left
        assert served.process.wait(60) == 0


def test_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    with fake_serving(tmp_path / "data") as served:
        assert served.end(signal.SIGINT) == 0
    assert "requests in flight are ended" not in served.log.read_text()


def test_a_log_for_machines_is_json_alone_and_no_keys_are_printed(tmp_path: Path) -> None:
    process, log = start(tmp_path / "data", log_format="json")
    with process:
        eventually(lambda: '"message":"serving"' in log.read_text(), "it serves")
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["url"] for line in lines if line["message"] == "serving"]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    assert "lpx_" not in log.read_text()
