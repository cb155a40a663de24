"""A whole platform as a user starts it: the command in a process of its own, on a real model."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from loraplex.engine.images import BaseManifest

LORAPLEX = str(Path(sys.executable).with_name("loraplex"))
START_S, STOP_S = 240.0, 60.0
POLL_S = 0.05


def eventually(condition: Callable[[], bool], what: str, seconds: float = STOP_S) -> None:
    """Wait until a condition holds; fail when it does not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        threading.Event().wait(POLL_S)


def children(pid: int) -> set[int]:
    """The living descendants of a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Served:
    """A running `loraplex serve`; `lines` are those of its standard output."""

    process: subprocess.Popen[str]
    data_dir: Path
    log: Path
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self._after("API: ").removesuffix("/v1")

    @property
    def api_key(self) -> str:
        return self._after("API key: ")

    @property
    def operator_key(self) -> str:
        return self._after("Operator key: ")

    @property
    def sign_in_code(self) -> str:
        """What signs the first operator in, once."""
        return self._after("First sign-in: ").rpartition(" ")[2]

    @property
    def adapters(self) -> list[str]:
        return self._after("Adapters: ").split(", ")

    @property
    def engine_pid(self) -> int:
        """The engine's process: the child whose command line says so."""
        found = [pid for pid in children(self.process.pid) if _is_engine(pid)]
        assert len(found) == 1, f"{len(found)} engine processes"
        return found[0]

    def http(self, key: str) -> httpx.Client:
        """A client with a key."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=START_S)

    def sdk(self, key: str | None = None) -> openai.OpenAI:
        """OpenAI's own client, by default with the demo tenant's key."""
        return openai.OpenAI(**self._sdk_options(key))

    def async_sdk(self, key: str | None = None) -> openai.AsyncOpenAI:
        """The same for requests at once."""
        return openai.AsyncOpenAI(**self._sdk_options(key))

    def new_tenant(self, name: str) -> str:
        """A key of a new tenant, which may use adapters and upload them."""
        scopes = ["infer", "adapters:read", "adapters:write"]
        with self.http(self.operator_key) as operator:
            tenant = operator.post("/v1/tenants", json={"name": name}).json()
            body = {"name": "test", "tenant_id": tenant["id"], "scopes": scopes}
            return operator.post("/v1/keys", json=body).json()["secret"]

    def metric(self, name: str) -> float:
        """A metric without labels, as it is now."""
        with self.http(self.operator_key) as client:
            text = client.get("/metrics").text
        found = re.search(rf"^{name} ([\d.e+-]+)$", text, re.MULTILINE)
        assert found, f"{name} is not in:\n{text}"
        return float(found[1])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def _sdk_options(self, key: str | None) -> dict[str, Any]:
        return {
            "base_url": f"{self.url}/v1",
            "api_key": key or self.api_key,
            "max_retries": 0,
            "timeout": START_S,
        }

    def _after(self, label: str) -> str:
        found = [line.removeprefix(label) for line in self.lines if line.startswith(label)]
        assert len(found) == 1, f"{len(found)} lines begin with {label!r}"
        return found[0]


def _is_engine(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"loraplex.engine" in words


def environment(**changes: str) -> dict[str, str]:
    """The environment without settings of whoever runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
    return kept | {"PYTHONUNBUFFERED": "1"} | changes


@contextmanager
def serving(base: BaseManifest, data_dir: Path, *options: str) -> Iterator[Served]:
    """Run `loraplex serve` on a port of its own, with these options, until the block ends."""
    log = data_dir.with_suffix(".log")
    command = [LORAPLEX, "serve", "--model", base.path, "--name", base.name]
    command += ["--port", "0", "--data-dir", str(data_dir), *options]
    with log.open("a") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        )
    with process:
        served = Served(process, data_dir, log)
        try:
            _read_banner(served)
            yield served
        finally:
            if process.poll() is None:
                process.terminate()
            left = children(process.pid)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                for pid in {process.pid, *left}:
                    os.kill(pid, signal.SIGKILL)
                raise


def _read_banner(served: Served) -> None:
    """Read lines up to the last one of the banner; the process is killed if it takes too long."""
    stuck = threading.Timer(START_S, served.process.kill)
    stuck.start()
    try:
        assert served.process.stdout is not None
        for line in served.process.stdout:
            served.lines.append(line.rstrip("\n"))
            if line.startswith("curl "):
                return
    finally:
        stuck.cancel()
    pytest.fail(f"the server did not start:\n{served.log.read_text()[-4000:]}")


@pytest.fixture(scope="session")
def served(demo_base: BaseManifest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One platform for all tests that leave it as it was."""
    with serving(demo_base, tmp_path_factory.mktemp("served") / "data") as running:
        yield running


@pytest.fixture(scope="session")
def house() -> SimpleNamespace:
    """What a test needs that starts and ends platforms itself."""
    return SimpleNamespace(
        serving=serving,
        children=children,
        is_alive=is_alive,
        eventually=eventually,
        environment=environment,
        command=LORAPLEX,
    )
