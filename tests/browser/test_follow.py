"""How a reader follows a run: its first screen, its parts, its plan, its events, and what differs from another run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import AGENTS, OpenPage, axe_findings, read_json, visit
from tests.server.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect: Any = None


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


@pytest.fixture
def idle(serve: Callable[..., Served], store: object) -> Served:
    """The store of this test without a worker: every run stays as it is."""
    return serve(AGENTS, "--db", store, "--no-worker")


def tabs(page: Page) -> list[str]:
    found: list[str] = page.get_by_role("navigation", name="Parts of the run").get_by_role("link").all_inner_texts()
    return found


def test_an_open_question_leaves_the_timeline_on_the_first_screen(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", "refund-1004")
    expect(page.locator(".ask > summary")).to_contain_text(re.compile("refund.*asked"))
    expect(page.get_by_role("form", name="Answer refund")).to_be_hidden()
    expect(page.locator(".tl-row").last).to_be_in_viewport(ratio=1)
    page.locator(".ask > summary").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("form", name="Answer refund")).to_be_visible()
    assert axe_findings(page) == []


def test_a_run_has_only_the_tabs_that_it_can_have(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    planned = read_json(idle, "runs?agent=orchestrator")["items"][0]["run_id"]
    shown = {}
    for run in ("refund-1005", "order-77", "report-november", planned):
        visit(page, "runs", run)
        shown[run] = [each for each in ("Messages", "Plan") if each in tabs(page)]
    assert shown == {"refund-1005": ["Messages"], "order-77": [], "report-november": ["Plan"],
                     planned: ["Messages", "Plan"]}  # fmt: skip
    visit(page, "runs", "order-77", "plan")  # the address of a part that the run does not have
    expect(page.get_by_text("The run has no plan.")).to_be_visible()
    assert "Plan" in tabs(page)


def test_the_steps_of_a_plan_show_their_tools(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", read_json(idle, "runs?agent=orchestrator")["items"][0]["run_id"], "plan")
    nodes = page.locator(".plan-node")
    expect(nodes).to_have_count(6)
    expect(nodes.locator("code")).to_have_text(["calculator"] * 6)


def test_an_event_shows_its_ids(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", "refund-1005", "events")
    row = page.locator(".log-row", has_text="approval.requested")
    request = read_json(idle, "runs/refund-1005/events?follow=false&types=approval.requested")["items"][0]
    assert request["payload"]["request_id"]
    expect(row).to_contain_text("request_id=")


def test_a_comparison_opens_the_first_difference_and_folds_what_is_equal(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "compare", "report-november", "report-november-fork")
    first = page.locator(".pair[open]")
    expect(first).to_have_count(1)
    expect(first).to_be_in_viewport()
    expect(first.locator("summary").first).to_contain_text("analyse")
    changes = first.get_by_role("region", name="Result")
    expect(changes.locator(".only-first", has_text="factor")).to_have_text(re.compile('^-.*"factor": 1'))
    expect(changes.locator(".only-second", has_text="factor")).to_have_text(re.compile('^\\+.*"factor": 2'))
    equal = page.get_by_text("Steps 1 to 2 are equal: fetch, clean")
    expect(page.locator(".pair", has_text="fetch").locator(".pair")).to_have_count(0)
    equal.click()
    expect(page.locator(".pair .pair")).to_have_count(2)
    assert axe_findings(page) == []


DIFF = """async (before, after) => {
  const { diffLines, folded } = await import("/static/diff.js");
  return folded(diffLines(before, after)).map((each) => (each.equal ? each.equal.length : each.mark + each.text));
}"""


@pytest.fixture
def diff(idle: Served, open_page: OpenPage) -> Callable[[str, str], list[Any]]:
    page = open_page(idle.ready["sign_in"], bypass_csp=True)
    return lambda before, after: page.evaluate(f"([a, b]) => ({DIFF})([...a], [...b])", [before, after])


def test_lines_of_two_values_are_compared(diff: Callable[[str, str], list[Any]]) -> None:
    assert diff("abc", "abc") == [3]
    assert diff("abc", "abd") == [" a", " b", "-c", "+d"]
    assert diff("", "ab") == ["+a", "+b"]
    assert diff("ab", "") == ["-a", "-b"]
    assert diff("abcdefgx", "abcdefgy") == [5, " f", " g", "-x", "+y"]
    assert diff("xaby", "aXb") == ["-x", " a", "+X", " b", "-y"]
    assert diff("x1234567y", "X1234567Y") == ["-x", "+X", " 1", " 2", 3, " 6", " 7", "-y", "+Y"]
