"""Redis, the database and the server itself die under load: nothing lost, nothing charged twice.

Each test counts: every request that was answered is one row of the ledger with its tokens, whatever
died meanwhile, and what a budget has been charged is what the ledger says. Nobody helps.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from fake_served import CHAT, FakeServed, Load, eventually, fake_serving
from local_postgres import LocalPostgres
from sqlalchemy import select

from loraplex.platform.db.models import UsageRecord
from loraplex.platform.db.session import Database

FAR = 1_000_000_000
BUDGET = {"tokens_per_day": FAR, "requests_per_minute": 1_000_000}


def ledger(url: str) -> list[UsageRecord]:
    """All rows."""

    async def read() -> list[UsageRecord]:
        db = Database(url)
        async with db.read(None) as session:
            rows = list(await session.scalars(select(UsageRecord)))
        await db.dispose()
        return rows

    return anyio.run(read)


def has_all(url: str, loads: list[Load]) -> bool:
    return {a.request_id for load in loads for a in load.good} <= {
        row.request_id for row in ledger(url)
    }


def check_books(url: str, loads: list[Load]) -> None:
    """Wait for what was answered to be in the ledger; then it is there once, and nothing else."""
    eventually(lambda: has_all(url, loads), "all answers are in the ledger")
    rows = ledger(url)
    told = {row.request_id: row.prompt_tokens + row.completion_tokens for row in rows}
    assert len(told) == len(rows)
    assert told == {a.request_id: a.tokens for load in loads for a in load.good}


def used_today(served: FakeServed, key: str) -> int:
    """Tokens that the tenant's budget of today has been charged, or has reserved."""
    with served.client(key) as client:
        answer = client.get("/v1/quota")
    assert answer.is_success, answer.text
    (bucket,) = [each for each in answer.json()["buckets"] if each["kind"] == "tenant"]
    (use,) = [each["used"] for each in bucket["limits"] if each["name"] == "tokens_per_day"]
    return int(use)


def test_redis_is_killed_under_load_and_comes_back(tmp_path: Path) -> None:
    with fake_serving(tmp_path / "data", redis_timeout_s="2") as served:
        budget = served.new_tenant("budget", **BUDGET)
        rates = served.new_tenant("rates", requests_per_minute=1_000_000)
        loads = [Load(served, budget), Load(served, rates)]
        for load in loads:
            load.more(good=10)
        os.kill(served.child(b"redis-server"), signal.SIGKILL)
        loads[0].more(bad=3)
        for load in loads:
            load.more(good=10)
            load.stop()
        assert {(a.status, a.code, a.retry_after) for a in loads[0].bad} == {
            (503, "limiter_down", True)
        }
        assert not loads[1].bad, "rates without a budget are held by the server itself meanwhile"
        url = f"sqlite:///{tmp_path}/data/loraplex.db"
        check_books(url, loads)
        charged = sum(answer.tokens for answer in loads[0].good)
        eventually(lambda: used_today(served, budget) == charged, "the budget is what was used")


@pytest.fixture
def postgres() -> Iterator[LocalPostgres]:
    server = LocalPostgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


def test_the_database_is_killed_under_load_and_comes_back(
    postgres: LocalPostgres, tmp_path: Path
) -> None:
    url = postgres.url().render_as_string()
    with fake_serving(tmp_path / "data", database_url=url) as served:
        key = served.new_tenant("budget", **BUDGET)
        load = Load(served, key)
        load.more(good=10)
        postgres.kill()
        load.more(bad=3)
        postgres.start()
        load.more(good=10)
        load.stop()
        assert {(a.status, a.code, a.retry_after) for a in load.bad} == {(503, "unavailable", True)}
        check_books(url, [load])
        charged = sum(answer.tokens for answer in load.good)
        eventually(lambda: used_today(served, key) == charged, "the budget is what was used")


def test_the_server_is_killed_in_a_stream(tmp_path: Path) -> None:
    """The next one finds the request by its lease's end, records it, and frees its place."""
    settings = {"lease_s": "1.5"}
    body = {
        "model": "tiny-base",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 500,
        "stream": True,
    }
    url = f"sqlite:///{tmp_path}/data/loraplex.db"
    with fake_serving(tmp_path / "data", token_ms=20, **settings) as served:
        key = served.new_tenant("single", **BUDGET, max_concurrency=1)
        with served.client(key) as client, client.stream("POST", CHAT, json=body) as stream:
            request_id = stream.headers["x-request-id"]
            lines = filter(None, stream.iter_lines())
            for _ in range(60):  # more than a second, thus heartbeats that tell of tokens
                next(lines)
            assert client.post(CHAT, json=body).status_code == 429
            assert served.end(signal.SIGKILL) == -signal.SIGKILL
    assert ledger(url) == []
    with fake_serving(tmp_path / "data", **settings) as served:
        (row,) = eventually(lambda: ledger(url), "the request is in the ledger")
        assert (row.request_id, row.outcome) == (request_id, "server_died")
        assert 0 < row.completion_tokens < 500
        load = Load(served, key, callers=1)
        load.more(good=3)
        load.stop()
        rows = eventually(lambda: len(r := ledger(url)) == 1 + len(load.good) and r, "all rows")
        assert Counter(row.outcome for row in rows) == {
            "server_died": 1,
            "length": len(load.good),
        }
        charged = sum(row.prompt_tokens + row.completion_tokens for row in rows)
        eventually(lambda: used_today(served, key) == charged, "the budget is what was used")
