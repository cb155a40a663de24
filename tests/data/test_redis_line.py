"""A line to Redis: a call has its own answer, or an error in time, whatever becomes of Redis."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from limit_kit import PATIENCE
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as Late

from loraplex.platform.embedded_redis import EmbeddedRedis
from loraplex.platform.limits import connect
from loraplex.platform.redis_line import RedisLine, Script

pytestmark = pytest.mark.anyio
TIMEOUT_S = 0.2


@pytest.fixture
def line(client: Redis) -> RedisLine:
    return RedisLine(client, PATIENCE)


@pytest.fixture
def hasty(client: Redis) -> RedisLine:
    return RedisLine(client, TIMEOUT_S)


@contextmanager
def paused(redis: EmbeddedRedis) -> Iterator[None]:
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(redis.pid, signal.SIGCONT)


def kill(redis: EmbeddedRedis) -> None:
    watch = os.pidfd_open(redis.pid)
    os.kill(redis.pid, signal.SIGKILL)
    os.waitid(os.P_PIDFD, watch, os.WEXITED | os.WNOWAIT)
    os.close(watch)


async def connections(client: Redis) -> int:
    """Of all clients; the one that asks among them."""
    return len(await client.client_list())


async def test_calls_at_once_have_each_its_own_answer(client: Redis, line: RedisLine) -> None:
    texts = [f"text {i}" * (i * i) for i in range(200)]
    asked = [line.call("ECHO", text) for text in texts]
    assert await asyncio.gather(*asked) == [text.encode() for text in texts]
    assert await connections(client) == 2


async def test_an_error_is_the_answer_of_its_call_alone(line: RedisLine) -> None:
    answers = await asyncio.gather(
        line.call("ECHO", "a"), line.call("ECHO"), line.call("ECHO", "b"), return_exceptions=True
    )
    assert (answers[0], answers[2]) == (b"a", b"b")
    assert isinstance(answers[1], ResponseError)
    assert "wrong number of arguments" in str(answers[1])


async def test_a_script_is_sent_whole_only_where_it_is_not_known(
    client: Redis, line: RedisLine
) -> None:
    script = Script(line, "return {KEYS[1], ARGV[1] + 1}")
    assert await client.script_exists(script.sha) == [False]
    for _ in range(2):
        assert await script(["k"], [41]) == [b"k", 42]
        assert await client.script_exists(script.sha) == [True]
        await client.script_flush()
    wrong = Script(line, "return redis.error_reply('NO no')")
    with pytest.raises(ResponseError, match="NO no"):
        await wrong([], [])


async def test_who_leaves_does_not_take_the_answer_of_another(line: RedisLine) -> None:
    await line.call("PING")
    for leaves in (0, 3, 7):
        asked = [asyncio.create_task(line.call("ECHO", str(i))) for i in range(8)]
        await asyncio.sleep(0)
        asked[leaves].cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        expected: list[object] = [str(i).encode() for i in range(8)]
        assert isinstance(answers[leaves], asyncio.CancelledError)
        assert [a for a in answers if isinstance(a, bytes)] == (
            expected[:leaves] + expected[leaves + 1 :]
        )


async def test_what_redis_lost_is_asked_again(own_redis: EmbeddedRedis, line: RedisLine) -> None:
    """It dies with the calls in its socket, and another one answers them."""
    await line.call("SET", "kept", "yes")
    with paused(own_redis):
        asked = [asyncio.create_task(line.call("ECHO", str(i))) for i in range(20)]
        await asyncio.sleep(0)
        kill(own_redis)
        own_redis.start()
    assert await asyncio.gather(*asked) == [str(i).encode() for i in range(20)]


async def test_nobody_waits_longer_than_the_time_of_a_call(
    own_redis: EmbeddedRedis, line: RedisLine, hasty: RedisLine
) -> None:
    """First with a connection, and then for a new one."""
    await hasty.call("PING")
    with paused(own_redis):
        for _ in range(3):
            before = time.monotonic()
            with pytest.raises(Late):
                await hasty.call("PING")
            assert time.monotonic() - before >= TIMEOUT_S * 0.9
    assert await line.call("PING") == b"PONG"
    assert await hasty.call("ECHO", "mine") == b"mine"


async def test_a_late_answer_is_nobodys(
    own_redis: EmbeddedRedis, line: RedisLine, hasty: RedisLine
) -> None:
    await hasty.call("PING")
    with paused(own_redis):
        with pytest.raises(Late):
            await hasty.call("ECHO", "late")
        asked = asyncio.create_task(hasty.call("ECHO", "next"))
        await asyncio.sleep(0)
    await line.call("PING")
    answers = await asyncio.gather(
        asked, *(hasty.call("ECHO", str(i)) for i in range(5)), return_exceptions=True
    )
    for answer, right in zip(answers, (b"next", b"0", b"1", b"2", b"3", b"4"), strict=True):
        assert answer == right or isinstance(answer, Late)


async def test_an_answer_that_this_process_was_too_busy_to_take_counts(hasty: RedisLine) -> None:
    id = await hasty.call("CLIENT", "ID")
    asked = asyncio.create_task(hasty.call("CLIENT", "ID"))
    await asyncio.sleep(0)
    time.sleep(TIMEOUT_S * 1.5)  # noqa: ASYNC251 (it is what is tested)
    assert await asked == id


async def test_calls_beside_a_late_one_have_all_their_time(
    own_redis: EmbeddedRedis, line: RedisLine
) -> None:
    """New ones go to another connection: that of the late one may be dead."""
    id = await line.call("CLIENT", "ID")
    with paused(own_redis):
        given_up = asyncio.create_task(line.call("ECHO", "given up"))
        asked = [asyncio.create_task(line.call("RPUSH", "list", str(i))) for i in range(3)]
        await asyncio.sleep(0)
        given_up.cancel()
        for _ in range(3):
            with pytest.raises(Late):
                await line._call(("PING",), asyncio.get_running_loop().time() + 0.02)
        assert not any(task.done() for task in asked)
    assert await line.call("CLIENT", "ID") != id
    assert await asyncio.gather(*asked) == [1, 2, 3]


async def test_a_closed_connection_is_opened_anew(client: Redis, line: RedisLine) -> None:
    for _ in range(3):
        id = await line.call("CLIENT", "ID")
        await client.client_kill_filter(_id=id)
        assert await line.call("CLIENT", "ID") != id
        assert await connections(client) == 2


async def test_its_client_closes_it(own_redis: EmbeddedRedis, client: Redis) -> None:
    other = connect(own_redis.url, timeout_s=PATIENCE)
    line = RedisLine(other, PATIENCE)
    id = await line.call("CLIENT", "ID")
    await other.aclose()
    async with asyncio.timeout(PATIENCE):
        while id in {int(each["id"]) for each in await client.client_list()}:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_the_url_says_which_database_and_who_asks(
    own_redis: EmbeddedRedis, client: Redis
) -> None:
    await client.execute_command("ACL", "SETUSER", "ann", "on", ">secret", "+@all", "~*")
    for protocol in (2, 3):
        options = f"protocol={protocol}&db=3&username=ann&password=secret"
        other = connect(f"{own_redis.url}?{options}", timeout_s=PATIENCE)
        line = RedisLine(other, PATIENCE)
        info = await line.call("CLIENT", "INFO")
        assert {b"db=3", b"user=ann"} <= {*info.split()}
        await other.aclose()
    other = connect(f"{own_redis.url}?username=ann&password=wrong", timeout_s=PATIENCE)
    with pytest.raises(RedisError, match=r"(?i)password"):
        await RedisLine(other, PATIENCE).call("PING")
    await other.aclose()


async def test_who_is_no_redis_is_left(tmp_path: Path) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(b"What?" if b"PING" in data else b"+OK\r\n" * data.count(b"CLIENT"))
        writer.close()
        await writer.wait_closed()

    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(babble, path):
        client = connect(f"unix://{path}", timeout_s=PATIENCE)
        with pytest.raises(RedisError, match="no Redis"):
            await RedisLine(client, 2.0).call("PING")
        await client.aclose()


STEPS = ("ask", "ask", "ask", "hasty", "leave", "turn", "wait", "cut", "pause", "go")


@dataclass
class Play:
    """Calls on a line, and what befalls them; each must end with its own answer if with any."""

    server: EmbeddedRedis
    line: RedisLine
    killer: Redis
    asked: list[asyncio.Task[object]] = field(default_factory=list)
    errors: list[set[type[BaseException]]] = field(default_factory=list)  # that each may have
    is_paused: bool = False

    async def take(self, step: str, which: int = 0) -> None:
        match step:
            case "ask":
                self.ask(PATIENCE)
            case "hasty":
                self.ask(0.003)
                self.errors[-1].add(Late)
            case "leave" if self.asked:
                index = which % len(self.asked)
                self.asked[index].cancel()
                self.errors[index].add(asyncio.CancelledError)
            case "turn":
                await asyncio.sleep(0)
            case "wait" if not self.is_paused:
                await self.line.call("PING")
            case "cut" if not self.is_paused:
                await self.killer.client_kill_filter(_type="normal", skipme=True)
                for each in self.errors:
                    each.add(RedisError)
            case "pause" | "go":
                self.is_paused = step == "pause"
                os.kill(self.server.pid, signal.SIGSTOP if self.is_paused else signal.SIGCONT)

    def ask(self, within_s: float) -> None:
        until = asyncio.get_running_loop().time() + within_s
        call = self.line._call(("ECHO", str(len(self.asked))), until)
        self.asked.append(asyncio.create_task(call))
        self.errors.append(set())

    async def check(self) -> None:
        answers = await asyncio.gather(*self.asked, return_exceptions=True)
        for index, (answer, errors) in enumerate(zip(answers, self.errors, strict=True)):
            assert answer == str(index).encode() or isinstance(answer, tuple(errors)), answer
        assert await self.line.call("ECHO", "after") == b"after"


async def play(server: EmbeddedRedis, steps: Sequence[tuple[str, int]]) -> None:
    client, killer = (connect(server.url, timeout_s=PATIENCE) for _ in range(2))
    playing = Play(server, RedisLine(client, PATIENCE), killer)
    try:
        for step, which in steps:
            await playing.take(step, which)
    finally:
        await playing.take("go")
    await playing.check()
    await asyncio.gather(client.aclose(), killer.aclose())


def test_whatever_happens_no_call_has_the_answer_of_another(own_redis: EmbeddedRedis) -> None:
    with asyncio.Runner() as runner:

        @settings(max_examples=40, deadline=None)
        @given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=40))
        def check(steps: list[tuple[str, int]]) -> None:
            runner.run(play(own_redis, steps))

        check()
