"""A peer's process as `compare.py` holds it: started, asked, and stopped while the other side runs.

Between two works the whole process group is stopped by a signal, so that no spinning thread of the
peer takes time from the other side. Knows processes; refuses to know which peer it is.
"""

import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from peers.wire import Facts, Setup, Times, Work, send_work

SCRIPTS = Path(__file__).resolve().parent
END_S = 30.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


class PeerError(RuntimeError):
    """The peer ended or said something that is no answer; the message names its log."""


class Peer:
    """Runs works in a peer's own interpreter. Raises `PeerError` when the peer fails."""

    def __init__(self, python: str, script: str, setup: Setup) -> None:
        name = "lora" if setup.adapters else "base"
        self._log = Path(setup.folder) / f"{name}.log"
        job = Path(setup.folder) / f"{name}.json"
        job.write_text(json.dumps(asdict(setup)))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(SCRIPTS / script), str(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | QUIET | {"OMP_NUM_THREADS": str(setup.threads)},
                start_new_session=True,
            )
        self.facts: Facts = self._answer()["facts"]
        self._stop()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=0 if error else END_S)
        except subprocess.TimeoutExpired:
            self._kill()

    def run(self, work: Work) -> Times:
        """Let the peer run one work."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(send_work(work))
        self._process.stdin.flush()
        times: Times = self._answer()["times"]
        self._stop()
        return times

    def _stop(self) -> None:
        """Stop the group, and wait until its first process stands still or has ended."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    @property
    def is_stopped(self) -> bool:
        """Whether it has been stopped, as it is between two works."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            self._kill()
            raise PeerError(f"the peer failed; the end of {self._log}:\n{self._tail()}") from None
        return answer

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate(timeout=END_S)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
