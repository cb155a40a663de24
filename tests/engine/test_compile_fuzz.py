"""Fuzzing the compiler: nothing crashes it and nothing broken passes; and what patterns mean."""

import re
import runpy
import struct
import tempfile
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.compile_adapter import Report, compile_adapter
from loraplex.engine.peft_config_reader import HARMLESS, UNSUPPORTED, USED
from loraplex.engine.peft_patterns import PatternError, parse_pattern
from loraplex.engine.reasons import Rejected

KIT = runpy.run_path(str(Path(__file__).with_name("adapter_kit.py")))
BASE, CONFIG, tensors, write = itemgetter("BASE", "CONFIG", "tensors", "write")(KIT)

VALID = safetensors.numpy.save(tensors())


def mutations() -> st.SearchStrategy[bytes]:
    at = st.integers(0, len(VALID))
    header = st.integers(0, struct.unpack("<Q", VALID[:8])[0] + 8)
    some = st.binary(min_size=1, max_size=4)
    return st.one_of(
        at.map(lambda i: VALID[:i]),
        st.tuples(header, some).map(lambda x: VALID[: x[0]] + x[1] + VALID[x[0] + len(x[1]) :]),
        st.tuples(at, some).map(lambda x: VALID[: x[0]] + x[1] + VALID[x[0] + len(x[1]) :]),
        st.tuples(at, some).map(lambda x: VALID[: x[0]] + x[1] + VALID[x[0] :]),
        st.tuples(at, at).map(lambda x: VALID[: min(x)] + VALID[max(x) :]),
        st.binary(max_size=200),
    )


@given(mutations())
@settings(max_examples=150, deadline=None)
def test_mutated_weights_never_crash_and_never_pass_broken(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder), CONFIG, content)
        try:
            report = compile_adapter(source, BASE, source / "image")
        except Rejected as rejected:
            assert rejected.reasons
            return
        assert isinstance(report, Report)
        loaded = safetensors.numpy.load(content)
        assert {n: t.shape for n, t in loaded.items()} == {n: t.shape for n, t in tensors().items()}
        assert all(np.isfinite(t.astype(np.float32)).all() for t in loaded.values())


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
)
flat = scalars | st.lists(scalars, max_size=3)
values = flat | st.lists(flat, max_size=3) | st.dictionaries(st.text(max_size=8), flat, max_size=3)
fields = st.sampled_from(sorted(USED | HARMLESS | UNSUPPORTED.keys())) | st.text(max_size=8)


@given(st.dictionaries(fields, values, max_size=4))
@settings(max_examples=150, deadline=None)
def test_no_configuration_crashes(change: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder), CONFIG | change, VALID)
        try:
            compile_adapter(source, BASE, source / "image")
        except Rejected as rejected:
            assert all(reason.code and reason.message for reason in rejected.reasons)


paths = st.lists(
    st.sampled_from(["q", "v_proj", ".", r"\.", "0", "layers"]), min_size=1, max_size=4
)
patterns = st.builds(
    lambda start, anything, path, group, end: f"{start}{anything}{path}{group}{end}",
    st.sampled_from(["", "^"]),
    st.sampled_from(["", ".*"]),
    paths.map("".join) | st.just(""),
    st.lists(paths.map("".join), min_size=1, max_size=3).map(lambda x: f"({'|'.join(x)})")
    | st.just("(?:q|v_proj)")
    | st.just(""),
    st.sampled_from(["", "$"]),
)
names = st.lists(st.sampled_from(["q", "v_proj", ".", "0", "layers", "x"]), max_size=6).map("".join)


@given(patterns, names)
@settings(max_examples=150, deadline=None)
def test_patterns_mean_what_they_mean_as_regular_expressions(text: str, name: str) -> None:
    try:
        pattern = parse_pattern(text)
    except PatternError:
        assert not re.sub(r"^\^|\.\*|\$$", "", text)
        return
    assert pattern.matches_whole(name) == bool(re.fullmatch(text, name))
    assert pattern.matches_end(name) == bool(re.match(rf"(.*\.)?({text})$", name))
