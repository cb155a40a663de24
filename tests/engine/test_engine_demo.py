"""The engine on the demo base with its adapters, where memory is short: what it does to have room,
or to do less, changes no bit of what a request gets."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from loraplex.engine.assembly import engine_on
from loraplex.engine.compile_adapter import compile_adapter
from loraplex.engine.executor import Executor
from loraplex.engine.images import BaseManifest, ImageStore
from loraplex.engine.load import load_executor
from loraplex.engine.protocol import Chunk, Event, Failed, Finished, Generate, Sampling, Stats
from loraplex.engine.settings import EngineSettings

ADAPTERS = Path(__file__).resolve().parents[2] / "examples/adapters"
KNOBS = EngineSettings(kv_cache_bytes=40 * 368640, swap_space=0.1, max_num_batched_tokens=64)
PROMPT = tuple(3000 + 7 * i % 900 for i in range(70))
PATIENCE_S = 60.0


@dataclass
class Said:
    """What came of a request: its tokens and log-probabilities by choice, and its end."""

    end: Finished | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)


class Bench:
    """An engine with the demo base, driven by hand until all that was asked has ended."""

    def __init__(self, executor: Executor, store: ImageStore, cache: Path, base: BaseManifest):
        self._woken, self._stack, self._executor = threading.Event(), ExitStack(), executor
        self._engine = self._stack.enter_context(
            engine_on(executor, KNOBS, base, store, cache, self._woken.set)
        )

    def run(self, *requests: Generate) -> list[Said]:
        said = {request.request_id: Said() for request in requests}
        for request in requests:
            self._engine.add(request)
        while any(each.end is None for each in said.values()):
            self._woken.clear()
            for event in self._engine.step():
                self._hear(said[event.request_id], event)
            if not self._engine.has_work and any(each.end is None for each in said.values()):
                assert self._woken.wait(PATIENCE_S)
        self._engine.check_integrity()
        return list(said.values())

    @staticmethod
    def _hear(said: Said, event: Event) -> None:
        assert not isinstance(event, Failed), event
        if isinstance(event, Finished):
            said.end = event
        if isinstance(event, Chunk):
            said.tokens.setdefault(event.index, []).extend(event.token_ids)
            found = [entry.logprob for entry in event.logprobs]
            said.logprobs.setdefault(event.index, []).extend(found)

    @property
    def stats(self) -> Stats:
        return self._engine.stats()

    def close(self, images: Iterable[str]) -> None:
        self._stack.close()
        for digest in images:
            with suppress(KeyError):
                self._executor.remove_image(digest)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(str(tmp_path_factory.mktemp("images")))


@pytest.fixture(scope="module")
def images(
    store: ImageStore, demo_base: BaseManifest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Digests of the demo adapters' images."""
    scratch = tmp_path_factory.mktemp("compile")
    found = {}
    for name in ("pirate", "emoji"):
        report = compile_adapter(ADAPTERS / name, demo_base, scratch / name)
        store.put(scratch / name, report.digest)
        found[name] = report.digest
    return found


@pytest.fixture(scope="module")
def executor(demo_base: BaseManifest) -> Executor:
    """The demo base with 40 KV blocks: 640 tokens."""
    return load_executor(demo_base, KNOBS)


@pytest.fixture
def bench(
    executor: Executor,
    store: ImageStore,
    images: dict[str, str],
    demo_base: BaseManifest,
    tmp_path: Path,
) -> Iterator[Callable[[], Bench]]:
    """Makes a `Bench`, one at a time: they use one executor."""
    made: list[Bench] = []

    def make() -> Bench:
        close()
        made.append(Bench(executor, store, tmp_path, demo_base))
        return made[-1]

    def close() -> None:
        while made:
            made.pop().close(images.values())

    yield make
    close()


def request(name: str, prompt: tuple[int, ...], image: str | None, **options: object) -> Generate:
    own = {key: options.pop(key) for key in list(options) if key in Generate.__struct_fields__}
    asked = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0} | options
    return Generate(name, prompt, Sampling(**asked), image, scope="s", **own)  # type: ignore[arg-type]


def test_a_cached_prompt_gives_the_same_bits(
    bench: Callable[[], Bench], images: dict[str, str]
) -> None:
    subject = bench()
    for name, image in (("base", None), ("pirate", images["pirate"])):
        [cold] = subject.run(request(f"cold {name}", PROMPT, image))
        [warm] = subject.run(request(f"warm {name}", PROMPT, image))
        assert cold.end and warm.end
        assert (cold.end.cached_tokens, warm.end.cached_tokens) == (0, 64)
        assert (warm.tokens, warm.logprobs) == (cold.tokens, cold.logprobs)
        answer = (*PROMPT, *cold.tokens[0], 99)
        [next_turn] = subject.run(request(f"next {name}", answer, image))
        [fresh] = bench().run(request("fresh", answer, image))
        assert next_turn.end and next_turn.end.cached_tokens == 80
        assert (next_turn.tokens, next_turn.logprobs) == (fresh.tokens, fresh.logprobs)
        subject = bench()


def test_who_gives_way_gets_the_same_bits(
    bench: Callable[[], Bench], images: dict[str, str]
) -> None:
    kinds = [None, images["pirate"], images["emoji"]]
    asked = [
        request(
            str(i), PROMPT[i:], kinds[i % 3], tenant=str(i % 2), seed=i,
            max_tokens=50, temperature=0.7 * (i % 2),
        )
        for i in range(6)
    ]  # fmt: skip
    subject = bench()
    together = subject.run(*asked)
    stats = subject.stats
    assert stats.preemptions > 0
    assert stats.swap_blocks_used == stats.kv_blocks_used == 0
    for one, said in zip(asked, together, strict=True):
        [alone] = bench().run(one)
        assert (said.tokens, said.logprobs) == (alone.tokens, alone.logprobs)


def test_choices_are_those_of_their_seeds(
    bench: Callable[[], Bench], images: dict[str, str]
) -> None:
    subject, image = bench(), images["pirate"]
    [together] = subject.run(request("n", PROMPT, image, choices=3, temperature=1.0, seed=11))
    for index in range(3):
        [alone] = subject.run(request("1", PROMPT, image, temperature=1.0, seed=11 + index))
        assert alone.tokens[0] == together.tokens[index]
        assert alone.logprobs[0] == together.logprobs[index]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_guesses_give_the_same_bits_in_fewer_steps(
    bench: Callable[[], Bench], images: dict[str, str], temperature: float
) -> None:
    prompt = PROMPT[:12] * 6
    for image in (None, images["emoji"]):
        options = {"temperature": temperature, "max_tokens": 30}
        plain, guessing = bench(), None
        [expected] = plain.run(request("plain", prompt, image, **options))
        steps = plain.stats.steps
        guessing = bench()
        [found] = guessing.run(request("guess", prompt, image, draft_tokens=6, **options))
        assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)
        if guessing.stats.accepted_tokens:
            assert guessing.stats.steps < steps
