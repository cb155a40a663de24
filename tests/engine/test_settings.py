"""The engine's settings: values that can never work, and lists of cores."""

import argparse
from typing import Any

import pytest

from loraplex.engine.settings import (
    EngineSettings,
    SettingsError,
    add_arguments,
    from_arguments,
    parse_cores,
)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0,2", (0, 2)), ("1-3", (1, 2, 3)), ("4-5, 2", (4, 5, 2)), ("[0, 1]", (0, 1))],
)
def test_cores_in_words(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "1,,2", "-1"])
def test_what_is_no_list_of_cores(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no list of cores such as 0,2-5"):
        parse_cores(text)


def test_flags() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(["--cores", "0-1", "--quantization", "int8-w8a8"])
    assert from_arguments(given) == EngineSettings(cores=(0, 1), quantization="int8-w8a8")
    assert from_arguments(parser.parse_args([])) == EngineSettings()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization": "int4"}, "quantization is 'int4'; give one of none, int8, int8-w8a8"),
        ({"dtype": "fp8"}, "dtype is 'fp8'; give one of auto, float32, bfloat16"),
        ({"cores": ()}, "give each core once"),
        ({"cores": (1, 1)}, "give each core once"),
        ({"cores": (0, 1), "threads": 3}, "cores names 2: leave threads out"),
        ({"threads": 0}, "threads is 0; give at least 1"),
    ],
)
def test_values_that_cannot_work(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        EngineSettings(**given)
