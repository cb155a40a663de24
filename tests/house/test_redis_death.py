"""The embedded Redis is killed: rates are held by the server alone, and it comes back."""

import os
import signal
from pathlib import Path

import httpx


def redis_pids(served, house) -> list[int]:
    return [
        pid
        for pid in house.children(served.process.pid)
        if b"redis-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_requests_are_served_until_redis_is_back(served, house, demo_base) -> None:
    body = {
        "model": demo_base.name,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 1,
    }
    with served.http(served.api_key) as client:

        def ask() -> httpx.Response:
            return client.post("/v1/chat/completions", json=body)

        assert ask().status_code == 200
        (before,) = redis_pids(served, house)
        os.kill(before, signal.SIGKILL)
        house.eventually(lambda: not house.is_alive(before), "Redis is dead")
        answers: list[httpx.Response] = []

        def is_back() -> bool:
            answers.append(ask())
            return redis_pids(served, house) not in ([], [before])

        house.eventually(is_back, "Redis is there again")
        answers.append(ask())
    assert {answer.status_code for answer in answers} == {200}
