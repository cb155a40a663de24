"""Ends and new starts of the whole platform: drained, complete, and with everything kept."""

import signal
from pathlib import Path

import httpx

from loraplex.engine.images import BaseManifest

CHAT = "/v1/chat/completions"


def body(model: str, tokens: int, **fields) -> dict:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Count to twenty."}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def chat(served, model: str, tokens: int) -> httpx.Response:
    with served.http(served.api_key) as client:
        return client.post(CHAT, json=body(model, tokens))


def stop_in_midst(served, model: str) -> tuple[int, str]:
    """Stop a server that has said the first of many tokens; return its code and the last event."""
    with (
        served.http(served.api_key) as client,
        client.stream("POST", CHAT, json=body(model, 128, stream=True)) as stream,
    ):
        lines = filter(None, stream.iter_lines())
        assert '"finish_reason":null' in next(lines)
        served.process.send_signal(signal.SIGTERM)
        *_, last = lines
    return served.process.wait(60), last


def test_a_restart_keeps_everything_and_an_end_leaves_nothing(
    demo_base: BaseManifest, tmp_path: Path, house
) -> None:
    data_dir = tmp_path / "data"
    with house.serving(demo_base, data_dir) as first:
        below = house.children(first.process.pid)
        assert len(below) >= 2, "an engine and a Redis"
        ended, last = stop_in_midst(first, demo_base.name)
        assert (ended, last) == (0, "data: [DONE]"), "what was in flight is answered"
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
