"""Several processes on one database: they take turns, and none fails."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import URL

from loraplex.platform import versions
from loraplex.platform.db.session import Database
from loraplex.platform.tenants import find_tenant

PROGRAM = """
import asyncio, sys
from loraplex.platform import registry
from loraplex.platform.audit import SYSTEM
from loraplex.platform.db.session import Database
from loraplex.platform.errors import NameConflict
from loraplex.platform.tenants import create_tenant, find_tenant

async def main():
    db = Database(sys.argv[1])
    print("imported", flush=True)
    sys.stdin.read(1)
    await db.migrate()
    try:
        async with db.session(None) as session:
            await create_tenant(session, "acme", actor=SYSTEM)
    except NameConflict:
        pass
    async with db.read(None) as session:
        tenant_id = (await find_tenant(session, "acme")).id
    for _ in range(int(sys.argv[2])):
        async with db.session(tenant_id) as session:
            await registry.add_version(session, tenant_id, "poet", digest="d" * 64, base="f",
                base_name="Base", report={"rank": 8, "bytes": 1}, actor=SYSTEM)
    await db.dispose()

asyncio.run(main())
"""


@pytest.mark.anyio
async def test_processes_migrate_and_publish_at_once(fresh_url: URL) -> None:
    run_at_once(PROGRAM, fresh_url.render_as_string(hide_password=False), "15")
    db = Database(fresh_url)
    async with db.read(None) as session:
        tenant = await find_tenant(session, "acme")
        page = await versions.list_versions(session, tenant.id, "poet")
    assert [version.number for version in page.items] == list(range(30, 0, -1))
    await db.dispose()


@pytest.mark.anyio
async def test_a_new_file_that_another_process_writes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself does not wait where the write-ahead log is to begin."""
    file = tmp_path / "new.db"
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    async def sleep(_: float) -> None:
        other.execute("COMMIT")

    monkeypatch.setattr("loraplex.platform.db.session.anyio.sleep", sleep)
    db = Database(f"sqlite:///{file}")
    await db.migrate()
    assert not other.in_transaction
    await db.dispose()
    other.close()


def run_at_once(program: str, *arguments: str) -> None:
    """Run it in two processes, which print "imported" and go on together."""
    command = [sys.executable, "-c", program, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == b"imported\n", process.stderr.read()
    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
