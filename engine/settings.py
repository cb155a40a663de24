"""The engine's settings: one frozen dataclass, checked when it is made, and its command line flags.

Each field is a flag of the same name; the aliases are the names that vLLM's users know. This file
knows numbers and their limits; it refuses to know devices and how memory is measured.
"""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = (*DTYPES, "int8")
QUANTIZATIONS = ("none", "int8", "int8-w8a8")
EXTRA_WANTED = 64  # rows of a step whose logits are computed besides one of each sequence
MOST_DRAFTS = 16
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class SettingsError(ValueError):
    """A setting cannot work; the message names it and a value that does."""


def parse_cores(text: str) -> tuple[int, ...]:
    """The cores in a list such as "0,2-5"; raises `ArgumentTypeError`."""
    try:
        spans = [part.strip().partition("-") for part in text.strip("[]").split(",")]
        cores = [n for a, to, b in spans for n in range(int(a), int(b if to else a) + 1)]
    except ValueError:
        cores = []
    if not cores:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of cores such as 0,2-5")
    return tuple(cores)


def parse_switch(text: str) -> bool:
    """Whether "true" or "false" was said, or a word for it; raises `ArgumentTypeError`."""
    if text.lower() not in YES + NO:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in YES


def _knob(
    default: Any, kind: Callable[[str], Any], text: str, *aliases: str, choices: Any = None
) -> Any:
    metadata = {"kind": kind, "help": text, "aliases": aliases, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineSettings:
    """All knobs of an engine. Raises `SettingsError` for values that can never work."""

    max_model_len: int | None = _knob(
        None, int, "tokens of a prompt and its completion together (default: what fits)"
    )
    max_num_seqs: int = _knob(64, int, "sequences in one step")
    max_num_batched_tokens: int = _knob(512, int, "tokens in one step")
    block_size: int = _knob(16, int, "tokens in a KV block")
    memory_utilization: float = _knob(
        0.5,
        float,
        "share of the memory left after loading that KV blocks and images may take",
        "gpu_memory_utilization",
    )
    kv_cache_bytes: int | None = _knob(
        None,
        int,
        "bytes of that share for KV blocks alone (default: blocks and images share it by need)",
        "kv_cache_memory_bytes",
    )
    kv_cache_dtype: str = _knob(
        "auto",
        str,
        "dtype of the KV cache; auto: the computation's, int8: about half of bf16's bytes",
    )
    swap_space: float | None = _knob(
        None,
        float,
        "GiB of host memory for preempted KV blocks; 0: none (default: at most 4)",
    )
    enable_prefix_caching: bool = _knob(
        True, parse_switch, "keep the KV blocks of prompts for the requests that begin alike"
    )
    speculative_tokens: int = _knob(
        0, int, "tokens to look up in the prompt and try in a step, where a request does not say"
    )
    async_scheduling: bool = _knob(
        True, parse_switch, "on a GPU: plan a step while the one before it runs"
    )
    image_ttl_s: float | None = _knob(
        None, float, "seconds after which an idle image goes before younger ones (default: never)"
    )
    tenant_images: int = _knob(
        0, int, "images of each tenant's latest use that go only when no other can"
    )
    dtype: str = _knob("auto", str, "dtype of the computation", choices=DTYPES)
    quantization: str = _knob(
        "none",
        str,
        "int8: weights of the base as int8, int8-w8a8: its activations too",
        choices=QUANTIZATIONS,
    )
    threads: int | None = _knob(None, int, "CPU threads (default: one a core)")
    cores: tuple[int, ...] | None = _knob(
        None, parse_cores, "cores to pin the threads to, such as 0,2-5 (default: not pinned)"
    )
    max_waiting: int = _knob(1024, int, "requests that may wait; more are refused as overloaded")

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_waiting"):
            self._at_least(name, 1)
        for name, least in (("max_model_len", 2), ("kv_cache_bytes", 1), ("threads", 1)):
            self._at_least(name, least)
        for name in ("swap_space", "speculative_tokens", "image_ttl_s", "tenant_images"):
            self._at_least(name, 0)
        if not 0 < self.memory_utilization <= 1:
            raise SettingsError(
                f"memory_utilization is {self.memory_utilization}; give a share such as 0.5"
            )
        if self.speculative_tokens > MOST_DRAFTS:
            raise SettingsError(
                f"speculative_tokens is {self.speculative_tokens}; give at most {MOST_DRAFTS}"
            )
        for name, choices in (
            ("dtype", DTYPES),
            ("quantization", QUANTIZATIONS),
            ("kv_cache_dtype", KV_DTYPES),
        ):
            if getattr(self, name) not in choices:
                value = getattr(self, name)
                raise SettingsError(f"{name} is {value!r}; give one of {', '.join(choices)}")
        self._check_cores()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but max_num_seqs"
                f" {self.max_num_seqs} needs a token for each: give at least {self.max_num_seqs}"
            )

    @property
    def max_wanted(self) -> int:
        """Most rows of a step whose logits are computed."""
        return self.max_num_seqs + EXTRA_WANTED

    def choose_kv_dtype(self, executor: str, own: str, *others: str) -> str:
        """The KV dtype of an executor that computes in `own` and can keep KV as `others` too.

        Raises `SettingsError` when it cannot keep it as was asked.
        """
        asked = own if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        if asked in (own, *others):
            return asked
        also = f", or set dtype to {asked}" if asked in DTYPES else ""
        raise SettingsError(
            f"kv_cache_dtype is {asked}, but the {executor} executor keeps KV as"
            f" {' or '.join((own, *others))}: give {', '.join(('auto', own, *others))}{also}"
        )

    def fit_model_len(self, base_len: int, capacity_tokens: int) -> int:
        """The tokens a sequence may have: what was asked for, or else what base and cache allow.

        Raises `SettingsError` when what was asked for is more than either can hold.
        """
        limit = min(base_len, capacity_tokens)
        if limit < 2:
            raise SettingsError(
                f"the KV cache holds {capacity_tokens} tokens, too few for any request:"
                " raise kv_cache_bytes or memory_utilization"
            )
        if self.max_model_len is None:
            return limit
        if self.max_model_len > base_len:
            raise SettingsError(
                f"max_model_len is {self.max_model_len}, but the base was made for {base_len}"
                f" tokens: give at most {base_len}"
            )
        if self.max_model_len > capacity_tokens:
            raise SettingsError(
                f"max_model_len is {self.max_model_len}, but the KV cache holds {capacity_tokens}"
                f" tokens: give at most {capacity_tokens}, or raise kv_cache_bytes"
            )
        return self.max_model_len

    def _check_cores(self) -> None:
        if self.cores is None:
            return
        if not self.cores or len({*self.cores}) < len(self.cores) or min(self.cores) < 0:
            raise SettingsError(f"cores is {self.cores}; give each core once, such as 0,1")
        if self.threads is not None and self.threads != len(self.cores):
            raise SettingsError(
                f"threads is {self.threads}, but cores names {len(self.cores)}: leave threads out"
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not value >= least:
            raise SettingsError(f"{name} is {value}; give at least {least}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for each setting, under its own name and its aliases.

    A switch has a flag that turns it off as well, `--no-…`, and needs no value.
    """
    for field in dataclasses.fields(EngineSettings):
        names = [name.replace("_", "-") for name in (field.name, *field.metadata["aliases"])]
        is_switch = field.metadata["kind"] is parse_switch
        parser.add_argument(
            *(f"--{name}" for name in names),
            dest=field.name,
            type=field.metadata["kind"],
            default=field.default,
            choices=field.metadata["choices"],
            help=field.metadata["help"],
            nargs="?" if is_switch else None,
            const=True if is_switch else None,
        )
        if is_switch:
            off, text = [f"--no-{name}" for name in names], "turn that off"
            parser.add_argument(*off, dest=field.name, action="store_false", help=text)


def from_arguments(arguments: argparse.Namespace) -> EngineSettings:
    """The settings in parsed `arguments`; raises `SettingsError`."""
    names = [field.name for field in dataclasses.fields(EngineSettings)]
    return EngineSettings(**{name: getattr(arguments, name) for name in names})
