"""Admin pages with long names and a little of everything on them, in Chromium on a fake house.

Knows how the house is filled; refuses to know what is asked of the pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_served
import httpx
import pytest
from browsing import Watch, chromium
from fake_served import CHAT, FakeServed, eventually, fake_serving
from playwright.sync_api import Browser, BrowserContext, Page, expect

HOUSE = Path(__file__).resolve().parents[1] / "support" / "upload_house.py"
PASSWORD = "a long sentence is a good one"
PATIENCE_MS = 20_000
WORDS = "a-name-of-many-words-that-wraps-where-its-words-end-".ljust(63, "x")
SOLID = "w" * 63
BASE = "tiny-base"
CONFIG = b'{"peft_type": "LORA", "r": 8}'
expect.set_options(timeout=PATIENCE_MS)


@dataclass(frozen=True)
class Filled:
    """A running house, addresses of its pages by what they show, and an operator's session."""

    served: FakeServed
    pages: dict[str, str]
    session: Any


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="package")
def house(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Filled]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_served, "HOUSE", HOUSE)
        with fake_serving(tmp_path_factory.mktemp("house") / "data", token_ms=5) as served:
            pages = _fill(served)
            context = browser.new_context(base_url=served.url)
            pages["adapter"] = _sign_in(served, context.new_page())
            session = context.storage_state()
            context.close()
            yield Filled(served, pages, session)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.check()


@pytest.fixture
def context(house: Filled, browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(base_url=house.served.url, storage_state=house.session)
    made.set_default_timeout(PATIENCE_MS)
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, watch: Watch) -> Page:
    return watch.page(context)


def _fill(served: FakeServed) -> dict[str, str]:
    with served.client(served.said["Operator key"]) as operator, served.client() as demo:
        operator.post("/v1/users", json={"name": "operator", "role": "operator"})
        tenant = _made(operator, "/v1/tenants", name=WORDS, requests_per_minute=1)["id"]
        _made(operator, "/v1/users", name=f"ada@{SOLID}"[:63], role="admin", tenant_id=tenant)
        bound = [WORDS, SOLID, BASE]
        key = _made(operator, "/v1/keys", name=SOLID, tenant_id=tenant, adapters=bound)
        _made(operator, "/v1/keys", name="spare", tenant_id=tenant, scopes=["adapters:read"])
        for name in (WORDS, SOLID):
            job = _upload(demo, name)
            alias = f"/v1/adapters/{name}/aliases/{SOLID}"
            assert demo.put(alias, json={"version": 1, "revision": 0}).is_success
            assert _ask(demo, f"{name}@{SOLID}").is_success
        with served.client(key["secret"]) as limited:
            assert [_ask(limited, BASE).status_code for _ in range(2)] == [200, 429]
    groups = "&".join(f"group_by={each}" for each in ("tenant", "adapter", "day", "key", "model"))
    screens = ("", "adapters", "upload", "playground", "keys", "tenants", "users", "usage")
    return {each or "overview": f"/admin/{each}".rstrip("/") for each in screens} | {
        "audit": "/admin/audit",
        "system": "/admin/system",
        "welcome": "/",
        "password": "/admin/password",
        "tenant": f"/admin/tenants/{tenant}",
        "a tenant's keys": f"/admin/keys?tenant_id={tenant}",
        "usage by all": f"/admin/usage?{groups}",
        "job": f"/admin/uploads/{job}",
        "nothing found": f"/admin/adapters?query={SOLID}y",
    }


def _made(client: httpx.Client, path: str, **body: object) -> Any:
    answer = client.post(path, json={"scopes": ["infer"]} | body if "keys" in path else body)
    assert answer.is_success, answer.text
    return answer.json()


def _upload(client: httpx.Client, name: str) -> str:
    files = {
        "adapter_config": ("adapter_config.json", CONFIG),
        "adapter_model": ("adapter_model.safetensors", name.encode()),
    }
    job = _made(client, "/v1/uploads", name=name, sizes={k: len(v[1]) for k, v in files.items()})
    for part, (_, content) in files.items():
        path = f"/v1/uploads/{job['id']}/parts/{part}"
        assert client.put(path, content=content, headers={"upload-offset": "0"}).is_success
    assert client.post(f"/v1/uploads/{job['id']}/finish").is_success
    state = lambda: client.get(f"/v1/uploads/{job['id']}").json()["state"]  # noqa: E731
    eventually(lambda: state() == "ready", "the upload is ready")
    return str(job["id"])


def _ask(client: httpx.Client, model: str) -> httpx.Response:
    turns = [{"role": "user", "content": "Hi"}]
    return client.post(CHAT, json={"model": model, "max_tokens": 2, "messages": turns})


def _sign_in(served: FakeServed, page: Page) -> str:
    """Sign the operator in; returns the address of an adapter's page."""
    with served.client(served.said["Operator key"]) as operator:
        (user,) = [u for u in operator.get("/v1/users").json()["data"] if u["name"] == "operator"]
        code = _made(operator, f"/v1/users/{user['id']}/invitations")["secret"]
    page.goto("/admin/adapters")
    page.get_by_label("Name").fill("operator")
    page.get_by_label("Password or one-time code").fill(code)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_label("New password").fill(PASSWORD)
    page.get_by_label("The same once more").fill(PASSWORD)
    page.get_by_role("button", name="Set the password").click()
    page.get_by_role("navigation", name="Screens").get_by_role("link", name="Adapters").click()
    return str(page.get_by_role("link", name=SOLID).get_attribute("href"))
