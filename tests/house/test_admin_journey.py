"""The admin pages as people use them: Chromium on a live server with the demo model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import Watch, chromium, drop, serious_faults, shown_text
from playwright.sync_api import Browser, BrowserContext, Page, expect

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "adapters"
PASSWORD = "a long sentence is a good one"
PATIENCE_MS = 20_000
HOSTILE = "<script>alert(1)</script>\u202egnp.exe "
SCREENS = {
    "Overview": "/admin",
    "Adapters": "/admin/adapters",
    "Upload": "/admin/upload",
    "Playground": "/admin/playground",
    "API keys": "/admin/keys",
    "Tenants": "/admin/tenants",
    "Usage": "/admin/usage",
    "Users": "/admin/users",
    "Audit": "/admin/audit",
    "System": "/admin/system",
}
CHOSEN = "form => [...form.querySelectorAll('input[type=file]')].map(i => i.files[0]?.name ?? '')"
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def operator(served: Any, browser: Browser) -> dict[str, Any]:
    """The first operator's session, signed in with the code that the server printed."""
    context = browser.new_context(base_url=served.url)
    page, watch = Watch().page(context), Watch()
    sign_in(page, "operator", served.sign_in_code)
    expect(page).to_have_url(re.compile("/admin/password$"))
    choose_password(page)
    state = context.storage_state()
    context.close()
    watch.check()
    return dict(state)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.check()


@pytest.fixture
def context(served: Any, browser: Browser, operator: Any) -> Iterator[BrowserContext]:
    made = browser.new_context(base_url=served.url, storage_state=operator)
    made.set_default_timeout(PATIENCE_MS)
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, watch: Watch) -> Page:
    return watch.page(context)


def sign_in(page: Page, name: str, password: str) -> None:
    page.goto("/admin/sign-in")
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password or one-time code").fill(password)
    page.get_by_role("button", name="Sign in").click()


def choose_password(page: Page) -> None:
    page.get_by_label("New password").fill(PASSWORD)
    page.get_by_label("The same once more").fill(PASSWORD)
    page.get_by_role("button", name="Set the password").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def open_screen(page: Page, name: str) -> None:
    page.goto("/admin")
    page.get_by_role("navigation", name="Screens").get_by_role("link", name=name).click()


def upload(page: Page, name: str, config: Path, weights: Path) -> None:
    open_screen(page, "Upload")
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("adapter_config.json").set_input_files(config)
    page.get_by_label("adapter_model.safetensors").set_input_files(weights)
    page.get_by_role("button", name="Upload").click()


def upload_example(page: Page, name: str, example: str) -> None:
    folder = EXAMPLES / example
    upload(page, name, folder / "adapter_config.json", folder / "adapter_model.safetensors")
    expect(page.locator("#job .badge")).to_have_text("ready")


def ask(served: Any, key: str, model: str) -> httpx.Response:
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    url = f"{served.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=120)


def test_the_printed_code_signs_in_once(served: Any, browser: Browser, operator: Any) -> None:
    context = browser.new_context(base_url=served.url)
    page = context.new_page()
    sign_in(page, "operator", served.sign_in_code)
    expect(page.get_by_role("alert")).to_contain_text("do not go together")
    sign_in(page, "operator", PASSWORD)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    context.close()


def test_signing_out_ends_the_session_on_the_server(
    served: Any, browser: Browser, operator: Any, watch: Watch
) -> None:
    context = browser.new_context(base_url=served.url)
    page = watch.page(context)
    sign_in(page, "operator", PASSWORD)
    cookies = context.cookies(f"{served.url}/admin")
    assert [(c["name"], c["httpOnly"], c["sameSite"]) for c in cookies] == [
        ("loraplex_session", True, "Strict")
    ]
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    context.add_cookies(cookies)
    page.goto("/admin/audit")
    expect(page).to_have_url(re.compile(r"/admin/sign-in\?onward=/admin/audit$"))
    context.close()


def test_an_adapter_is_uploaded_checked_and_tried_beside_the_base(page: Page) -> None:
    upload_example(page, "sailor", "pirate")
    expect(page.get_by_text("Tried in the engine beside the base")).to_be_visible()
    expect(page.get_by_text("of greedy tokens change")).to_be_visible()
    page.get_by_role("link", name="See the adapter").click()
    page.get_by_role("link", name="Try it").click()
    page.get_by_label("Prompt").fill("What is the capital of France?")
    page.get_by_role("button", name="Run").click()
    answers = page.locator(".answer")
    expect(page.locator(".answer", has_text="first after")).to_have_count(1)
    page.get_by_label("(the base)").check()
    page.get_by_label("Others").fill("sailor@1")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".answer", has_text="first after")).to_have_count(3)
    base, sailor, first = answers.locator("[data-text]").all_inner_texts()
    assert base and sailor == first != base
    expect(page.locator("#curl")).to_contain_text('"model": "sailor"')


def test_files_and_folders_are_dropped_onto_the_form(page: Page) -> None:
    open_screen(page, "Upload")
    form, zone = page.locator("[data-upload]"), page.locator("[data-drop]")
    pair = ["adapter_config.json", "adapter_model.safetensors"]
    drop(zone, ["notes.txt"])
    expect(form.get_by_role("alert")).to_contain_text("None of that is an adapter")
    drop(zone, ["poet.zip"])
    expect(form.get_by_role("alert")).to_have_count(0)
    assert form.evaluate(CHOSEN) == ["", "", "poet.zip"]
    expect(page.get_by_label("Name", exact=True)).to_have_value("poet")
    drop(zone, ["README.md", "backup.zip", *pair], folder=100)
    expect(page.locator("#archive")).to_have_value("")
    assert form.evaluate(CHOSEN) == [*pair, ""]
    page.get_by_label("Name", exact=True).fill("dropped")
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("#job .badge")).to_have_text("refused")


def test_a_bad_adapter_is_refused_with_every_reason(page: Page, tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "pirate" / "adapter_config.json").read_text())
    config["trainable_token_indices"] = [1]
    config["modules_to_save"] = ["lm_head"]
    wrong = tmp_path / "adapter_config.json"
    wrong.write_text(json.dumps(config))
    upload(page, "broken", wrong, EXAMPLES / "pirate" / "adapter_model.safetensors")
    refused = page.locator(".notice.bad")
    expect(refused).to_contain_text("It was refused, for these reasons:")
    assert refused.locator("li").count() > 1
    assert serious_faults(page) == []
    expect(page.locator("#job .badge")).to_have_text("refused")
    open_screen(page, "Adapters")
    expect(page.get_by_role("link", name="broken")).to_have_count(0)


def test_an_alias_moves_splits_is_promoted_and_rolls_back(page: Page) -> None:
    upload_example(page, "clerk", "json")
    upload_example(page, "clerk", "emoji")
    page.get_by_role("link", name="See the adapter").click()
    page.get_by_label("Name", exact=True).fill("prod")
    page.locator("form", has_text="New alias").get_by_label("Version").select_option("1")
    page.get_by_role("button", name="Create").click()
    card = page.locator("#alias-prod")
    expect(card.locator("dd").first).to_have_text("1")
    card.get_by_label("Canary", exact=True).select_option("2")
    card.get_by_label("Canary's share").fill("20")
    expect(card.locator("output")).to_have_text("20")
    card.get_by_role("button", name="Move", exact=True).click()
    expect(card.locator("dd").first).to_have_text("1 for 80%")
    expect(card).to_contain_text("2 for 20% of conversations")
    card.get_by_role("button", name="Promote the canary").click()
    expect(card.locator("dd").first).to_have_text("2")
    card.get_by_role("button", name="Roll back").click()
    expect(card.locator("dd").first).to_have_text("1 for 80%")
    card.get_by_text("History").click()
    expect(card.locator("tbody tr")).to_have_count(4)
    assert serious_faults(page) == []


def test_a_stale_page_does_not_move_an_alias(page: Page, context: BrowserContext) -> None:
    upload_example(page, "porter", "emoji")
    page.get_by_role("link", name="See the adapter").click()
    page.get_by_label("Name", exact=True).fill("live")
    page.get_by_role("button", name="Create").click()
    expect(page.locator("#alias-live")).to_be_visible()
    other = context.new_page()
    other.goto(page.url)
    other.locator("#alias-live").get_by_role("button", name="Move", exact=True).click()
    expect(other.locator("#alias-live")).to_contain_text("revision 2")
    page.locator("#alias-live").get_by_role("button", name="Move", exact=True).click()
    expect(page.locator("#alias-live").get_by_role("alert")).to_contain_text("revision 2")


def test_a_key_is_made_used_rotated_and_revoked(served: Any, page: Page) -> None:
    open_screen(page, "API keys")
    page.get_by_label("What it is for").fill("web shop")
    page.get_by_role("button", name="Make the key").click()
    expect(page.get_by_text("the only time the key is shown")).to_be_visible()
    old = shown_text(page.locator("#secret"))
    assert ask(served, old, "pirate").status_code == 200
    page.get_by_role("link", name="I have copied it").click()
    row = page.locator("tr", has_text="web shop")
    expect(row.get_by_text("active")).to_be_visible()
    assert old not in page.content()
    assert serious_faults(page) == []
    row.get_by_text("Rotate").click()
    row.get_by_label("The old key ends").select_option("3600")
    row.get_by_role("button", name="Make a new key").click()
    new = shown_text(page.locator("#secret"))
    assert new != old
    expect(page.get_by_text(re.compile(r"ends in \d+ min"))).to_be_visible()
    assert {ask(served, key, "pirate").status_code for key in (old, new)} == {200}
    page.get_by_role("link", name="I have copied it").click()
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("tr", has_text=new[:8]).get_by_role("button", name="Revoke").click()
    expect(page.get_by_text("The key is revoked.")).to_be_visible()
    assert ask(served, new, "pirate").status_code == 401


def test_a_countdown_comes_to_its_end(page: Page) -> None:
    open_screen(page, "API keys")
    page.get_by_label("What it is for").fill("for a day")
    page.get_by_label("Days until it expires").fill("1")
    page.get_by_role("button", name="Make the key").click()
    page.clock.install()
    page.get_by_role("link", name="I have copied it").click()
    left = page.locator("tr", has_text="for a day").locator("[data-countdown]")
    expect(left).to_have_text(re.compile(r"^ends in 23 h 59 min$"))
    page.clock.fast_forward("23:59:30")
    expect(left).to_have_text(re.compile(r"^ends in \d+ s$"))
    page.clock.fast_forward("01:00")
    expect(left).to_have_text("ended")


def test_a_quota_that_is_hit_is_explained(served: Any, page: Page) -> None:
    open_screen(page, "Tenants")
    page.get_by_label("Name of the new tenant").fill("thrifty")
    page.get_by_role("button", name="Create").click()
    page.get_by_label("Requests a minute").fill("many")
    page.get_by_role("button", name="Save limits").click()
    expect(page.get_by_text("A number is needed")).to_be_visible()
    page.get_by_label("Requests a minute").fill("1")
    page.get_by_role("button", name="Save limits").click()
    expect(page.get_by_text("The limits hold from the next request on.")).to_be_visible()
    tenant = page.url.partition("?")[0]
    page.get_by_role("link", name="Keys").last.click()
    page.get_by_label("What it is for").fill("one a minute")
    page.get_by_role("button", name="Make the key").click()
    key = shown_text(page.locator("#secret"))
    with served.http(key) as client:
        base = client.get("/v1/models").json()["data"][0]["id"]
    codes = [ask(served, key, base).status_code for _ in range(2)]
    assert codes == [200, 429]
    page.goto(tenant)
    expect(page.locator("section", has_text="Latest refusals")).to_contain_text(
        "The tenant's limit of requests a minute"
    )
    expect(page.locator("#requests_per_minute-more")).to_have_text("1 of 1 used")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Suspend").click()
    expect(page.get_by_text("suspended", exact=True)).to_be_visible()
    assert ask(served, key, base).status_code == 403


def test_a_viewer_looks_and_changes_nothing(
    served: Any, browser: Browser, page: Page, watch: Watch
) -> None:
    open_screen(page, "Users")
    page.get_by_label("Name", exact=True).fill("vera")
    page.get_by_label("Role").select_option("viewer")
    page.get_by_label("Tenant", exact=True).fill("demo")
    page.get_by_role("button", name="Create and invite").click()
    code = shown_text(page.locator("#secret"))
    context = browser.new_context(base_url=served.url)
    theirs = watch.page(context)
    sign_in(theirs, "vera", code)
    choose_password(theirs)
    tabs = theirs.get_by_role("navigation", name="Screens").get_by_role("link")
    expect(tabs).to_have_text(["Overview", "Adapters", "Usage"])
    theirs.goto("/admin/adapters")
    theirs.get_by_role("link", name="pirate").click()
    expect(theirs.get_by_role("heading", name="Versions")).to_be_visible()
    assert theirs.locator("main form").count() == 0
    theirs.goto("/admin/keys")
    expect(theirs.get_by_role("heading", name="Not for your role")).to_be_visible()
    watch.allow("403: GET .*/admin/keys")
    watch.allow("status of 403")
    context.close()


def test_without_scripts_the_forms_work(
    served: Any, browser: Browser, operator: Any, watch: Watch
) -> None:
    context = browser.new_context(
        base_url=served.url, storage_state=operator, java_script_enabled=False
    )
    context.set_default_timeout(PATIENCE_MS)
    page = watch.page(context, scripts=False)
    upload_example(page, "quiet", "pirate")
    page.get_by_role("link", name="See the adapter").click()
    page.get_by_label("Name", exact=True).fill("prod")
    page.get_by_role("button", name="Create").click()
    expect(page.locator("#alias-prod")).to_be_visible()
    page.get_by_role("link", name="Try it").click()
    page.get_by_label("(the base)").check()
    page.get_by_label("Others").fill("quiet@1, nobody")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".answer")).to_have_count(4)
    expect(page.locator(".answer", has_text="does not exist")).to_have_count(1)
    open_screen(page, "Adapters")
    page.get_by_label("Search adapters by name").fill("quie")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    open_screen(page, "API keys")
    page.get_by_label("What it is for").fill("no scripts")
    page.get_by_role("button", name="Make the key").click()
    expect(page.locator("#secret")).to_be_visible()
    context.close()


def test_hostile_text_is_text(page: Page) -> None:
    upload_example(page, "x" * 63, "emoji")
    page.get_by_role("link", name="See the adapter").click()
    page.get_by_label("Description", exact=True).fill(HOSTILE + "x" * 200)
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".head").first).to_contain_text("<script>alert(1)</script>")
    open_screen(page, "Adapters")
    page.get_by_label("Search adapters by name").fill(HOSTILE)
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("heading", name="No adapter has")).to_contain_text("<script>")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_a_screen_is_sound(
    served: Any, browser: Browser, operator: Any, watch: Watch, name: str, scheme: Any, width: int
) -> None:
    """No serious fault for axe, nothing wider than the window, one main heading."""
    context = browser.new_context(
        base_url=served.url,
        storage_state=operator,
        color_scheme=scheme,
        viewport={"width": width, "height": 900},
    )
    page = watch.page(context)
    page.goto(SCREENS[name])
    assert serious_faults(page) == []
    assert page.locator("h1").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


def test_the_overview_changes_by_itself_and_does_not_jump(served: Any, page: Page) -> None:
    page.goto("/admin")
    height = page.evaluate("document.querySelector('.tiles').getBoundingClientRect().height")
    with page.expect_response("**/admin/overview/live"):
        ask(served, served.api_key, "pirate")
    expect(page.locator(".tile", has_text="Requests").first).to_be_visible()
    after = page.evaluate("document.querySelector('.tiles').getBoundingClientRect().height")
    assert after == height
