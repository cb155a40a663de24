"""The fake house with the fake compiler, and uploads that are taken over soon after a death."""

import runpy
import sys
from functools import partial
from pathlib import Path

from loraplex.platform import parts, upload_desk
from loraplex.platform.compiling import AdapterCompiler
from loraplex.platform.upload_sweep import Sweeper

TESTS = Path(__file__).resolve().parents[1]
COMPILER = (sys.executable, str(TESTS / "api" / "fake_compiler.py"))

if __name__ == "__main__":
    parts.AdapterCompiler = partial(AdapterCompiler, command=COMPILER)
    parts.Sweeper = partial(Sweeper, every_s=0.1)
    upload_desk.LEASE_S = 0.5
    house = TESTS.parent / "benchmarks" / "fake_house.py"
    sys.argv[0] = str(house)
    runpy.run_path(str(house), run_name="__main__")
