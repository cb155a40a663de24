"""Keeps a completion to a JSON schema, a regular expression or a grammar, token by token.

llguidance does the parsing: an Earley parser over a lexer of derivatives, walked along the trie of
the vocabulary (https://github.com/guidance-ai/llguidance). This file knows guides, tokens and which
tokens may come next; it refuses to know requests, logits and how a token is chosen.

Guides come from strangers. Their cost is bounded by limits on the lexer and the parser. llguidance
walks rules and references recursively, so they are compiled on a thread whose stack is deep enough
for any text that the engine's door lets in.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from loraplex.engine.guide_dates import with_real_dates
from loraplex.engine.protocol import WHITESPACE, Guide
from loraplex.engine.strict_json import JsonError, parse_object

STACK = 1 << 30  # bytes of address space; rules nested as deep as 256 KiB of text allow take half

Mask = NDArray[np.int32]


class GuideError(Exception):
    """A guide cannot be followed; the message is for who sent it."""


class Matcher:
    """Where one completion is in its guide. Belongs to one thread, but for the masks prepared."""

    def __init__(self, inner: LLMatcher, words: int, mask: Mask | None = None) -> None:
        self._inner, self._words = inner, words
        self._mask = mask
        self._pending: Future[Mask] | None = None
        self._look()

    def mask(self) -> Mask:
        """Bit `t % 32` of word `t // 32` says whether token t may come; int32 `[⌈vocabulary/32⌉]`.

        End tokens may come exactly when the text is complete. Once `error` is set nothing may.
        """
        self._settle()
        if self._mask is None:
            self._mask = self._compute()
            self._look()
        return self._mask

    def consume(self, token_id: int) -> None:
        """Go on by a token that the mask allowed; any other is an error."""
        self._settle()
        self._inner.consume_token(token_id)
        self._mask = None
        self._look()

    def fork(self) -> "Matcher":
        """Another matcher at the same place."""
        self._settle()
        return Matcher(self._inner.deep_copy(), self._words, self._mask)

    def begin(self, pool: ThreadPoolExecutor) -> None:
        """Compute the mask on a thread of `pool`, unless it is there or on its way."""
        if self._mask is None and self._pending is None:
            self._pending = pool.submit(self._compute)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._mask = pending.result()
            self._look()

    def _compute(self) -> Mask:
        bits = self._inner.compute_bitmask()
        if self._inner.is_error():
            return np.zeros(self._words, np.int32)
        return np.frombuffer(bits, "<i4", self._words)

    def _look(self) -> None:
        """Note what to tell of the state: a thread may be at work on it when we are asked."""
        self.error = _first_line(self._inner.get_error()) if self._inner.is_error() else None
        self.is_complete = self._inner.is_stopped() and self.error is None


class Guides:
    """Makes matchers for one base, on a thread of its own, and their masks on another.

    `tokenizer_file` is a tokenizer.json, read when the first guide comes.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file, self._vocab_size = tokenizer_file, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiler = _deep_pool()
        self._masks = ThreadPoolExecutor(1, "masks")

    def compile(self, guide: Guide) -> Future[Matcher]:
        """A matcher at the start of `guide`; its result raises `GuideError` for one that is bad."""
        return self._compiler.submit(self._compile, guide)

    def prepare(self, matchers: Sequence[Matcher]) -> None:
        """Start to compute the masks that will be asked for next."""
        for matcher in matchers:
            matcher.begin(self._masks)

    def close(self) -> None:
        """End the threads; what was not compiled yet is cancelled."""
        self._compiler.shutdown(cancel_futures=True)
        self._masks.shutdown(cancel_futures=True)

    def _compile(self, guide: Guide) -> Matcher:
        inner = LLMatcher(self._tokenizer, _grammar(guide), log_level=0, limits=_limits())
        matcher = Matcher(inner, -(-self._vocab_size // 32))
        matcher.mask()  # the costliest one, and the first that can fail
        if matcher.error is not None:
            raise GuideError(f"the {_NAMES[guide.kind]} cannot be followed: {matcher.error}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            text = self._file.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except (OSError, ValueError) as error:
            raise GuideError(f"this base's tokenizer cannot follow guides: {error}") from error


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}


def _grammar(guide: Guide) -> str:
    """The guide as llguidance wants it, unchecked but for JSON's own rules."""
    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(guide.text)
    if guide.kind == "grammar":
        return LLMatcher.grammar_from_lark(guide.text)
    try:
        schema = with_real_dates(parse_object(guide.text.encode()))
        return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": WHITESPACE})
    except (JsonError, ValueError, RecursionError) as error:
        raise GuideError(f"the JSON schema cannot be followed: {error}") from error


def _limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=100_000,
        step_lexer_fuel=50_000,
        max_lexer_states=20_000,  # of up to 2 kB
        verbose_errors=False,
    )


def _first_line(message: str) -> str:
    line = message.split("\n", 1)[0].strip()
    return "no text matches it" if line == "NoExtensionBias" else line


def _deep_pool() -> ThreadPoolExecutor:
    """A pool of one thread with a deep stack; its pages are taken when they are first used."""
    pool = ThreadPoolExecutor(1, "guides")
    before = threading.stack_size(STACK)
    try:
        pool.submit(int)  # starts the thread
    finally:
        threading.stack_size(before)
    return pool
