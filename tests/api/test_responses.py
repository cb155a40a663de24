"""OpenAI's Responses API over raw HTTP: answers, their streams, and errors in them."""

import json
from itertools import pairwise

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.platform.api.choice import Delta
from loraplex.platform.api.forms import Answered, Usage
from loraplex.platform.api.responses_form import Asked, ResponsesForm
from loraplex.platform.errors import TimedOut
from loraplex.platform.hermes import call_text
from loraplex.platform.quotas import TenantLimits

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS}
TERMINAL = {"response.completed", "response.incomplete", "response.failed"}
LOGPROBS = ["message.output_text.logprobs"]


async def ask(world, key="acme", **fields):
    async with world.client(key) as client:
        return await client.post(PATH, json={"model": "tiny-base", "input": "Hello"} | fields)


def read(text):
    """The data of a stream's events, numbered and with one end."""
    pairs = [block.split("\n", 1) for block in text.strip().split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in pairs]
    assert [name for name, _ in pairs] == [f"event: {each['type']}" for each in data]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    assert [i for i, each in enumerate(data) if each["type"] in TERMINAL] == [len(data) - 1]
    return data


async def events(world, **fields):
    answer = await ask(world, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return read(answer.text)


def bare(response):
    """A response without what differs from one request to the next."""
    items = [
        item | {"id": "", "call_id": item.get("call_id") and ""} for item in response["output"]
    ]
    return response | {"id": "", "created_at": 0, "completed_at": 0, "output": items}


async def test_a_response(world):
    world.engine.tokens = list(b"Hi")
    world.engine.cached_tokens = 6
    answer = await ask(world, user="u")
    body, prompt = answer.json(), len("user:Hello\nassistant:")
    (message,) = body["output"]
    assert message | {"id": ""} == {
        "id": "",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
    }
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 2,
    }
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    assert body["id"] == answer.headers["x-request-id"].replace("req_", "resp_")
    assert body["completed_at"] >= body["created_at"]
    assert (body["store"], body["user"], body["truncation"]) == (False, "u", "disabled")
    assert answer.headers["x-loraplex-cached-tokens"] == "6"
    (record,) = await world.records()
    assert (record.prompt_tokens, record.completion_tokens) == (prompt, 2)


async def test_a_stream_has_its_events_in_their_order(world):
    world.engine.tokens = list(b"Hi")
    created, begun, *others, last = await events(world)
    assert [created["type"], begun["type"]] == ["response.created", "response.in_progress"]
    assert created["response"] == begun["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    place = {"output_index": 0, "item_id": others[0]["item"]["id"], "content_index": 0}
    at = [{key: each[key] for key in place if key in each and key != "item"} for each in others]
    assert at == [{"output_index": 0}, *[place] * 5, {"output_index": 0}]
    assert [(each["type"], each.get("delta", each.get("text"))) for each in others] == [
        ("response.output_item.added", None),
        ("response.content_part.added", None),
        ("response.output_text.delta", "H"),
        ("response.output_text.delta", "i"),
        ("response.output_text.done", "Hi"),
        ("response.content_part.done", None),
        ("response.output_item.done", None),
    ]
    assert last["type"] == "response.completed"
    assert last["response"]["output"] == [others[-1]["item"]]
    whole = (await ask(world)).json()
    assert bare(whole) == bare(last["response"])


async def test_text_and_calls_are_items_of_their_own(world):
    said = "Let me see. " + call_text("weather", {"city": "Rome"}) + call_text("weather", {})
    world.engine.tokens = list(said.encode())
    whole = (await ask(world, tools=[WEATHER])).json()
    message, *calls = whole["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert [(call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("weather", '{"city": "Rome"}', "completed"),
        ("weather", "{}", "completed"),
    ]
    assert len({item["id"] for item in whole["output"]}) == 3
    assert len({call["call_id"] for call in calls}) == 2
    streamed = await events(world, tools=[WEATHER])
    assert bare(streamed[-1]["response"]) == bare(whole)
    for index, item in enumerate(streamed[-1]["response"]["output"]):
        own = [each for each in streamed if each.get("output_index") == index]
        kinds = [each["type"].rpartition(".")[2] for each in own]
        assert (kinds[0], kinds[-1]) == ("added", "done")
        told = "".join(each["delta"] for each in own if "delta" in each)
        assert told == (item["arguments"] if index else item["content"][0]["text"])
        assert {each.get("item_id", item["id"]) for each in own} == {item["id"]}
        assert own[-1]["item"] == item


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("said", ["Hello", call_text("weather", {"city": "Rome"})])
async def test_what_the_limit_cuts_is_incomplete(world, said, streamed):
    world.engine.tokens = list(said.encode())
    fields = {"max_output_tokens": len(said) - 14 if "<" in said else 3, "tools": [WEATHER]}
    if streamed:
        last = (await events(world, **fields))[-1]
        assert last["type"] == "response.incomplete"
        body = last["response"]
    else:
        body = (await ask(world, **fields)).json()
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert body["completed_at"] is None
    assert [item["status"] for item in body["output"]] == ["incomplete"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_empty_answer_is_an_empty_message(world, streamed):
    world.engine.tokens = []
    body = (await events(world))[-1]["response"] if streamed else (await ask(world)).json()
    (message,) = body["output"]
    assert (message["content"][0]["text"], body["status"]) == ("", "completed")


async def test_an_error_in_mid_stream_is_told_and_fails_the_response(world):
    tap = world.tap(1)
    body = {"model": "tiny-base", "input": "Hello", "stream": True}
    async with world.listening() as url, world.client() as client:
        key = {"authorization": client.headers["authorization"]}
        async with (
            httpx.AsyncClient() as real,
            real.stream("POST", url + PATH, json=body, headers=key) as answer,
        ):
            world.engine.fail = "internal"
            tap.release()
            *_, error, failed = read((await answer.aread()).decode())
    assert error["type"] == "error"
    assert error["code"] == error["error"]["code"] == "internal_error"
    assert error["message"] == failed["response"]["error"]["message"]
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"


async def test_log_probabilities(world):
    world.engine.tokens = list("né".encode())
    fields = {"include": LOGPROBS, "top_logprobs": 2}
    body = (await ask(world, **fields)).json()
    told = body["output"][0]["content"][0]["logprobs"]
    assert [each["bytes"] for each in told] == [[byte] for byte in "né".encode()]
    assert [len(each["top_logprobs"]) for each in told] == [2, 2, 2]
    streamed = await events(world, **fields)
    deltas = [each for each in streamed if each["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each["logprobs"]] == told
    assert bare(streamed[-1]["response"]) == bare(body)


async def test_there_is_nothing_to_get(world):
    async with world.client() as client:
        assert (await client.get(f"{PATH}/resp_1")).status_code == 404
        assert (await client.delete(f"{PATH}/resp_1")).status_code == 404
        assert (await client.get(PATH)).status_code == 405


async def test_limits_hold_responses_too(world):
    await world.add_tenant("small", TenantLimits(requests_per_minute=1))
    first, second = await ask(world, key="small"), await ask(world, key="small")
    assert (first.status_code, second.status_code) == (200, 429)
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert first.headers["x-ratelimit-limit-requests"] == "1"


class Letters:
    """A vocabulary that is not asked."""


SPEECH = st.lists(
    st.one_of(
        st.text("a <\n", max_size=4),
        st.sampled_from([call_text("f", {"x": "<tool_call>"}), call_text("f", {}), "<tool_call>"]),
        st.just(call_text("g", {})),
    ),
    max_size=5,
).map("".join)


def form():
    asked = Asked("0", "m", {}, now=lambda: 0.0, tools={"f"})
    return ResponsesForm(asked, Letters())


@given(SPEECH, st.lists(st.integers(0, 60)), st.sampled_from(["stop", "length", None]))
def test_a_stream_says_what_the_whole_answer_does(said, cuts, finish):
    bounds = [0, *sorted(min(cut, len(said)) for cut in cuts), len(said)]
    pieces = [said[a:b] for a, b in pairwise(bounds)]
    deltas = [Delta(0, piece) for piece in pieces] + [Delta(0, "", finish=finish)]
    writer, usage = form(), Usage(1, 1)
    first, *others = [writer.chunks(delta) for delta in deltas]
    ending = writer.ending(usage, {}) if finish else writer.failure(TimedOut("late"))
    told = read((writer.opening(1) + first + b"".join(others) + ending).decode())
    open_items = 0
    for event in told:
        kind = event["type"]
        open_items += {"response.output_item.added": 1, "response.output_item.done": -1}.get(
            kind, 0
        )
        assert open_items in (0, 1)
        assert open_items or "item_id" not in event
    if finish:
        assert open_items == 0
        whole = form().whole([Answered([Delta(0, said, finish=finish)])], usage)
        assert bare(whole) == bare(told[-1]["response"])
        done = [each["item"] for each in told if each["type"] == "response.output_item.done"]
        assert done == told[-1]["response"]["output"]
