"""The speed at which this machine reads memory now: what a number of another run is worth.

A virtual machine is moved between places of different speed, so rates compare within a run only.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BYTES_EACH = 256 << 20  # past every cache
TRIES = 5


def read_gb_per_s(threads: int) -> float:
    """Gigabytes a second that so many threads read together, each its own array: the best try."""
    arrays = [np.ones(BYTES_EACH // 8, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        seconds = min(_time(pool, arrays) for _ in range(TRIES))
    return round(threads * BYTES_EACH / seconds / 1e9, 1)


def _time(pool: ThreadPoolExecutor, arrays: list[np.ndarray]) -> float:
    started = time.perf_counter()
    list(pool.map(np.bitwise_or.reduce, arrays))
    return time.perf_counter() - started
