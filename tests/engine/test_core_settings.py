"""The engine's settings refuse what cannot work, by name and with a value that does."""

import argparse
import dataclasses
import json
import logging
import re
import sys
from typing import Any

import pytest

from loraplex.engine.log import LineFormatter
from loraplex.engine.settings import EngineSettings, SettingsError, add_arguments, from_arguments


def parse(*arguments: str) -> EngineSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(arguments))


def test_no_flags_are_the_defaults() -> None:
    assert parse() == EngineSettings()


@pytest.mark.parametrize("field", dataclasses.fields(EngineSettings), ids=lambda f: f.name)
def test_every_setting_has_a_flag_and_a_word_of_help(field: dataclasses.Field[Any]) -> None:
    others = {
        "dtype": ("bfloat16", "bfloat16"),
        "memory_utilization": ("0.25", 0.25),
        "kv_cache_dtype": ("float32", "float32"),
        "enable_prefix_caching": ("false", False),
        "async_scheduling": ("false", False),
        "speculative_tokens": ("3", 3),
        "max_num_seqs": ("100", 100),
        "quantization": ("int8", "int8"),
        "cores": ("1,3", (1, 3)),
    }
    given, value = others.get(field.name, ("1000", 1000))
    changed = dataclasses.replace(EngineSettings(), **{field.name: value})
    for name in (field.name, *field.metadata["aliases"]):
        assert parse(f"--{name.replace('_', '-')}", given) == changed
    assert field.metadata["help"]


def test_the_names_that_vllm_uses_are_known() -> None:
    assert parse("--gpu-memory-utilization", "0.9").memory_utilization == 0.9
    assert parse("--kv-cache-memory-bytes", "4096").kv_cache_bytes == 4096


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 63),
        ("block_size", 0),
        ("kv_cache_bytes", 0),
        ("memory_utilization", 0.0),
        ("memory_utilization", 1.01),
        ("memory_utilization", float("nan")),
        ("dtype", "float16"),
        ("threads", 0),
        ("max_waiting", 0),
    ],
)
def test_what_can_never_work_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} is .*give (one|at least|a share)"):
        EngineSettings(**{name: value})


def test_the_model_length_is_what_base_and_cache_allow() -> None:
    assert EngineSettings().fit_model_len(base_len=100, capacity_tokens=64) == 64
    assert EngineSettings().fit_model_len(base_len=50, capacity_tokens=64) == 50
    assert EngineSettings(max_model_len=40).fit_model_len(base_len=50, capacity_tokens=64) == 40


@pytest.mark.parametrize(
    ("asked", "capacity", "words"),
    [
        (200, 1000, "the base was made for 100 tokens: give at most 100"),
        (90, 80, "the KV cache holds 80 tokens: give at most 80, or raise kv_cache_bytes"),
        (None, 1, "too few for any request: raise kv_cache_bytes"),
    ],
)
def test_a_model_length_that_cannot_fit_is_refused(
    asked: int | None, capacity: int, words: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        EngineSettings(max_model_len=asked).fit_model_len(base_len=100, capacity_tokens=capacity)


def test_a_log_record_is_one_line_with_its_traceback() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        record = logging.LogRecord(
            "loraplex.engine.core", logging.ERROR, "", 0, "two\nlines %d", (7,), sys.exc_info()
        )
    line = LineFormatter().format(record)
    assert "\n" not in line
    assert " ERROR engine.core two\\nlines 7 traceback=" in line
    assert json.loads(line.split("traceback=")[1]).endswith("ValueError: first\nsecond")
