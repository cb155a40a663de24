"""Cached prompts on a running platform: found by whose they are, and by nobody else."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
BLOCK = 16  # tokens
TALE = "The old lighthouse keeper counted the ships that came home from the north. " * 6


def ask(served, model: str, key: str, prompt: str = TALE) -> tuple[str, int, str]:
    """A greedy answer's text, how many of the prompt's tokens were cached, and who answered."""
    with served.sdk(key) as sdk:
        answer = sdk.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached in (0, (answer.usage.prompt_tokens - 1) // BLOCK * BLOCK)
    return answer.choices[0].text, cached, answer.model


def upload(served, key: str, name: str, source: str) -> None:
    folder = EXAMPLES / source
    parts = {
        "adapter_config": folder / "adapter_config.json",
        "adapter_model": folder / "adapter_model.safetensors",
    }
    files = {part: (path.name, path.read_bytes()) for part, path in parts.items()}
    with served.http(key) as client:
        answer = client.post("/v1/adapters", data={"name": name}, files=files)
    assert answer.status_code == 201, answer.text


@pytest.fixture(scope="module")
def keys(served) -> tuple[str, str]:
    """Keys of two tenants that have asked nothing yet."""
    return served.new_tenant("caching-1"), served.new_tenant("caching-2")


def test_a_prompt_sent_again_is_cached_and_answered_alike(served, demo_base, keys) -> None:
    first, cached, _ = ask(served, demo_base.name, keys[0])
    assert cached == 0
    again, cached, _ = ask(served, demo_base.name, keys[0])
    assert cached >= BLOCK
    assert again == first != ""


def test_nobody_else_finds_it(served, demo_base, keys) -> None:
    """Another tenant's same prompt is computed anew, and gives the same text."""
    mine, _, _ = ask(served, demo_base.name, keys[0])
    theirs, cached, _ = ask(served, demo_base.name, keys[1])
    assert (theirs, cached) == (mine, 0)


def test_no_adapter_finds_what_another_left(served, demo_base) -> None:
    """The demo tenant's own: base and adapters each have a cache, which their own requests find."""
    names = [demo_base.name, *served.adapters]
    first = [ask(served, name, served.api_key) for name in names]
    assert [cached for _, cached, _ in first] == [0] * len(names)
    again = [ask(served, name, served.api_key) for name in names]
    assert all(cached >= BLOCK for _, cached, _ in again)
    assert [text for text, _, _ in again] == [text for text, _, _ in first]


def test_the_next_version_never_sees_the_last_ones_cache(served, keys) -> None:
    """One name, first pirate's weights and then json's: the same prompt is answered by each."""
    as_json, _, _ = ask(served, "json", served.api_key)
    upload(served, keys[0], "bard", "pirate")
    old, cached, model = ask(served, "bard", keys[0])
    assert (cached, model) == (0, "bard@1")
    assert ask(served, "bard", keys[0])[1] >= BLOCK
    upload(served, keys[0], "bard", "json")
    new, cached, model = ask(served, "bard", keys[0])
    assert (new, cached, model) == (as_json, 0, "bard@2")
    pinned, cached, model = ask(served, "bard@1", keys[0])
    assert (pinned, model) == (old, "bard@1")
    assert cached >= BLOCK
