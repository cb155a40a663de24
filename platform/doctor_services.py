"""What the platform rests on, as `loraplex doctor` sees it: settings, database, Redis, images.

Reads, and writes nothing but one small file in the image store, which it removes. Refuses to know
this machine (`doctor.py`).
"""

import asyncio
import os
import secrets
import stat
import time
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import fsspec
from alembic.script import ScriptDirectory
from redis.exceptions import RedisError
from sqlalchemy import URL, text
from sqlalchemy.exc import DBAPIError

from loraplex import migrations
from loraplex.platform.config_file import read
from loraplex.platform.db.session import Database
from loraplex.platform.embedded_redis import EmbeddedRedis, RedisStartError, find_program
from loraplex.platform.findings import Finding
from loraplex.platform.limits import connect
from loraplex.platform.redaction import redact
from loraplex.platform.settings import Settings

ANSWER_S: Final = 5.0
SKEW_S: Final = 1.0
OLDEST_REDIS: Final = (6, 2)
SECRETS: Final = frozenset({"key_pepper", "key_peppers_old", "scope_secret", "database_url"})
ELSEWHERE: Final = frozenset(  # variables of ours that are no settings of `serve`
    {"API_KEY", "BACKEND", "CACHE", "ISA", "TEST_POSTGRES_URL", "URL"}
)


def configuration(settings: Settings) -> Finding:
    """The file, whether others may read secrets in it, and variables that nothing reads."""
    unread = [name for name in sorted(os.environ) if _is_unread(name)]
    if unread:
        found = f"nothing reads {', '.join(unread)}"
        return Finding("configuration", "warning", found, _meant(unread[0]))
    if settings.config is None:
        return Finding("configuration", "ok", "no file; variables and defaults")
    path = settings.config.expanduser()
    if SECRETS & read(path, Settings.model_fields).keys() and _is_open(path):
        mend = f"chmod 600 {path}"
        return Finding("configuration", "warning", f"{path} has secrets and others read it", mend)
    return Finding("configuration", "ok", str(path))


def _is_unread(variable: str) -> bool:
    name = variable.removeprefix("LORAPLEX_")
    known = {field.upper() for field in Settings.model_fields} | ELSEWHERE
    return name != variable and name.partition("__")[0] not in known


def _meant(variable: str) -> str:
    names = [f"LORAPLEX_{field.upper()}" for field in Settings.model_fields]
    near = get_close_matches(variable, names, n=1)
    return f"Did you mean {near[0]}?" if near else "docs/settings.md lists all settings."


def _is_open(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


async def database(settings: Settings) -> Finding:
    """Whether it opens, and whether its schema is of this version."""
    try:
        url = settings.database
        shown = url.render_as_string(hide_password=True)
        if _is_to_be_made(url):
            return Finding("database", "ok", f"{shown}, made at the first start")
        return _revision(shown, await _read_revision(url))
    except Exception as error:  # any driver's, any network's
        cause = redact(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        mend = "See that it runs and that LORAPLEX_DATABASE_URL is right, or unset it for SQLite."
        return Finding("database", "wrong", f"does not open ({cause})", mend)


def _is_to_be_made(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists()


async def _read_revision(url: URL) -> str | None:
    """The schema's revision; None before the first start."""
    db = Database(url)
    try:
        async with db.read(None) as session:
            await session.execute(text("SELECT 1"))
        async with db.read(None) as session:
            return str(await session.scalar(text("SELECT version_num FROM alembic_version")))
    except DBAPIError:
        return None
    finally:
        await db.dispose()


def _revision(shown: str, revision: str | None) -> Finding:
    script = ScriptDirectory(str(Path(str(migrations.__file__)).parent))
    newest = script.get_current_head()
    if revision in (None, newest):
        return Finding("database", "ok", f"{shown}, revision {revision or 'to be made'}")
    if revision in {each.revision for each in script.walk_revisions()}:
        found = f"{shown}, at revision {revision} of {newest}"
        return Finding("database", "warning", found, "Back it up; the next start upgrades it.")
    found = f"{shown}, at revision {revision}, which this version does not know"
    return Finding("database", "wrong", found, "A newer Loraplex made it: install that one.")


async def redis(settings: Settings, served: bool) -> list[Finding]:
    """Whether it answers, what it would forget, and how far its clock is from ours."""
    if settings.redis_url is None and not served:
        return [_embedded()]
    url = settings.redis_url or EmbeddedRedis(settings.redis_dir, settings.run_dir).url
    client = connect(url, timeout_s=ANSWER_S)
    try:
        before = time.time()
        seconds, microseconds = await client.time()
        skew = seconds + microseconds / 1e6 - (before + time.time()) / 2
        info = await client.info()
    except (RedisError, OSError, TimeoutError):
        mend = "Start it and see that LORAPLEX_REDIS_URL is right, or unset it for an embedded one."
        return [Finding("Redis", "wrong", "the one in LORAPLEX_REDIS_URL does not answer", mend)]
    finally:
        await client.aclose()
    return [_kept(info, "embedded" if settings.redis_url is None else "answers"), _clock(skew)]


def _embedded() -> Finding:
    try:
        return Finding("Redis", "ok", f"embedded, {find_program()}")
    except RedisStartError as error:
        return Finding("Redis", "wrong", "none to start", str(error))


def _kept(info: Mapping[str, Any], which: str) -> Finding:
    version = str(info.get("redis_version", "0"))
    found = f"{which}, version {version}"
    if tuple(map(int, version.split(".")[:2])) < OLDEST_REDIS:
        return Finding("Redis", "wrong", found, "Loraplex needs Redis 6.2 or Valkey.")
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory") and policy != "noeviction":
        mend = "Set maxmemory-policy noeviction: an evicted key is a limit that starts anew."
        return Finding("Redis", "warning", f"{found}, evicts keys ({policy})", mend)
    if not info.get("aof_enabled"):
        mend = "Set appendonly yes: without it a restart forgets what budgets have been used."
        return Finding("Redis", "warning", f"{found}, without an append-only file", mend)
    return Finding("Redis", "ok", f"{found}, with an append-only file")


def _clock(skew_s: float) -> Finding:
    found = f"{abs(skew_s) * 1000:.0f} ms from Redis'"
    if abs(skew_s) > SKEW_S:
        mend = "Run NTP on both: budgets change days by Redis' clock, the ledger by this one."
        return Finding("clock", "warning", found, mend)
    return Finding("clock", "ok", found)


async def store(settings: Settings) -> Finding:
    """Whether the image store takes a file and gives it up."""
    url = settings.image_store
    shown = redact(url)
    if settings.image_store_url is None and not _is_there(url):
        return Finding("image store", "ok", f"{shown}, made at the first start")
    try:
        async with asyncio.timeout(ANSWER_S):
            await asyncio.to_thread(_put_and_remove, url)
    except Exception as error:  # any store's
        cause = redact(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        mend = "See that LORAPLEX_IMAGE_STORE_URL is right and that its credentials may write."
        return Finding("image store", "wrong", f"{shown} cannot be written ({cause})", mend)
    return Finding("image store", "ok", f"{shown} can be written")


def _put_and_remove(url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    probe = f"{root}/.probe.{secrets.token_hex(8)}"
    fs.pipe_file(probe, b"probe")
    fs.rm_file(probe)


def _is_there(path: str) -> bool:
    return Path(path).exists()
