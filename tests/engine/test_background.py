"""Threads in the background have a low CPU priority, and the others keep theirs."""

import os
import sys
import threading

import pytest

from loraplex.engine.background import NICENESS, background_pool


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("count", [1, 3])
def test_threads_yield_to_the_others(count: int) -> None:
    before = niceness()
    meet = threading.Barrier(count, timeout=30)
    with background_pool(count, "test") as pool:
        jobs = [pool.submit(lambda: (meet.wait(), niceness())[1]) for _ in range(count)]
        found = {job.result() for job in jobs}
    assert found == {min(before + NICENESS, 19) if sys.platform == "linux" else before}
    assert niceness() == before
