"""The embedded Redis is killed: nothing is let through uncounted, and it comes back."""

import os
import signal
from pathlib import Path

import httpx


def redis_pid(served, house) -> int:
    (found,) = [
        pid
        for pid in house.children(served.process.pid)
        if b"redis-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def test_limits_fail_closed_until_redis_is_back(served, house, demo_base) -> None:
    body = {
        "model": demo_base.name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 1,
    }
    with served.http(served.api_key) as client:

        def ask() -> httpx.Response:
            return client.post("/v1/chat/completions", json=body)

        assert ask().status_code == 200
        before = redis_pid(served, house)
        os.kill(before, signal.SIGKILL)
        house.eventually(lambda: not house.is_alive(before), "Redis is dead")
        answers: list[httpx.Response] = []

        def is_back() -> bool:
            answers.append(ask())
            return answers[-1].status_code == 200

        house.eventually(is_back, "requests are served again")
    refused = [(a.status_code, a.json()["error"]["code"]) for a in answers[:-1]]
    assert set(refused) <= {(503, "limiter_down")}
    assert all("retry-after" in answer.headers for answer in answers[:-1])
    assert redis_pid(served, house) != before
