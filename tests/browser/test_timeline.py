"""The timeline of real runs: rows, panel, folds, zoom, keyboard, and a live run that grows below the reader."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import OpenPage, axe_findings, sideways, visit
from tests.server.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect: Any = None


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


def timeline(open_page: OpenPage, served: Served, run: str, **options: Any) -> Page:
    page = open_page(served.ready["sign_in"], **options)
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    visit(page, "runs", run)
    return page


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("link", name=re.compile(f"^{name}, ")).first


def bars_width(page: Page, name: str) -> float:
    box = page.locator(".tl-row", has=row(page, name)).locator(".tl-bar").first.bounding_box()
    assert box is not None
    return box["width"]


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 360])
def test_a_step_is_opened_linked_and_closed(served: Served, open_page: OpenPage, width: int) -> None:
    page = timeline(open_page, served, "refund-1005", width=width)
    expect(row(page, "find_order")).to_have_accessible_name("find_order, done, 1.3 s")
    row(page, "find_order").click()
    panel = page.get_by_role("complementary", name="Step find_order")
    for text in ("Input", "Output", "Idempotency key", "2 records", '"order": "1004"'):
        expect(panel.get_by_text(text).first).to_be_visible()
    assert "step=" in page.url
    assert sideways(page) <= 0
    assert axe_findings(page) == []
    page.reload()
    expect(panel.get_by_text("Output")).to_be_visible()
    expect(row(page, "find_order")).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)
    assert "step=" not in page.url


def test_the_keyboard_opens_a_step_and_returns_to_its_row(served: Served, open_page: OpenPage) -> None:
    page = timeline(open_page, served, "refund-1005")
    row(page, "stock").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="stock")).to_be_focused()
    page.keyboard.press("Escape")
    expect(row(page, "stock")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="stock")).to_be_focused()
    page.keyboard.press("j")
    expect(row(page, "weather")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="weather")).to_be_focused()


def test_a_fan_out_is_folded_and_only_visible_rows_are_in_the_document(served: Served, open_page: OpenPage) -> None:
    page = timeline(open_page, served, "digest")
    group = page.get_by_role("button", name=re.compile(r"^analyse \u00d7 699, 699 done"))
    expect(page.locator(".tl-row")).to_have_count(2)
    group.click()
    expect(group).to_have_attribute("aria-expanded", "true")
    assert page.locator(".tl-row").count() < 80
    for _ in range(20):  # the browser may take the key before it knows the new height of the page
        page.keyboard.press("End")
        with suppress(AssertionError):
            expect(row(page, "merge")).to_be_in_viewport(timeout=1_500)
            break
    expect(row(page, "merge")).to_be_in_viewport()
    assert page.locator(".tl-row").count() < 80
    page.get_by_label("Newest first").check()
    page.keyboard.press("Home")
    expect(page.locator(".tl-row").first).to_contain_text("merge")
    page.get_by_label(re.compile("^Hide done")).check()
    expect(page.get_by_text("Every step is done.")).to_be_visible()


def test_dragging_zooms(served: Served, open_page: OpenPage) -> None:
    page = timeline(open_page, served, "refund-1005")
    reset = page.get_by_role("button", name="Reset the zoom")
    expect(reset).to_be_disabled()
    before = bars_width(page, "stock")
    axis = page.locator(".tl-axis .tl-area").bounding_box()
    assert axis is not None
    page.mouse.move(axis["x"] + 2, axis["y"] + 10)
    page.mouse.down()
    page.mouse.move(axis["x"] + axis["width"] / 4, axis["y"] + 60, steps=3)
    page.mouse.up()
    expect(reset).to_be_enabled()
    assert bars_width(page, "stock") > before * 1.5
    assert "step=" not in page.url, "a drag opens no step"
    reset.click()
    assert bars_width(page, "stock") == pytest.approx(before, abs=1)
    expect(reset).to_be_disabled()


def test_a_step_in_doubt_does_not_look_like_a_running_one(served: Served, open_page: OpenPage) -> None:
    page = timeline(open_page, served, "payment-in-doubt")
    doubt = page.locator(".tl-row", has=row(page, "charge"))
    expect(doubt.locator(".state")).to_have_text("in doubt")
    fill = doubt.locator(".tl-bar").evaluate("bar => getComputedStyle(bar).fill")
    assert "#tl-in-doubt" in fill
    row(page, "charge").click()
    expect(page.get_by_role("complementary").get_by_text("its outcome is unknown")).to_be_visible()


def test_a_live_run_grows_and_keeps_what_the_reader_chose(served: Served, open_page: OpenPage) -> None:
    with served.client() as client:
        body = {"agent": "live", "run_id": "growing", "input": {"params": {"steps": 5, "seconds": 0.5}}}
        assert client.post("/api/v1/runs", json=body).status_code == 201
    page = timeline(open_page, served, "growing")
    first = page.locator(".tl-link").first
    first.click()
    panel = page.locator(".detail")
    expect(panel).to_be_visible()
    expect(page.locator(".tl-row")).to_have_count(5)
    expect(page.locator(".tl-row .state", has_text="running")).to_have_count(0)
    expect(first).to_have_attribute("aria-current", "true")
    expect(panel.get_by_text("Output")).to_be_visible()
    expect(page.locator(".tl-edge")).to_have_count(0)
