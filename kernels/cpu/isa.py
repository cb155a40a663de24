"""Which instruction sets the native step has a body for, and which of them this machine runs.

This file knows the names in `/proc/cpuinfo` and the compiler's options for each set.
"""

import os
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "LORAPLEX_ISA"
CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Isa:
    """An instruction set: the features it needs, as Linux names them, and how to compile for it."""

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]


def _isa(name: str, needs: str, options: str) -> Isa:
    return Isa(name, frozenset(needs.split()), tuple(options.split()))


ISAS = (  # best first
    _isa(
        "avx512",
        "avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 fma f16c",
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni -mfma -mf16c",
    ),
    _isa(
        "avx512-vnni",
        "avx512f avx512bw avx512vl avx512dq avx512_vnni fma f16c",
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c",
    ),
    _isa("avx2-vnni", "avx2 avx_vnni fma f16c", "-mavx2 -mavxvnni -mfma -mf16c"),
    _isa("avx2", "avx2 fma f16c", "-mavx2 -mfma -mf16c"),
    _isa("scalar", "", ""),
)
BY_NAME = {isa.name: isa for isa in ISAS}


class IsaError(ValueError):
    """An instruction set was asked for that this machine does not have."""


def runnable(features: frozenset[str] | None = None) -> tuple[Isa, ...]:
    """The instruction sets of a machine with `features` (default: this one), best first."""
    has = cpu_features() if features is None else features
    return tuple(isa for isa in ISAS if isa.needs <= has)


def candidates() -> tuple[Isa, ...]:
    """The sets to try, best first: those of this machine, or the one in `LORAPLEX_ISA`.

    Raises `IsaError` when that one cannot run here.
    """
    wanted = os.environ.get(VARIABLE)
    found = runnable()
    if not wanted:
        return found
    chosen = tuple(isa for isa in found if isa.name == wanted)
    if not chosen:
        names = ", ".join(isa.name for isa in found)
        raise IsaError(f"{VARIABLE} is {wanted!r}; this machine runs {names}")
    return chosen


def cpu_features(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The features of the first processor, none where they are not known."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())
