"""The admin pages on a phone: nothing is wider than the window, and a stacked row is labelled."""

from itertools import pairwise
from typing import Any

import pytest
from browsing import Watch, serious_faults
from playwright.sync_api import Browser, Page, expect

WIDE = """
() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const parts = [document.scrollingElement, ...document.querySelectorAll("main *")];
  const wide = parts.filter((each) => each.scrollWidth > each.clientWidth && each.clientWidth > 1);
  const style = (each) => each.matches("html") ? "auto" : getComputedStyle(each).overflowX;
  return wide.filter((each) => style(each) === "auto").map((each) => each.outerHTML.slice(0, 80));
}
"""
MISLABELLED = """
() => {
  const texts = (row) => [...row.cells].map((cell) => cell.dataset.label ?? cell.textContent);
  const faults = [];
  for (const table of document.querySelectorAll("table:not(.u-legend)")) {
    const said = texts(table.tHead.rows[0]).join();
    const rows = [...table.rows].slice(1);
    if (rows.some((row) => texts(row).join() !== said)) faults.push(said);
  }
  return faults;
}
"""


@pytest.fixture
def phone(house: Any, browser: Browser, watch: Watch) -> Any:
    context = browser.new_context(
        base_url=house.served.url,
        storage_state=house.session,
        viewport={"width": 390, "height": 844},
        color_scheme="dark",
        is_mobile=True,
        has_touch=True,
    )
    yield watch.page(context)
    context.close()


def test_every_page_and_list_fits_and_every_cell_bears_its_heading(house: Any, phone: Page) -> None:
    faults, tables = [], 0
    for name, path in house.pages.items():
        phone.goto(path)
        faults += [(name, each) for each in phone.evaluate(WIDE) + phone.evaluate(MISLABELLED)]
        tables += phone.locator("table").count()
    assert faults == []
    assert tables > 15


def test_a_stacked_row_shows_each_value_behind_its_heading(house: Any, phone: Page) -> None:
    phone.goto(house.pages["usage"])
    row = phone.locator("table.stacks tbody tr").first
    label = "cell => getComputedStyle(cell, '::before').content"
    assert row.locator("td").nth(1).evaluate(label) == '"Requests"'
    boxes = [cell.bounding_box() for cell in row.locator("td").all()]
    assert all(above["y"] < below["y"] for above, below in pairwise(boxes))
    expect(phone.locator("table.stacks tfoot td").first).to_have_text("All")


@pytest.mark.parametrize("name", ["a tenant's keys", "adapter"])
def test_pages_with_long_names_have_no_serious_fault(house: Any, phone: Page, name: str) -> None:
    phone.goto(house.pages[name])
    assert serious_faults(phone) == []
