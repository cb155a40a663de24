"""The admin pages without a mouse or a screen: what has the focus, and what is said aloud."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

STOPS = 45
FOCUSED = """
() => {
  const at = document.activeElement;
  const box = at.getBoundingClientRect();
  const style = getComputedStyle(at);
  const outline = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  const seen = box.width > 1 && box.bottom > 0 && box.top < innerHeight;
  return at === document.body || (outline && seen) ? null : at.outerHTML.slice(0, 200);
}
"""
NOTE_SAID = """
() => {
  const place = document.querySelector("[data-said]");
  new MutationObserver(() => heard(place.textContent)).observe(place, { childList: true });
}
"""


@pytest.fixture
def upload(page: Page, tmp_path: Path) -> Callable[[str, bytes], None]:
    """Fills the form with a name and weights."""

    def fill(name: str, weights: bytes) -> None:
        config = tmp_path / "adapter_config.json"
        config.write_text('{"r": 8}')
        model = tmp_path / "adapter_model.safetensors"
        model.write_bytes(weights)
        page.goto("/admin/upload")
        page.get_by_label("Name", exact=True).fill(name)
        page.get_by_label("adapter_config.json").set_input_files(config)
        page.get_by_label("adapter_model.safetensors").set_input_files(model)

    return fill


def send(page: Page) -> None:
    page.get_by_role("button", name="Upload", exact=True).click()


def is_wrong(field: Locator, said: str) -> None:
    """The field has the focus, and says what is wrong with it."""
    expect(field).to_be_focused()
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description(re.compile(said))


@pytest.mark.parametrize("name", ["a tenant's keys", "adapter", "upload"])
def test_wherever_the_tab_key_leads_is_seen(house: Any, page: Page, name: str) -> None:
    page.goto(house.pages[name])
    unseen = []
    for _ in range(STOPS):
        page.keyboard.press("Tab")
        unseen.append(page.evaluate(FOCUSED))
    assert [each for each in unseen if each] == []


def test_what_a_form_complains_of_is_told_at_its_field(
    house: Any, context: BrowserContext, watch: Any
) -> None:
    page = watch.page(context, scripts=False)  # nothing but the browser moves the focus
    page.goto(house.pages["tenant"])
    page.get_by_label("Stored bytes", exact=True).fill("much")
    page.get_by_role("button", name="Save limits").click()
    is_wrong(page.get_by_label("Stored bytes", exact=True), "such as 5 GiB")

    page.goto("/admin/users")
    page.get_by_label("Name", exact=True).fill("Ada!")
    page.get_by_label("Role").select_option("admin")
    page.get_by_label("Tenant", exact=True).fill("demo")
    page.get_by_role("button", name="Create and invite").click()
    is_wrong(page.get_by_label("Name", exact=True), "lower-case letters")
    expect(page.get_by_label("Role")).to_have_value("admin")

    page.goto("/admin/keys")
    page.get_by_label("What it is for").fill("shop")
    page.get_by_label("Only these adapters").fill("poet@3")
    page.get_by_role("button", name="Make the key").click()
    is_wrong(page.get_by_label("Only these adapters"), "without versions")
    for box in page.get_by_role("group", name="It may").get_by_role("checkbox").all():
        box.uncheck()
    page.get_by_role("button", name="Make the key").click()
    expect(page.get_by_role("group", name="It may")).to_have_accessible_description(
        "Tick at least one thing that it may do."
    )
    expect(page.get_by_label("call models")).to_be_focused()

    page.goto("/admin/password")
    page.get_by_label("New password").fill("a long sentence is a good one")
    page.get_by_label("The same once more").fill("a long sentence is a bad one")
    page.get_by_role("button", name="Set the password").click()
    is_wrong(page.get_by_label("New password"), "The two are not the same")
    page.get_by_role("link", name="Keep the old one").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def test_what_an_upload_complains_of_is_told_at_its_field(
    page: Page, upload: Any, watch: Any
) -> None:
    upload("half", b"ok")
    page.get_by_label("adapter_config.json").set_input_files([])
    send(page)
    expect(page.get_by_role("alert")).to_be_focused()
    expect(page.get_by_role("alert")).to_contain_text("Choose adapter_config.json and")
    upload("Half!", b"ok")
    send(page)
    name = page.get_by_label("Name", exact=True)
    expect(name).to_be_focused()
    expect(name).to_have_accessible_error_message(re.compile("lower-case letters"))
    watch.allow("400: POST .*/admin/uploads")
    watch.allow("status of 400")
    page.goto("/admin/upload")
    expect(page.get_by_role("group", name="Latest uploads")).not_to_contain_text("half")


def test_progress_is_said_in_tenths(page: Page, upload: Any) -> None:
    said: list[str] = []
    page.expose_function("heard", lambda words: said.append(words))
    upload("large", b"x" * (9 << 20))
    page.evaluate(NOTE_SAID)
    send(page)
    expect(page.get_by_role("heading", name="Upload of large")).to_be_visible()
    assert said == [f"Uploading: {tenth} %" for tenth in (0, 40, 80, 100)]


def test_a_step_is_said_once_and_the_button_keeps_the_focus(page: Page, upload: Any) -> None:
    said: list[str] = []
    page.expose_function("heard", lambda words: said.append(words))
    upload("slow", b"hang")
    send(page)
    expect(page.get_by_role("heading", name="Upload of slow")).to_be_visible()
    page.evaluate(NOTE_SAID)
    cancel = page.get_by_role("button", name="Cancel")
    cancel.focus()
    for _ in range(3):
        with page.expect_response("**/admin/uploads/*"):
            pass
        expect(cancel).to_be_focused()
    expect(page.get_by_role("status")).to_have_text(re.compile("."))
    assert all(before != after for before, after in pairwise(said))
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").get_by_text("The upload is cancelled.")).to_be_visible()


def test_what_is_polled_keeps_the_focus(page: Page) -> None:
    page.goto("/admin")
    page.get_by_text("Data").first.focus()
    page.keyboard.press("Enter")
    page.evaluate("htmx.ajax('GET', '/admin/overview/live', { target: '#live' }).then(() => 0)")
    expect(page.get_by_text("Data").first).to_be_focused()
    expect(page.get_by_role("group", name="Tokens").locator("table")).to_be_visible()


def test_a_search_says_how_much_it_found(house: Any, page: Page) -> None:
    page.goto(house.pages["adapters"])
    page.get_by_label("Search adapters by name").press_sequentially("wwww")
    expect(page.get_by_role("status")).to_have_text("1 adapter")
    expect(page.get_by_label("Search adapters by name")).to_be_focused()
    expect(page.get_by_role("group", name="Adapters").get_by_role("link")).to_have_count(1)


def test_the_stop_button_hands_the_focus_on(page: Page) -> None:
    page.goto("/admin/playground")
    page.get_by_label("Prompt").fill("A long story, please. " * 20)
    page.get_by_text("System message and sampling").click()
    page.get_by_label("Most tokens").fill("400")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Stop").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Run")).to_be_focused()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_a_button_that_copied_says_so_and_then_what_it_does(
    house: Any, context: BrowserContext, page: Page
) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.clock.install()
    page.goto(house.pages["adapter"])
    button = page.get_by_role("button", name="Copy the digest of version 1")
    whole = button.text_content()
    button.click()
    copied = page.get_by_role("button", name="Copied")
    copied.click()
    page.clock.run_for(2000)
    expect(button).to_have_text(str(whole))
    assert re.fullmatch("[0-9a-f]{64}", page.evaluate("navigator.clipboard.readText()"))
