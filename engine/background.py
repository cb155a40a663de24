"""Threads that yield to the engine's steps: they run where cores are idle, and little elsewhere."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 16  # added: such a thread leaves a normal one 97% of their core (weights 29, 1024)


def background_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads have a low CPU priority, where threads can have one of their own."""
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))
