"""Canary splits over HTTP: a conversation keeps its side, and every answer says which it was."""

import pytest

from loraplex.platform.api.conversation import HEADER, OPENING

pytestmark = pytest.mark.anyio
PROD = "/v1/adapters/poet/aliases/prod"
CHATS = "/v1/chat/completions"
BOTH = {"stable": "poet@1", "canary": "poet@2"}


@pytest.fixture
async def client(world):
    """acme's client; half of `poet@prod` is a canary."""
    for digest in "ab":
        await world.add_adapter("acme", "poet", digest * 64)
    async with world.client() as client:
        body = {"version": 1, "canary": {"version": 2, "percent": 50}, "revision": 0}
        answer = await client.put(PROD, json=body)
        assert answer.json()["canary"] == body["canary"]
        yield client


def chat(*texts, **fields):
    """A conversation of these turns, the user's first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts)]
    return {"model": "poet@prod", "max_tokens": 1, "messages": messages} | fields


async def side(client, body, path=CHATS, **headers):
    """Which side answered: the headers and the body agree."""
    answer = await client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    arm = answer.headers["x-loraplex-arm"]
    assert answer.json()["model"] == answer.headers["x-loraplex-model"] == BOTH[arm]
    assert answer.headers["x-loraplex-version"] == BOTH[arm][-1]
    assert answer.headers["x-loraplex-adapter"] == "poet"
    return arm


async def other_than(client, arm, make):
    """What `make` makes of the first number for which the other side answers."""
    for number in range(64):
        if await side(client, make(number)) != arm:
            return make(number)
    raise AssertionError("one side answers all")


async def test_a_conversation_goes_on_on_its_side_without_the_clients_help(client):
    for opening in map(str, range(4)):
        first = await side(client, chat(opening))
        assert await side(client, chat(opening, "answer", "more")) == first
        system = {"role": "system", "content": "be brief"}
        told = chat(opening)
        told["messages"] = [system, *told["messages"]]
        with_system = await side(client, told)
        told["messages"] += chat("x", "answer", "more")["messages"][1:]
        assert await side(client, told) == with_system
    a = await side(client, chat("one"))
    assert await other_than(client, a, lambda n: chat(f"another {n}"))


async def test_a_client_may_name_the_conversation(client):
    arm = await side(client, chat("a", user="u"))
    other = await other_than(client, arm, lambda n: chat("a", user=f"u{n}"))
    for text in ("b", "c"):
        assert await side(client, chat(text, user="u")) == arm
        assert await side(client, chat(text, user=other["user"])) != arm
        named = {"metadata": {"conversation_id": other["user"]}}
        assert await side(client, chat(text, user="u", **named)) != arm
        headers = {HEADER: "u"}
        assert await side(client, chat(text, user=other["user"], **named), **headers) == arm


async def test_plain_prompts_are_told_apart_by_how_they_begin(client):
    def prompt(text):
        return {"model": "poet@prod", "max_tokens": 1, "prompt": text}

    path = "/v1/completions"
    opening = "a" * OPENING
    arm = await side(client, prompt(opening), path)
    assert await side(client, prompt(opening + "b"), path) == arm
    ids = [7] * OPENING
    arm = await side(client, prompt(ids), path)
    assert await side(client, prompt([*ids, 8]), path) == arm


async def test_anthropics_face_takes_the_same_side(client):
    for text in map(str, range(4)):
        body = {"model": "poet@prod", "max_tokens": 1, "messages": chat(text)["messages"]}
        answer = await client.post("/v1/messages", json=body)
        assert answer.headers["x-loraplex-arm"] == await side(client, chat(text))


async def test_a_response_takes_the_same_side(client):
    for text in map(str, range(4)):
        body = {"model": "poet@prod", "max_output_tokens": 1, "input": text}
        assert await side(client, body, "/v1/responses") == await side(client, chat(text))


async def test_a_stream_says_its_side_before_the_first_byte(client):
    body = chat("a", stream=True)
    async with client.stream("POST", CHATS, json=body) as answer:
        arm = answer.headers["x-loraplex-arm"]
    assert arm == await side(client, chat("a"))


async def test_usage_is_told_of_each_side(client):
    sides = [await side(client, chat(str(number))) for number in range(8)]
    answer = await client.get("/v1/usage", params={"group_by": ["adapter", "arm"]})
    totals = {total["arm"]: total["requests"] for total in answer.json()["data"]}
    assert totals == {arm: sides.count(arm) for arm in {*sides}}


async def test_promoted_aborted_and_back(client):
    promoted = (await client.post(f"{PROD}/promote", json={"revision": 1})).json()
    assert (promoted["version"], promoted["canary"]) == (2, None)
    answer = await client.post(CHATS, json=chat("a"))
    assert answer.json()["model"] == "poet@2"
    assert "x-loraplex-arm" not in answer.headers
    back = (await client.post(f"{PROD}/rollback", json={"revision": 2})).json()
    assert (back["version"], back["canary"]) == (1, {"version": 2, "percent": 50})
    aborted = (await client.post(f"{PROD}/abort", json={"revision": 3})).json()
    assert (aborted["version"], aborted["canary"]) == (1, None)
    for verb in ("promote", "abort"):
        refused = await client.post(f"{PROD}/{verb}", json={"revision": 4})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    moves = (await client.get(f"{PROD}/history")).json()["data"]
    assert [(move["version"], move["canary"] is not None) for move in moves] == [
        (1, False),
        (1, True),
        (2, False),
        (1, True),
    ]


@pytest.mark.parametrize(
    ("canary", "status", "param"),
    [
        ({"version": 1, "percent": 10}, 400, "canary.version"),
        ({"version": 9, "percent": 10}, 404, "canary.version"),
        ({"version": 2, "percent": 0}, 400, "canary.percent"),
        ({"version": 2, "percent": 100}, 400, "canary.percent"),
        ({"version": 2, "percent": 0.001}, 400, "canary.percent"),
        ({"version": 2}, 400, "canary.percent"),
    ],
)
async def test_a_split_that_cannot_be_is_refused(client, canary, status, param):
    answer = await client.put(PROD, json={"version": 1, "canary": canary, "revision": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
