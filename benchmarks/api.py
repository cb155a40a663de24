"""What the platform itself costs: latency that it adds to a request, and CPU for streamed tokens.

    python benchmarks/api.py [--requests 500] [--seconds 10] [--profile FILE]

A real server (`fake_house.py`: HTTP, keys, limits in Redis, registry and ledger in SQLite, chat
template, tokenizer) answers from a scripted engine that takes no time, or a fixed time a token. The
caller's tenant has every limit and budget set, far away. Bounds are those of the project: a median
of at most 5 ms added, at most a tenth of a core at 200 streamed tokens a second, no torch in the
process. Prints a line for each figure, then all of them as JSON; exit code 1 if a bound is passed.
"""

import argparse
import asyncio
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.protocol import Generate, Sampling

HOUSE = Path(__file__).with_name("fake_house.py")
BASE = Path(__file__).resolve().parents[1] / "build" / "demo-base" / "base.json"
MEDIAN_MS, CPU_SHARE = 5.0, 0.10
STREAMS, TOKEN_MS = 10, 50.0  # 200 tokens a second
TOKENS = 16
WARM_UP = 30
LIMITS = {
    "requests_per_minute": 1_000_000,
    "tokens_per_minute": 1_000_000_000,
    "max_concurrency": 1000,
    "tokens_per_day": 1_000_000_000_000,
    "tokens_per_month": 1_000_000_000_000,
}
PROMPT = "Summarise in one sentence why a server should measure what it adds to each request. " * 4


@dataclass
class Server:
    """A running house, and a key of a tenant whose limits are far away."""

    pid: int
    url: str
    key: str
    folder: Path

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is kept alive."""
        found = urlsplit(self.url)
        return http.client.HTTPConnection(found.hostname or "", found.port, timeout=60)

    def ask(self, connection: http.client.HTTPConnection, **body: Any) -> http.client.HTTPResponse:
        """Send one chat request; the answer's body is still to be read."""
        messages = [{"role": "user", "content": PROMPT}]
        body = {"model": "echo", "messages": messages, "max_tokens": TOKENS} | body
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return answer

    def cpu_s(self) -> float:
        """CPU seconds that the API process has used, its threads included."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        """Memory of the API process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def has_torch(self) -> bool:
        """Whether torch's library is in the process."""
        return "libtorch" in Path(f"/proc/{self.pid}/maps").read_text()


@contextmanager
def serving(token_ms: float, profile: Path | None = None) -> Iterator[Server]:
    """Run a house until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        profiled = ["-m", "cProfile", "-o", str(profile)] if profile else []
        command = [sys.executable, *profiled, str(HOUSE), "--data-dir", f"{folder}/data"]
        command += ["--token-ms", str(token_ms), *(["--base", str(BASE)] if BASE.exists() else [])]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        with (
            open(f"{folder}/log", "w") as log,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            ) as process,
        ):
            try:
                yield _greeted(process, Path(folder))
            finally:
                process.send_signal(signal.SIGTERM)


def _greeted(process: subprocess.Popen[str], folder: Path) -> Server:
    said: dict[str, str] = {}
    assert process.stdout is not None
    for line in process.stdout:
        label, _, value = line.rstrip("\n").partition(": ")
        said[label] = value
        if line.startswith("curl "):
            break
    assert "API" in said, (folder / "log").read_text()[-4000:]
    server = Server(process.pid, said["API"].removesuffix("/v1"), said["API key"], folder)
    _lift_limits(server, said["Operator key"])
    return server


def _lift_limits(server: Server, operator_key: str) -> None:
    headers = {"authorization": f"Bearer {operator_key}", "content-type": "application/json"}
    connection = server.connect()
    connection.request("GET", "/v1/tenants", headers=headers)
    tenant = json.loads(connection.getresponse().read())["data"][0]["id"]
    connection.request("PATCH", f"/v1/tenants/{tenant}", json.dumps(LIMITS), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()


def latencies(server: Server, count: int, *, stream: bool) -> list[float]:
    """Milliseconds of so many requests, one after the other, until the last byte of each."""
    connection, found = server.connect(), []
    for number in range(WARM_UP + count):
        began = time.perf_counter()
        server.ask(connection, stream=stream).read()
        if number >= WARM_UP:
            found.append((time.perf_counter() - began) * 1000)
    return found


async def engine_ms(count: int = 200) -> float:
    """Milliseconds that the scripted engine itself takes for such a request, the median."""
    engine, found = FakeEngine(), []
    for number in range(count):
        sampling = Sampling(max_tokens=TOKENS)
        request = Generate(request_id=str(number), token_ids=tuple(range(80)), sampling=sampling)
        began = time.perf_counter()
        async for _ in engine.generate(request):
            pass
        found.append((time.perf_counter() - began) * 1000)
    return statistics.median(found)


def share_of_a_core(server: Server, seconds: float) -> tuple[float, float]:
    """CPU of the API process while it streams, as a share of a core; and tokens a second."""
    stop, counts = threading.Event(), [0] * STREAMS
    threads = [
        threading.Thread(target=_stream, args=(server, stop, counts, index))
        for index in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    before, tokens, began = server.cpu_s(), sum(counts), time.perf_counter()
    time.sleep(seconds)
    took = time.perf_counter() - began
    share, rate = (server.cpu_s() - before) / took, (sum(counts) - tokens) / took
    stop.set()
    for thread in threads:
        thread.join()
    return share, rate


def _stream(server: Server, stop: threading.Event, counts: list[int], index: int) -> None:
    """Stream one answer after the other, and count the events that bring a token."""
    connection = server.connect()
    while not stop.is_set():
        answer = server.ask(connection, stream=True, max_tokens=200)
        for line in answer:
            counts[index] += b'"content"' in line
            if stop.is_set():
                connection.close()
                return


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so large a share of all does not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(requests: int, seconds: float, profile: Path | None) -> dict[str, Any]:
    """All figures."""
    own = asyncio.run(engine_ms())
    with serving(0.0, profile) as server:
        before = server.cpu_s()
        whole = latencies(server, requests, stream=False)
        spent_ms = (server.cpu_s() - before) * 1000 / (requests + WARM_UP)
        streamed = latencies(server, requests, stream=True)
        torch, resident = server.has_torch(), server.resident_mib()
    with serving(TOKEN_MS) as server:
        share, rate = share_of_a_core(server, seconds)
    return {
        "engine_ms": round(own, 3),
        "added_ms_median": round(statistics.median(whole) - own, 2),
        "added_ms_p99": round(percentile(whole, 0.99) - own, 2),
        "added_ms_median_streamed": round(statistics.median(streamed) - own, 2),
        "added_ms_p99_streamed": round(percentile(streamed, 0.99) - own, 2),
        "cpu_ms_a_request": round(spent_ms, 2),
        "streamed_tokens_per_s": round(rate, 1),
        "cpu_share_of_a_core": round(share, 4),
        "cpu_share_at_200": round(share * 200 / rate, 4),
        "resident_mib": round(resident, 1),
        "torch": torch,
    }


def main() -> int:
    """Measure, print, and compare with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--profile", type=Path, help="where cProfile writes the first server's")
    given = parser.parse_args()
    found = measure(given.requests, given.seconds, given.profile)
    for name, value in found.items():
        print(f"{name:26} {value}")
    within = (
        found["added_ms_median"] <= MEDIAN_MS
        and found["added_ms_median_streamed"] <= MEDIAN_MS
        and found["cpu_share_at_200"] <= CPU_SHARE
        and not found["torch"]
    )
    print(json.dumps(found | {"within_bounds": within}))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
