"""Structured output under test: how many of many sampled texts match their JSON schema.

    python benchmarks/structured.py [--count 1000] [--first 0] [--json]

Twenty schemas take turns, and so do the demo base and its demo adapters, all in the same batch, at
temperature 1. Each text is parsed and validated by `jsonschema`; one that did not end counts as
invalid. A request's number is its seed; `--first` is that of the first. As last line it prints one
JSON object; with `--json` nothing else. The exit code is 1 when a text is invalid.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from adapters import compile_image
from bench import ROOT, START_S, connected, engine_process, host, prepare_demo_base
from jsonschema import Draft202012Validator
from schemas import SCHEMAS
from tokenizers import Tokenizer

from loraplex.engine.client.local import LocalEngine
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.engine.protocol import Chunk, Failed, Finished, Generate, Guide, Sampling

ADAPTERS = ("emoji", "json", "pirate")
AT_ONCE = 32
MAX_TOKENS = 400
PROMPT = "<|im_start|>user\nReply with JSON: {}.<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Tally:
    """What came of the requests so far."""

    ends: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def count(self, end: str, wanted: str, text: str) -> None:
        """A request ended as `end` says; only "valid" is well."""
        self.ends[end] += 1
        if end != "valid":
            self.faults.append(f"{end}: {wanted}: {text}")


class Asker:
    """Sends request after request, and judges what comes."""

    def __init__(self, client: LocalEngine, tokenizer: Tokenizer, images: Sequence[str]) -> None:
        self._client, self._tokenizer = client, tokenizer
        self._images = (None, *images)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.tally = Tally()

    async def ask(self, number: int) -> None:
        """Run request `number`, which says what it is and its seed, when it is its turn."""
        wanted = list(SCHEMAS)[number % len(SCHEMAS)]
        async with self._turns:
            tokens: list[int] = []
            end = "lost"
            async for event in self._client.generate(self._request(number, wanted)):
                if isinstance(event, Chunk):
                    tokens += event.token_ids
                elif isinstance(event, Finished):
                    end = event.reason
                elif isinstance(event, Failed):
                    end = f"failed: {event.message}"
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if end == "stop":
            end = judge(text, wanted)
        self.tally.tokens += len(tokens)
        self.tally.count(end, wanted, text)

    def _request(self, number: int, wanted: str) -> Generate:
        guide = Guide("json_schema", json.dumps(SCHEMAS[wanted]))
        turn = number // len(SCHEMAS)
        return Generate(
            request_id=f"structured-{number}",
            token_ids=tuple(self._tokenizer.encode(PROMPT.format(wanted)).ids),
            sampling=Sampling(max_tokens=MAX_TOKENS, temperature=1.0, seed=number, guide=guide),
            image=self._images[turn % len(self._images)],
        )


def judge(text: str, wanted: str) -> str:
    """Whether a text is "valid" for its schema, or why it is not."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = Draft202012Validator.FORMAT_CHECKER
    errors = Draft202012Validator(SCHEMAS[wanted], format_checker=checker).iter_errors(value)
    return next((f"invalid: {error.message}" for error in errors), "valid")


async def run(base_file: Path, tokenizer: Tokenizer, numbers: range, quiet: bool) -> bool:
    """Ask as often as there are numbers, and print; whether all was valid."""
    with tempfile.TemporaryDirectory(prefix="lpx") as name:
        folder = Path(name)
        images = put_adapters(base_file, folder)
        with engine_process(base_file, folder / "images", folder) as endpoint:
            async with connected(endpoint) as client:
                facts = host(await client.wait_ready(START_S))
                asker, begin = Asker(client, tokenizer, images), time.perf_counter()
                await asyncio.gather(*(asker.ask(number) for number in numbers))
                seconds = time.perf_counter() - begin
    tally = asker.tally
    if not quiet:
        print(*tally.faults, sep="\n")
    figures = {
        "valid": tally.ends["valid"],
        "total": len(numbers),
        "schemas": len(SCHEMAS),
        "adapters": len(images),
        "ends": tally.ends,
        "tokens": tally.tokens,
        "tokens_per_s": round(tally.tokens / seconds, 1),
        "host": facts,
    }
    print(json.dumps(figures))
    return tally.ends["valid"] == len(numbers)


def put_adapters(base_file: Path, folder: Path) -> list[str]:
    """Compile the demo adapters into the store in `folder`; returns their digests."""
    store, digests = ImageStore(str(folder / "images")), []
    for name in ADAPTERS:
        image = folder / f"{name}.safetensors"
        digest = compile_image(ROOT / "examples/adapters" / name, base_file, image)
        store.put(image, digest)
        digests.append(digest)
    return digests


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Validate sampled structured output.")
    parser.add_argument("--base", type=Path, help="a base.json; by default the demo base's")
    parser.add_argument("--count", type=int, default=1000, help="texts to sample")
    parser.add_argument("--first", type=int, default=0, help="number of the first text")
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    options = parser.parse_args()
    base_file = (options.base or prepare_demo_base()).absolute()
    base = msgspec.json.decode(base_file.read_bytes(), type=BaseManifest)
    tokenizer = Tokenizer.from_file(str(Path(base.path) / "tokenizer.json"))
    numbers = range(options.first, options.first + options.count)
    sys.exit(not asyncio.run(run(base_file, tokenizer, numbers, options.json)))


if __name__ == "__main__":
    main()
