"""Wakes a loop that blocks in poll, from any thread or signal handler."""

import contextlib
import socket


class Waker:
    """A pair of sockets: `set` makes `fileno` readable until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._reader.fileno()

    def set(self) -> None:
        """Wake the loop; any number of calls before `clear` wake it once."""
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget the calls of `set` so far."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Close both ends; `set` must not be called any more."""
        self._reader.close()
        self._writer.close()
