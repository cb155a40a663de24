"""Text to token ids and back, for one base: its tokenizer, and text that arrives token by token.

Imports `tokenizers` alone, since Transformers' tokenizers would bring torch into the API process.
A token is known by its bytes (`Vocabulary.bytes_of`), so that a character spread over tokens is
held until it is whole. Chat templates are in `chat_template.py`; this file refuses to know roles,
requests and HTTP.
"""

import codecs
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

METASPACE = "▁"


def _byte_alphabet() -> dict[str, int]:
    """The printable character that GPT-2's byte-level BPE writes for each byte, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


BYTE_ALPHABET = _byte_alphabet()


class Vocabulary:
    """A base's tokenizer: `encode` text, and the bytes that each token stands for."""

    def __init__(self, model_dir: Path) -> None:
        """Read `tokenizer.json`; raises `FileNotFoundError` or `ValueError` naming the file."""
        file = model_dir / "tokenizer.json"
        content = file.read_bytes()
        try:
            self._tokenizer = Tokenizer.from_buffer(content)
            decoder = json.loads(content).get("decoder")
        except Exception as error:
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._byte_level = _has_type(decoder, "ByteLevel")
        self.bytes_of = lru_cache(maxsize=self.size)(self._bytes_of)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`; with `special`, what the model expects at its start and end too."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def _bytes_of(self, token: int) -> bytes:
        """The bytes a token stands for; b"" for an id that is not in the vocabulary."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        return _byte_level_bytes(piece) if self._byte_level else _sentencepiece_bytes(piece)


def _has_type(decoder: Any, name: str) -> bool:
    """Whether a decoder of tokenizer.json is of this type, or a sequence that holds one."""
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == name or any(
        _has_type(part, name) for part in decoder.get("decoders", ())
    )


def _byte_level_bytes(piece: str) -> bytes:
    if all(char in BYTE_ALPHABET for char in piece):
        return bytes(BYTE_ALPHABET[char] for char in piece)
    return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(METASPACE, " ").encode()


class Decoder:
    """Text of one completion, token by token; never half a character.

    Special tokens and those in `silent` (what stops the request) have no text. Bytes that can no
    longer become a character read as U+FFFD; an unfinished character at the very end is dropped.
    """

    def __init__(self, vocabulary: Vocabulary, silent: frozenset[int] = frozenset()) -> None:
        self._vocabulary, self._silent = vocabulary, silent
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes, possibly none."""
        if self.is_silent(token):
            return ""
        return self._utf8.decode(self._vocabulary.bytes_of(token))

    def is_silent(self, token: int) -> bool:
        """Whether `token` never has text."""
        return token in self._silent or token in self._vocabulary.special


def pieces_of(vocabulary: Vocabulary, token_ids: Iterable[int]) -> list[str]:
    """The characters that each token completes; none for special tokens."""
    decoder = Decoder(vocabulary)
    return [decoder.push(token) for token in token_ids]


class StopStrings:
    """Ends a text before the first of several strings to be completed, across any chunk borders.

    `push` returns the text that no stop string can still claim; what could be the start of one is
    held until it is decided or `flush` is called. The outcome does not depend on how the text is
    split: of two matches the one that ends first wins, then the longer one.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops, self._held = stops, ""
        self.hit: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Add text; returns what is safe to show. After a hit nothing more is returned.

        Text that may not end it is not searched, but may be the start of a string that later text
        completes.
        """
        if not self._stops:
            return text
        if self.hit is not None:
            return ""
        known = len(self._held)
        self._held += text
        if may_end and (found := self._first_match(known)) is not None:
            start, self.hit = found
            return self._release(start)
        return self._release(len(self._held) - self._undecided())

    def flush(self) -> str:
        """The text still held, once no more can come; nothing after a hit."""
        return "" if self.hit is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _first_match(self, known: int) -> tuple[int, str] | None:
        """Where the first string to end after `known` characters starts."""
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := self._held.find(stop, max(0, known + 1 - len(stop)))) >= 0
        ]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max((overlap(self._held, stop) for stop in self._stops), default=0)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` but is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
