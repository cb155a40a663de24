"""The engine's settings: values that can never work, lists of cores, switches."""

import argparse
from typing import Any

import pytest

from loraplex.engine.settings import (
    EngineSettings,
    SettingsError,
    add_arguments,
    from_arguments,
    parse_cores,
    parse_switch,
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


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("on", True)])
def test_switches_in_words(text: str, value: bool) -> None:
    assert parse_switch(text) is value


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], True),
        (["--enable-prefix-caching"], True),
        (["--enable-prefix-caching", "false"], False),
        (["--no-enable-prefix-caching"], False),
        (["--no-enable-prefix-caching", "--enable-prefix-caching"], True),
    ],
)
def test_a_switch_needs_no_value(arguments: list[str], value: bool) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert from_arguments(parser.parse_args(arguments)).enable_prefix_caching is value


def test_what_is_no_switch(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--enable-prefix-caching", "perhaps"])
    assert "'perhaps' is neither true nor false" in capsys.readouterr().err


def test_wanted_rows() -> None:
    assert EngineSettings(max_num_seqs=3).max_wanted == 67


def test_the_dtype_of_kv_is_the_executor_s() -> None:
    assert EngineSettings().choose_kv_dtype("torch", "float32", "int8") == "float32"
    for asked in ("float32", "int8"):
        settings = EngineSettings(kv_cache_dtype=asked)
        assert settings.choose_kv_dtype("torch", "float32", "int8") == asked
    plain = "plain executor keeps KV as bfloat16: give auto, bfloat16"
    gpu = "gpu executor keeps KV as bfloat16 or int8: give auto, bfloat16, int8"
    for asked, others, message in (
        ("float32", (), f"{plain}, or set dtype to float32$"),
        ("int8", (), f"{plain}$"),
        ("float32", ("int8",), f"{gpu}, or set dtype to float32$"),
    ):
        settings = EngineSettings(kv_cache_dtype=asked)
        with pytest.raises(SettingsError, match=f"is {asked}, but the {message}"):
            settings.choose_kv_dtype(message.split()[0], "bfloat16", *others)


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
        (
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype is 'fp8'; give one of auto, float32, bfloat16, int8",
        ),
        ({"swap_space": -1.0}, "swap_space is -1.0; give at least 0"),
        ({"swap_space": float("nan")}, "swap_space is nan; give at least 0"),
        ({"speculative_tokens": 17}, "speculative_tokens is 17; give at most 16"),
        ({"image_ttl_s": -0.1}, "image_ttl_s is -0.1; give at least 0"),
        ({"tenant_images": -1}, "tenant_images is -1; give at least 0"),
        ({"cores": ()}, "give each core once"),
        ({"cores": (1, 1)}, "give each core once"),
        ({"cores": (0, 1), "threads": 3}, "cores names 2: leave threads out"),
        ({"threads": 0}, "threads is 0; give at least 1"),
    ],
)
def test_values_that_cannot_work(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        EngineSettings(**given)
