"""A server with a scripted engine in a process of its own: started in a second, and killed at will.

Knows the command, its banner and its children; refuses to know what is tested on it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

HOUSE = Path(__file__).resolve().parents[2] / "benchmarks" / "fake_house.py"
PATIENCE_S = 90.0
POLL_S = 0.02
CHAT = "/v1/chat/completions"


def eventually(probe: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """Ask until the answer is true, and return it; fail when that takes too long."""
    deadline = time.monotonic() + seconds
    while not (answer := probe()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        threading.Event().wait(POLL_S)
    return answer


@dataclass
class FakeServed:
    """A running server, and what its banner said."""

    process: subprocess.Popen[str]
    log: Path
    said: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.said["API"].removesuffix("/v1")

    @property
    def api_key(self) -> str:
        return self.said["API key"]

    def client(self, key: str | None = None) -> httpx.Client:
        """A client with this key, by default the demo tenant's."""
        headers = {"authorization": f"Bearer {key or self.api_key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def new_tenant(self, name: str, **limits: Any) -> str:
        """A key of a new tenant with these limits; its base is `tiny-base`."""
        with self.client(self.said["Operator key"]) as operator:
            made = operator.post("/v1/tenants", json={"name": name, **limits})
            assert made.is_success, made.text
            body = {"name": "test", "tenant_id": made.json()["id"], "scopes": ["infer"]}
            return str(operator.post("/v1/keys", json=body).json()["secret"])

    def child(self, words: bytes) -> int:
        """The one child whose command line has these words."""
        (found,) = [
            int(entry.name)
            for entry in Path("/proc").glob("[0-9]*")
            if _parent(entry) == self.process.pid and words in (entry / "cmdline").read_bytes()
        ]
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


@contextmanager
def fake_serving(data_dir: Path, token_ms: float = 0.0, **settings: str) -> Iterator[FakeServed]:
    """Serve from this folder until the block ends; `settings` are variables without `LORAPLEX_`."""
    process, log = start(data_dir, token_ms, **settings)
    with process:
        served = FakeServed(process, log)
        try:
            _read_banner(served)
            yield served
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # twice: nobody waits for what is in flight
                process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def start(
    data_dir: Path, token_ms: float = 0.0, **settings: str
) -> tuple[subprocess.Popen[str], Path]:
    """Start a server; return its process and the file that its standard error goes to."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    environment |= {f"LORAPLEX_{name.upper()}": value for name, value in settings.items()}
    command = [sys.executable, str(HOUSE), "--data-dir", str(data_dir), "--token-ms", str(token_ms)]
    log = data_dir.with_suffix(".log")
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    return process, log


def _read_banner(served: FakeServed) -> None:
    stuck = threading.Timer(PATIENCE_S, served.process.kill)
    stuck.start()
    assert served.process.stdout is not None
    try:
        for line in served.process.stdout:
            label, _, value = line.rstrip("\n").partition(": ")
            served.said[label] = value
            if line.startswith("curl "):
                return
    finally:
        stuck.cancel()
    raise AssertionError(f"the server did not start:\n{served.log.read_text()[-4000:]}")


@dataclass(frozen=True)
class Answer:
    """What a caller got: its request's id, the status, an error's code, and tokens charged."""

    request_id: str
    status: int
    code: str | None
    tokens: int
    retry_after: bool


class Load:
    """Callers who ask one request after the other until told to stop."""

    def __init__(self, served: FakeServed, key: str, callers: int = 3) -> None:
        self.answers: list[Answer] = []
        self._served, self._key = served, key
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(callers)
        self._callers = [self._pool.submit(self._call) for _ in range(callers)]

    @property
    def good(self) -> list[Answer]:
        """Those that were answered."""
        return [answer for answer in list(self.answers) if answer.status == 200]

    @property
    def bad(self) -> list[Answer]:
        """Those that were refused."""
        return [answer for answer in list(self.answers) if answer.status != 200]

    def more(self, good: int = 0, bad: int = 0) -> None:
        """Wait until so many more were answered, and refused."""
        goods, bads = len(self.good) + good, len(self.bad) + bad
        eventually(
            lambda: len(self.good) >= goods and len(self.bad) >= bads,
            f"{good} more answered and {bad} more refused",
        )

    def stop(self) -> None:
        """Let each caller end what it does; raises what one met instead of an answer."""
        self._stop.set()
        for caller in self._callers:
            caller.result()
        self._pool.shutdown()

    def _call(self) -> None:
        body = {
            "model": "tiny-base",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 5,
        }
        with self._served.client(self._key) as client:
            while not self._stop.is_set():
                self.answers.append(_answer(client.post(CHAT, json=body)))


def _answer(response: httpx.Response) -> Answer:
    body = response.json()
    return Answer(
        request_id=response.headers["x-request-id"],
        status=response.status_code,
        code=None if response.is_success else body["error"]["code"],
        tokens=body["usage"]["total_tokens"] if response.is_success else 0,
        retry_after="retry-after" in response.headers,
    )
