"""Ends and new starts of the whole platform: drained, complete, and with everything kept."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from loraplex.engine.images import BaseManifest


def chat(served, model: str, tokens: int) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count to twenty."}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    with served.http(served.api_key) as client:
        return client.post("/v1/chat/completions", json=body)


def test_a_restart_keeps_everything_and_an_end_leaves_nothing(
    demo_base: BaseManifest, tmp_path: Path, house
) -> None:
    data_dir = tmp_path / "data"
    with house.serving(demo_base, data_dir) as first, ThreadPoolExecutor(1) as pool:
        below = house.children(first.process.pid)
        assert len(below) >= 2, "an engine and a Redis"
        answer = pool.submit(chat, first, demo_base.name, 24)
        house.eventually(
            lambda: first.metric("loraplex_num_requests_running") == 1, "a request runs"
        )
        assert first.stop(signal.SIGTERM) == 0
        assert answer.result().status_code == 200, "what was in flight is answered"
        assert not [pid for pid in below if house.is_alive(pid)]
    with house.serving(demo_base, data_dir) as second:
        kept = ("api_key", "operator_key", "adapters")
        assert [getattr(second, name) for name in kept] == [getattr(first, name) for name in kept]
        assert chat(second, second.adapters[0], 2).json()["model"] == f"{first.adapters[0]}@1"
        below = house.children(second.process.pid)
        assert second.stop(signal.SIGKILL) == -signal.SIGKILL
        house.eventually(
            lambda: not any(map(house.is_alive, below)), "children end with their parent"
        )
