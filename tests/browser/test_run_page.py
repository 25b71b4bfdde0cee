"""What people do on the page of a run, with a real worker behind it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import OpenPage, axe_findings, read_json, visit
from tests.server.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect: Any = None


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


def submitted(served: Served, agent: str, run_id: str, **params: Any) -> str:
    with served.client() as client:
        body = {"agent": agent, "run_id": run_id, "input": {"params": params}}
        answer = client.post("/api/v1/runs", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run_id"])


def head_state(page: Page) -> Any:
    return page.locator("main .page-head .state")


def ended(page: Page, state: str) -> None:
    expect(head_state(page)).to_have_text(re.compile(state))


def in_dialog(page: Page, button: str) -> Any:
    page.locator(".page-actions").get_by_role("button", name=button, exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    return dialog


def test_a_live_run_is_watched_and_survives_a_reload(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    run = submitted(served, "live", "watched", steps=12, seconds=0.4)
    visit(page, "runs", run, "events")
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    expect(page.get_by_role("group", name="Events").get_by_text("progress").first).to_be_visible()
    page.reload()
    expect(page.get_by_text("The run has finished")).to_be_visible()
    ended(page, "succeeded")
    # An event for the start and one for the end, of the run and of each step, and one that the agent emits.
    total = 2 + 12 * 3
    assert len(read_json(served, f"runs/{run}/events?follow=false")["items"]) == total
    expect(page.get_by_text(f"{total} events", exact=True)).to_be_visible()


def test_the_timeline_follows_a_live_run(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    run = submitted(served, "live", "watched", steps=5, seconds=0.5)
    visit(page, "runs", run)
    expect(page.get_by_role("link", name=re.compile("^step 3"))).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("^step 5, .*done"))).to_be_visible()
    ended(page, "succeeded")


def test_an_approval_is_answered_with_the_form_of_its_schema(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "runs", "refund-1004")
    page.get_by_role("heading", name="refund", exact=True).click()
    form = page.get_by_role("form", name="Answer refund")
    form.get_by_label("partial", exact=True).check()
    form.get_by_label(re.compile("^Amount")).fill("40.5")
    form.get_by_label("Note to the customer").fill("For the shade")
    form.get_by_label("Yes").check()
    form.get_by_role("button", name="Answer", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("refund-1004")
    assert axe_findings(page) == []
    dialog.get_by_role("button", name="Answer", exact=True).click()
    ended(page, "succeeded")
    records = read_json(served, "runs/refund-1004/journal?limit=1000")["items"]
    decision = {"decision": "partial", "amount": 40.5, "note": "For the shade", "notify": True}
    assert decision in [each["result"] for each in records]
    expect(page.get_by_role("form", name="Answer refund")).to_have_count(0)
    expect(page.get_by_role("list", name="Actions of people")).to_contain_text("Answered refund by default")


def test_a_step_in_doubt_is_decided(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "runs", "payment-in-doubt")
    page.get_by_role("heading", name="Did the step “charge” take effect?").click()
    row = page.get_by_role("link", name=re.compile("^charge, "))
    expect(row).to_have_accessible_name(re.compile("in doubt"))
    form = page.get_by_role("form", name=re.compile("charge"))
    form.get_by_label("retry").check()
    form.get_by_role("button", name="Answer", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Answer", exact=True).click()
    ended(page, "succeeded")


def test_a_run_is_cancelled_and_resumed(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    run = submitted(served, "live", "endless", steps=1000, seconds=0.2)
    visit(page, "runs", run)
    dialog = in_dialog(page, "Cancel")
    expect(dialog).to_contain_text("endless")
    dialog.get_by_role("button", name="Cancel the run").click()
    ended(page, "cancelled")
    dialog = in_dialog(page, "Resume")
    expect(dialog).to_contain_text("endless")
    assert axe_findings(page) == []
    dialog.get_by_role("button", name="Resume the run").click()
    ended(page, "running")


def test_a_signal_wakes_a_waiting_run(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "runs", "order-77")
    dialog = in_dialog(page, "Signal")
    expect(dialog.get_by_label("Name")).to_have_value("shipped")
    dialog.get_by_label("Payload").fill("{broken")
    dialog.get_by_role("button", name="Send the signal").click()
    expect(dialog.get_by_role("alert")).to_contain_text("must be JSON")
    dialog.get_by_label("Payload").fill('{"parcel": "XY-1"}')
    dialog.get_by_role("button", name="Send the signal").click()
    expect(dialog).to_have_count(0)
    expect(page.locator("main")).to_contain_text("sleep")


def test_a_fork_starts_after_a_saved_step(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "runs", "parse-prices")
    expect(in_dialog(page, "Fork").locator("option")).to_have_text(["the last saved result", "1. read"])


def test_a_run_is_forked_and_compared(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "runs", "report-november")
    dialog = in_dialog(page, "Fork")
    expect(dialog).to_contain_text("report-november")
    clean = dialog.locator("option", has_text="clean").get_attribute("value")
    dialog.get_by_label(re.compile("Keep the results up to")).select_option(clean)
    dialog.get_by_label(re.compile("^Input")).fill('{"params": {"source": "sales.csv", "factor": 3}}')
    dialog.get_by_label(re.compile("^Run key of the new run")).fill("forked-here")
    dialog.get_by_role("button", name="Fork the run").click()
    expect(page.get_by_role("heading", name="forked-here", level=1)).to_be_visible()
    ended(page, "succeeded")
    dialog = in_dialog(page, "Compare")
    dialog.get_by_role("button", name="Compare", exact=True).click()
    expect(page).to_have_url(re.compile("#/compare/"))
    expect(page.get_by_role("region", name="Input")).to_contain_text('"factor": 3')
    expect(page.locator("main")).to_contain_text("total")
    expect(page.locator("main")).to_contain_text("changed")
    assert axe_findings(page) == []


def test_a_step_shows_all_that_is_stored_of_it(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "runs", "parse-prices")
    page.get_by_role("link", name=re.compile("^parse, ")).click()
    panel = page.get_by_role("complementary", name=re.compile("^Step parse"))
    expect(panel).to_contain_text("ValueError")
    expect(panel).to_contain_text("Traceback")
    expect(panel).to_contain_text("Idempotency key")
    assert axe_findings(page) == []
    page.reload()
    expect(panel).to_contain_text("ValueError")
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)


def test_many_steps_are_folded_and_can_be_opened(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "runs", "digest")
    group = page.get_by_role("button", name=re.compile("^analyse . 699"))
    expect(group).to_be_visible()
    group.click()
    expect(page.get_by_role("link", name=re.compile("^analyse, chapter-000"))).to_be_visible()
    assert page.locator(".tl-row").count() < 120
    page.get_by_label(re.compile("^Hide done")).check()
    expect(group).to_have_count(0)
