"""The engine's process from its command line: what it refuses, when it ends, what it answers."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from loraplex.engine import __main__ as entry
from loraplex.engine.client.local import LocalEngine
from loraplex.engine.images import BaseManifest
from loraplex.engine.protocol import Chunk, Event, Finished, Generate, Ready, Sampling

PATIENCE_S = 240.0


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> object:
    """Runs the command line in this process and returns its exit code and its last line."""
    monkeypatch.setattr(entry, "end_with_parent", lambda: None)
    monkeypatch.setattr(entry, "configure", lambda: None)

    def run(base: Path, *options: str) -> tuple[int, str]:
        where = ["--images", str(tmp_path / "images"), "--cache", str(tmp_path)]
        code = entry.main(["--base", str(base), "--endpoint", "ipc:///x/y/z", *where, *options])
        return code, caplog.records[-1].getMessage()

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-num-seqs", "0"), "max_num_seqs is 0; give at least 1"),
        (("--max-num-batched-tokens", "3"), "give at least 64"),
        (("--gpu-memory-utilization", "7"), "memory_utilization is 7.0; give a share such as 0.5"),
        (("--kv-cache-memory-bytes", "-1"), "kv_cache_bytes is -1; give at least 1"),
        (("--max-model-len", "1"), "max_model_len is 1; give at least 2"),
        ((), "No such file"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_code_2(
    start: object, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    code, line = start(tmp_path / "no.json", *options)
    assert code == 2
    assert words in line


def test_a_manifest_that_is_none_is_one_sentence_and_code_2(start: object, tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"name": 3}')
    code, line = start(tmp_path / "base.json")
    assert code == 2
    assert "does not describe a prepared base" in line


def test_a_fault_of_ours_is_code_1_with_its_traceback(
    start: object,
    demo_base_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(entry, "load_executor", broken)
    code, line = start(demo_base_file)
    assert (code, line) == (1, "stopped by a fault")
    assert "no memory" in caplog.text


CHILD = """
import sys, time
from loraplex.engine.parent import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(120)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_ends_soon_after_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        parent.kill()
        parent.communicate(timeout=PATIENCE_S)
        poll = select.poll()
        poll.register(child)
        assert poll.poll(10_000), "the child outlives its parent"
    finally:
        os.close(child)


async def ready_or_ended(client: LocalEngine, process: asyncio.subprocess.Process) -> Ready:
    """Wait for the engine, but not for one whose process has ended."""
    ready = asyncio.ensure_future(client.wait_ready(PATIENCE_S))
    ended = asyncio.ensure_future(process.wait())
    await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not ready.done():
        ready.cancel()
        pytest.fail(f"the engine ended with code {process.returncode} before it was ready")
    return await ready


PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.anyio
async def test_the_demo_base_answers_the_same_alone_and_in_a_batch(
    demo_base_file: Path, demo_base: BaseManifest, endpoint: str, tmp_path: Path
) -> None:
    command = [
        sys.executable, "-m", "loraplex.engine", "--base", str(demo_base_file),
        "--endpoint", endpoint, "--images", str(tmp_path / "images"), "--cache", str(tmp_path),
        "--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "16",
    ]  # fmt: skip
    tokenizer = Tokenizer.from_file(str(Path(demo_base.path) / "tokenizer.json"))
    prompt = tuple(tokenizer.encode(PROMPT, add_special_tokens=False).ids)
    process, client = await asyncio.create_subprocess_exec(*command), LocalEngine(endpoint)
    await client.start()

    async def ask(name: str, sampling: Sampling) -> tuple[list[int], Event]:
        request, tokens = Generate(name, prompt, sampling), list[int]()
        async for event in client.generate(request):
            if isinstance(event, Chunk):
                tokens += event.token_ids
        return tokens, event

    try:
        ready = await ready_or_ended(client, process)
        assert (ready.base, ready.max_model_len) == (demo_base.fingerprint, 128)
        greedy, seeded = Sampling(12, 0.0), Sampling(12, 0.9, top_p=0.9, seed=5)
        alone, end = await ask("alone", greedy)
        assert tokenizer.decode(alone) == "The capital of France is Paris."
        assert isinstance(end, Finished) and end.reason == "stop"
        (mixed, _), (first, _), (second, _) = await asyncio.gather(
            ask("greedy", greedy), ask("seeded", seeded), ask("again", seeded)
        )
        assert mixed == alone
        assert first == second
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            code = await process.wait()
            await client.close()
    assert code == 0
