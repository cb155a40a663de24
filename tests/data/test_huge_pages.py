"""Memory is moved under a process that does not notice."""

import subprocess
import sys

from loraplex.platform.huge_pages import PAGE, heaps

MAPS = """\
00400000-00c00000 r-xp 00000000 08:02 173521 /usr/bin/python
010ff000-01801000 rw-p 00000000 00:00 0      [heap]
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
7f1000001000-7f1000200000 rw-p 00000000 00:00 0
7f2000000000-7f2000400000 rw-p 00000000 08:02 9 /data/loraplex.db-shm
7f3000000000-7f3000400000 ---p 00000000 00:00 0
7f4000000000-7f4000400000 rw-s 00000000 00:00 0
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0 [stack]
"""
LIVES = """
from loraplex.platform.huge_pages import use_huge_pages
kept = [bytes([i]) * 100_000 for i in range(256)]
use_huge_pages()
assert kept == [bytes([i]) * 100_000 for i in range(256)]
"""


def test_whole_pages_of_private_anonymous_memory_are_found():
    assert list(heaps(MAPS)) == [(0x1200000, 3 * PAGE), (0x7F0000000000, 2 * PAGE)]


def test_a_process_goes_on_with_what_it_had():
    subprocess.run([sys.executable, "-c", LIVES], check=True)
