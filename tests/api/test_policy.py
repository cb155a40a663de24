"""What the engine grants a tenant: set by the operator, carried by every request, shown with its
service."""

import json

import pytest
from command_line import command_line

from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.protocol import Policy, Service, Stats
from loraplex.platform.quotas import BOUNDS, TenantLimits

pytestmark = pytest.mark.anyio

POLICY = {"weight": 2.5, "max_running": 16, "kv_share": 0.5, "resident_bytes": 1 << 30}
DEFAULT = {"weight": 1.0, "max_running": None, "kv_share": 1.0, "resident_bytes": None}
COUNTS = [name for name in BOUNDS if name not in ("weight", "kv_share")]


@pytest.fixture
async def operator(world):
    async with world.client("operator") as client:
        yield client


async def policies(world, key: str) -> list[Policy]:
    """What one request of two prompts and one chat tell the engine."""
    world.engine.requests.clear()
    body = {"model": "tiny-base", "max_tokens": 1}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    async with world.client(key) as client:
        for path, more in (("completions", {"prompt": ["a", "b"]}), ("chat/completions", chat)):
            answer = await client.post(f"/v1/{path}", json=body | more)
            assert answer.status_code == 200, answer.text
    return [request.policy for request in world.engine.requests]


async def test_each_tenants_requests_carry_its_policy(world):
    await world.add_tenant("big", TenantLimits(**POLICY))
    assert await policies(world, "acme") == [Policy()] * 3
    assert await policies(world, "big") == [Policy(2.5, 16, 0.5, 1 << 30)] * 3


async def test_a_change_holds_from_the_next_request_on(world, operator):
    path = f"/v1/tenants/{world.tenants['acme']}"
    for change, expected in (
        (POLICY, Policy(2.5, 16, 0.5, 1 << 30)),
        ({"weight": 1, "max_running": None}, Policy(1.0, None, 0.5, 1 << 30)),
        ({"tokens_per_minute": 1_000_000}, Policy(1.0, None, 0.5, 1 << 30)),
        ({"kv_share": 1, "resident_bytes": None}, Policy()),
    ):
        assert (await operator.patch(path, json=change)).status_code == 200
        assert await policies(world, "acme") == [expected] * 3


async def test_a_policy_is_set_at_first_shown_and_listed(operator):
    made = await operator.post("/v1/tenants", json={"name": "initech", **POLICY})
    assert made.status_code == 201
    assert POLICY.items() <= made.json().items()
    assert (await operator.get(f"/v1/tenants/{made.json()['id']}")).json().items() >= POLICY.items()
    listed = (await operator.get("/v1/tenants")).json()["data"]
    assert [DEFAULT.items() <= tenant.items() for tenant in listed] == [True, True, False]
    assert listed[-1] == made.json()


@pytest.mark.parametrize(
    "body",
    [
        '{"weight": 0.001}',
        '{"weight": 101}',
        '{"weight": NaN}',
        '{"weight": Infinity}',
        '{"weight": "2"}',
        '{"max_running": 0}',
        '{"max_running": true}',
        '{"kv_share": 0}',
        '{"kv_share": 1.01}',
        '{"kv_share": null}',
    ],
)
async def test_a_change_that_cannot_be_changes_nothing(world, operator, body):
    path = f"/v1/tenants/{world.tenants['acme']}"
    headers = {"content-type": "application/json"}
    answer = await operator.patch(path, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, *json.loads(body))
    assert (await operator.get(path)).json().items() >= DEFAULT.items()


async def test_a_tenant_is_shown_with_its_live_service(world, operator, monkeypatch):
    services = tuple(
        Service(world.tenants[name], 9.5, *range(start, start + 7))
        for start, name in ((10, "globex"), (20, "acme"))
    )
    path = f"/v1/tenants/{world.tenants['acme']}"
    assert (await operator.get(path)).json()["service"] is None
    monkeypatch.setattr(FakeEngine, "stats", Stats(tenants=services))
    assert (await operator.get(path)).json()["service"] == {
        "prompt_tokens": 20,
        "generated_tokens": 21,
        "cached_tokens": 22,
        "running": 23,
        "waiting": 24,
        "kv_blocks": 25,
        "image_bytes": 26,
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


async def test_the_command_line_sets_shows_and_lifts_a_policy(world):
    async with command_line(world, "operator", "tenants") as run:
        flags = [word for name, n in POLICY.items() for word in (_flag(name), str(n))]
        limits = {name: 1_000 + i for i, name in enumerate(COUNTS)}
        every = [word for name, n in limits.items() for word in (_flag(name), str(n))]
        made = await run("create", "initech", *flags, "--json")
        assert made.items() >= POLICY.items()
        lifted = ["--weight", "1", "--max-running", "unlimited", "--kv-share", "1"]
        await run("limits", made["id"], *lifted)
        changed = await run("limits", made["id"], *every, "--json")
        assert changed.items() >= (limits | {"weight": 1}).items()
        lifted = [word for name in COUNTS for word in (_flag(name), "unlimited")]
        await run("limits", made["id"], *lifted)
        shown = await run("limits", made["id"], "--json")
        assert shown == made | DEFAULT | {"service": None}
        assert "kv share" in await run("list")
        assert "weight" in await run("limits", made["id"], "--weight", "1000", code=1)
        for word in ("nan", "inf", "much"):
            assert "not a number" in await run("limits", made["id"], "--weight", word, code=2)
