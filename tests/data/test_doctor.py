"""What `loraplex doctor` says of settings, database, Redis and images, and a start of the same."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sqlalchemy import URL, text

from loraplex.platform import doctor_services as doctor
from loraplex.platform import parts
from loraplex.platform.boot import StartError
from loraplex.platform.db.session import Database
from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.settings import Settings

pytestmark = pytest.mark.anyio
INFO = {"redis_version": "7.2.4", "aof_enabled": 1, "maxmemory": 0}


async def set_revision(db: Database, revision: str) -> None:
    async with db.session(None) as session:
        await session.execute(text("UPDATE alembic_version SET version_num = :r"), {"r": revision})


async def test_the_schemas_revision(db: Database, db_url: URL, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url=db_url.render_as_string(False))
    found = await doctor.database(settings)
    newest = found.found.rpartition(" ")[2]
    assert found.state == "ok" and newest.isdecimal()
    try:
        await set_revision(db, "0001")
        found = await doctor.database(settings)
        assert (found.state, found.mend) == (
            "warning",
            "Back it up; the next start upgrades it.",
        )
        await set_revision(db, "9999")
        found = await doctor.database(settings)
        assert found.state == "wrong" and "9999" in found.found
        async with AsyncExitStack() as stack:
            with pytest.raises(StartError, match="A newer Loraplex made this database"):
                await parts.open_database(settings, stack)
    finally:
        await set_revision(db, newest)


async def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    fresh = Settings(data_dir=tmp_path)
    assert (await doctor.database(fresh)).state == "ok"
    away = Settings(data_dir=tmp_path, database_url="postgresql://u:hushhush@127.0.0.1:1/x")
    found = await doctor.database(away)
    assert found.state == "wrong"
    assert "hushhush" not in f"{found}"


async def test_a_redis_that_answers(redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, redis_url=redis_server.url)
    kept, clock = await doctor.redis(settings, served=False)
    assert (kept.what, kept.state) == ("Redis", "ok")
    assert "append-only" in kept.found
    assert (clock.what, clock.state) == ("clock", "ok")


async def test_no_redis_is_wrong_and_an_embedded_one_needs_no_server(tmp_path: Path) -> None:
    away = Settings(data_dir=tmp_path, redis_url="redis://:hushhush@127.0.0.1:1")
    (found,) = await doctor.redis(away, served=False)
    assert found.state == "wrong" and "hushhush" not in f"{found}"
    (found,) = await doctor.redis(Settings(data_dir=tmp_path), served=False)
    assert found.state == "ok"


@pytest.mark.parametrize(
    ("info", "state", "said"),
    [
        (INFO, "ok", "7.2.4"),
        (INFO | {"redis_version": "5.0.7"}, "wrong", "needs Redis 6.2"),
        (INFO | {"aof_enabled": 0}, "warning", "appendonly yes"),
        (INFO | {"maxmemory": 1, "maxmemory_policy": "allkeys-lru"}, "warning", "noeviction"),
        (INFO | {"maxmemory": 1, "maxmemory_policy": "noeviction"}, "ok", ""),
    ],
)
def test_what_redis_would_forget(info, state, said) -> None:
    found = doctor._kept(info, "answers")
    assert found.state == state
    assert said in f"{found.found} {found.mend}"


@pytest.mark.parametrize(("skew", "state"), [(0.2, "ok"), (-0.9, "ok"), (1.5, "warning")])
def test_clocks_apart(skew, state) -> None:
    assert doctor._clock(skew).state == state


async def test_a_store_that_can_be_written_and_one_that_cannot(tmp_path: Path) -> None:
    assert (await doctor.store(Settings(data_dir=tmp_path))).state == "ok"
    (tmp_path / "images").mkdir()
    assert "can be written" in (await doctor.store(Settings(data_dir=tmp_path))).found
    assert not list((tmp_path / "images").iterdir())
    (tmp_path / "file").touch()
    broken = Settings(data_dir=tmp_path, image_store_url=f"file://{tmp_path}/file/below")
    found = await doctor.store(broken)
    assert found.state == "wrong" and "cannot be written" in found.found


def test_a_variable_that_nothing_reads_and_a_file_that_others_read(tmp_path, monkeypatch) -> None:
    file = tmp_path / "loraplex.toml"
    file.write_text('key_pepper = "0123456789abcdef"\n')
    file.chmod(0o644)
    settings = Settings(data_dir=tmp_path, config=file)
    assert doctor.configuration(settings).mend == f"chmod 600 {file}"
    file.chmod(0o600)
    assert doctor.configuration(settings).state == "ok"
    monkeypatch.setenv("LORAPLEX_ENGINE__THREADS", "2")
    assert doctor.configuration(settings).state == "ok"
    monkeypatch.setenv("LORAPLEX_PROT", "2")
    found = doctor.configuration(settings)
    assert (found.state, found.mend) == ("warning", "Did you mean LORAPLEX_PORT?")
