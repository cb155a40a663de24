"""What admin pages tell and take where a newcomer would be misled: whose, and in what unit."""

import re

import pytest
from visitors import ADMIN, OPERATOR, visitor

from loraplex.platform.admin.limit_facts import numbers_of
from loraplex.platform.admin.system import settings_shown

pytestmark = pytest.mark.anyio

CHOSEN = re.compile(r'<option value="(\w*)" selected>')
RATIOS = {"weight": "1", "kv_share": "1"}


@pytest.mark.parametrize("path", ["/admin/adapters", "/admin/usage"])
async def test_a_list_says_whose_it_is(world, path):
    acme = world.tenants["acme"]
    async with await visitor(world, OPERATOR) as client:
        everyone = (await client.get(path)).text
        narrowed = (await client.get(path, params={"tenant_id": acme})).text
        assert (await client.get(path, params={"tenant_id": "ten_none"})).status_code == 404
    assert CHOSEN.findall(everyone) == [""]
    assert CHOSEN.findall(narrowed) == [acme]
    assert f'type="hidden" name="tenant_id" value="{acme}"' in narrowed
    async with await visitor(world, ADMIN) as client:
        assert 'name="tenant_id"' not in (await client.get(path)).text


async def test_first_steps_are_shown_until_somebody_asked(world):
    body = {"model": "tiny-base", "prompt": "a", "max_tokens": 1}
    async with await visitor(world, ADMIN) as client:
        assert "Start here" in (await client.get("/admin")).text
        async with world.client() as caller:
            assert (await caller.post("/v1/completions", json=body)).status_code == 200
        assert "Start here" not in (await client.get("/admin")).text


async def test_the_audit_log_does_not_say_that_a_tenant_is_its_own(world):
    async with await visitor(world, OPERATOR) as client:
        await client.post("/admin/tenants", data={"name": "hooli"})
        text = (await client.get("/admin/audit")).text
    assert "<bdi>hooli</bdi></a></td>" in text


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("5 GiB", 5 << 30),
        ("1.5gib", 3 << 29),
        ("20 MB", 20_000_000),
        ("1,024", 1024),
        ("7b", 7),
    ],
)
def test_bytes_may_be_written_with_their_unit(said, number):
    numbers, wrong = numbers_of(RATIOS | {"storage_bytes": said})
    assert wrong == {}
    assert numbers["storage_bytes"] == number


@pytest.mark.parametrize("said", ["GiB", "5 parsecs", "-1 GiB", "1.2.3", "0x10"])
def test_what_is_no_number_of_bytes_is_complained_of(said):
    numbers, wrong = numbers_of(RATIOS | {"storage_bytes": said})
    assert "storage_bytes" not in numbers
    assert wrong == {"storage_bytes": "A number is needed, such as 5 GiB, or nothing for no limit."}


@pytest.mark.parametrize("said", ["9" * 400, f"{'9' * 18} TiB"])
async def test_more_bytes_than_there_can_be_are_no_fault(world, said):
    acme = f"/admin/tenants/{world.tenants['acme']}"
    async with await visitor(world, OPERATOR) as client:
        answer = await client.post(f"{acme}/limits", data=RATIOS | {"storage_bytes": said})
    assert answer.status_code == 200
    assert 'aria-invalid="true" autofocus' in answer.text


async def test_settings_are_shown_as_their_variables_have_them(world):
    shown = {name: value for name, value, _ in settings_shown(world.settings)}
    assert shown["LORAPLEX_SHARE_BASE"] == "false"
    assert shown["LORAPLEX_KEY_PEPPERS_OLD"] == "–"
    assert shown["LORAPLEX_HOST"] == world.settings.host
