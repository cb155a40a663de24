"""How long the server takes for an admin page with many tenants and adapters in the database.

    python benchmarks/admin.py [--adapters 10000] [--tenants 1000] [--repeat 20]

A server in a process of its own, with SQLite, an embedded Redis and the scripted engine: what is
timed is a request, from its first byte to its answer's last. The last line is one JSON object: the
median of each screen in milliseconds, the slowest of them, and whether it is under 100 ms.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from loraplex.platform.admin.sessions import open_session
from loraplex.platform.admin.visit import COOKIE
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.session import Database
from loraplex.platform.registry import add_version
from loraplex.platform.settings import Settings
from loraplex.platform.tenants import create_tenant
from loraplex.platform.users import create_user

HOUSE = Path(__file__).with_name("fake_house.py")
SCREENS = (
    "",
    *(f"/{name}" for name in ["adapters", "upload", "playground", "keys", "tenants", "usage"]),
)
MORE = ("/users", "/audit", "/system", "/adapters?query=poet-7")
GOAL_MS = 100.0


async def fill(db: Database, tenants: int, adapters: int) -> None:
    """So many tenants, and adapters spread over them, each with one version."""
    async with db.session(None) as session:
        made = [
            (await create_tenant(session, f"tenant-{n:05}", actor=SYSTEM)).id
            for n in range(tenants)
        ]
    for start in range(0, adapters, 500):
        async with db.session(None) as session:
            for number in range(start, min(start + 500, adapters)):
                await add_version(
                    session,
                    made[number % tenants],
                    f"poet-{number:05}",
                    digest=f"{number:064x}",
                    base="0" * 64,
                    base_name="tiny-base",
                    report={"rank": 16, "bytes": 1 << 20, "modules": {"q_proj": 30}},
                    actor=SYSTEM,
                )


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The server on what is in the folder; gives its address."""
    command = [sys.executable, str(HOUSE), "--data-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(line for line in server.stdout if line.startswith("API: "))
            yield line.split()[1].removesuffix("/v1")
        finally:
            server.terminate()


async def prepare(folder: Path, tenants: int, adapters: int) -> str:
    """Fill the database, and sign an operator in; gives the session's id."""
    settings = Settings(data_dir=folder)
    settings.open_data_dir()
    db = Database(settings.database)
    await db.migrate()
    await fill(db, tenants, adapters)
    async with db.session(None) as session:
        user = await create_user(session, None, "timer", "operator", actor=SYSTEM)
    token = await open_session(db, user.id)
    await db.dispose()
    return token


def measure(repeat: int, tenants: int, adapters: int) -> dict[str, float]:
    """Median milliseconds by screen."""
    with tempfile.TemporaryDirectory() as name:
        token = asyncio.run(prepare(Path(name), tenants, adapters))
        headers = {"cookie": f"{COOKIE}={token}"}
        with serving(Path(name)) as url, httpx.Client(base_url=url, headers=headers) as client:
            return {place or "/": _time(client, place, repeat) for place in SCREENS + MORE}


def _time(client: httpx.Client, place: str, repeat: int) -> float:
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        answer = client.get(f"/admin{place}")
        times.append(time.perf_counter() - began)
        assert answer.status_code == 200, answer.text
    return round(1000 * statistics.median(times), 1)


def main() -> None:
    """Measure, and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--adapters", type=int, default=10_000)
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    found = measure(options.repeat, options.tenants, options.adapters)
    for place, milliseconds in found.items():
        print(f"{place:30} {milliseconds:8.1f} ms")
    slowest = max(found.values())
    print(json.dumps({"pages_ms": found, "slowest_ms": slowest, "under_goal": slowest < GOAL_MS}))


if __name__ == "__main__":
    main()
