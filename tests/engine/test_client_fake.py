"""The fake keeps a real client's promises, and does what a test of the platform tells it to."""

import asyncio

import pytest
from msgspec.structs import replace

from loraplex.engine.client import EngineClient
from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.protocol import (
    Beams,
    Chunk,
    Event,
    Failed,
    Finished,
    Generate,
    PromptLogprobs,
    Sampling,
    Stats,
    TokenLogprob,
)

pytestmark = pytest.mark.anyio


def request(name: str = "r", *prompt: int, **sampling: object) -> Generate:
    return Generate(name, prompt or (1, 2, 3), Sampling(**{"max_tokens": 5, **sampling}))


async def collect(engine: EngineClient, asked: Generate) -> list[Event]:
    return [event async for event in engine.generate(asked)]


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Chunk) for token in event.token_ids]


async def test_says_the_prompt_backwards_one_token_a_chunk() -> None:
    events = await collect(FakeEngine(), request())
    assert tokens(events) == [3, 2, 1, 3, 2]
    assert len(events) == 6
    assert events[-1] == Finished("r", "length", 3, 5)


async def test_says_what_it_is_told_to_and_stops_there() -> None:
    assert (await collect(FakeEngine([7, 8]), request()))[-1] == Finished("r", "stop", 3, 2)
    by_request = FakeEngine(lambda asked: [len(asked.token_ids)])
    assert tokens(await collect(by_request, request("r", 1, 1))) == [2]


async def test_stops_at_a_stop_token_and_sends_it() -> None:
    events = await collect(FakeEngine([7, 8, 9]), request(stop_token_ids=(8,)))
    assert tokens(events) == [7, 8]
    assert events[-1] == Finished("r", "stop", 3, 2)


@pytest.mark.parametrize("count", [0, 2])
async def test_gives_logprobs_when_asked(count: int) -> None:
    events = await collect(FakeEngine([7]), request(logprobs=count))
    assert isinstance(events[0], Chunk)
    (logprob,) = events[0].logprobs
    assert (logprob.token_id, len(logprob.top)) == (7, count)


async def test_holds_its_chunks_until_it_may() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    task = asyncio.create_task(collect(engine, request()))
    await engine.wait_in_flight(1)
    done, _ = await asyncio.wait([task], timeout=0.05)
    assert not done
    assert engine.hold is not None
    engine.hold.set()
    assert len(await task) == 6
    assert engine.in_flight == set()


async def test_death_fails_what_is_in_flight_and_a_new_life_serves() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    tasks = [asyncio.create_task(collect(engine, request(str(i)))) for i in range(3)]
    await engine.wait_in_flight(3)
    first = engine.info
    engine.die()
    assert engine.info is None
    for i, events in enumerate(await asyncio.gather(*tasks)):
        assert [(e.request_id, e.code) for e in events if isinstance(e, Failed)] == [
            (str(i), "engine_died")
        ]
        assert len(events) == 1
    (refused,) = await collect(engine, request())
    assert isinstance(refused, Failed) and refused.code == "engine_unavailable"
    with pytest.raises(TimeoutError):
        await engine.wait_ready(0.01)
    waiting = asyncio.create_task(engine.wait_ready(5))
    engine.revive()
    second = await waiting
    assert first is not None and second.epoch != first.epoch
    engine.hold = None
    assert isinstance((await collect(engine, request()))[-1], Finished)


async def test_choices_take_turns_and_each_has_its_seed() -> None:
    engine = FakeEngine(lambda asked: [asked.sampling.seed] * (1 + asked.sampling.seed))
    events = await collect(engine, replace(request(), choices=3))
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [(chunk.index, *chunk.token_ids) for chunk in chunks] == [
        *((0, 0), (1, 1), (2, 2)),
        *((1, 1), (2, 2)),
        (2, 2),
    ]
    assert [chunk.finish for chunk in chunks] == ["stop", None, None, "stop", None, "stop"]
    assert events[-1] == Finished("r", "stop", 3, 6)


async def test_a_choice_that_is_aborted_says_no_more_and_the_others_go_on() -> None:
    engine = FakeEngine([7] * 5)
    stream = engine.generate(replace(request(), choices=2))
    first = await anext(stream)
    await engine.abort("r", 0)
    await engine.abort("nobody", 0)
    rest = [event async for event in stream]
    assert isinstance(first, Chunk) and first.index == 0
    assert [event.index for event in rest if isinstance(event, Chunk)] == [1] * 5
    assert rest[-1] == Finished("r", "abort", 3, 6)
    assert engine.aborted_choices == [("r", 0), ("nobody", 0)]


async def test_the_end_of_the_last_choice_does_not_wait_for_what_is_held() -> None:
    engine = FakeEngine(hold=asyncio.Event())
    task = asyncio.create_task(collect(engine, request()))
    await engine.wait_in_flight(1)
    await engine.abort("r", 0)
    assert await task == [Finished("r", "abort", 3, 0)]


async def test_a_beam_comes_in_one_chunk_with_its_score() -> None:
    events = await collect(FakeEngine([7, 8]), replace(request(), choices=2, beams=Beams(3)))
    assert events[:2] == [Chunk("r", (7, 8), (), i, "stop", -1.0 - i) for i in range(2)]


async def test_an_empty_script_still_ends_its_choice() -> None:
    events = await collect(FakeEngine([]), request())
    assert events == [Chunk("r", (), finish="stop"), Finished("r", "stop", 3, 0)]


async def test_prompt_logprobs_come_first_and_are_one_less() -> None:
    engine = FakeEngine([7])
    engine.logprob = lambda token: -float(token)
    first, *_ = await collect(engine, request(prompt_logprobs=1))
    assert first == PromptLogprobs(
        "r", (TokenLogprob(2, -2.0, ((2, -2.0),)), TokenLogprob(3, -3.0, ((3, -3.0),)))
    )


async def test_fails_as_told() -> None:
    engine = FakeEngine(fail="image_missing")
    (event,) = await collect(engine, request())
    assert isinstance(event, Failed) and event.code == "image_missing"
    engine.fail = None
    assert isinstance((await collect(engine, request()))[-1], Finished)


async def test_remembers_requests_and_aborts() -> None:
    engine = FakeEngine()
    stream = engine.generate(request("left"))
    assert isinstance(await anext(stream), Chunk)
    await stream.aclose()
    await collect(engine, request("stayed"))
    assert [asked.request_id for asked in engine.requests] == ["left", "stayed"]
    assert engine.aborts == ["left"]
    assert engine.in_flight == set()


async def test_counts_what_it_did() -> None:
    engine = FakeEngine()
    assert engine.stats == Stats(rows_per_step=(0,) * 13, adapters_per_step=(0,) * 17)
    await collect(engine, request())
    stats = engine.stats
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens) == (5, 3, 5)


async def test_an_id_in_flight_is_refused() -> None:
    engine = FakeEngine()
    stream = engine.generate(request())
    await anext(stream)
    (event,) = await collect(engine, request())
    assert isinstance(event, Failed) and event.code == "invalid_request"
    assert len([event async for event in stream]) == 5
