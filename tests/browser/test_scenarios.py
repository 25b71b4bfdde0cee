"""Filters of derived states, counts of the store, an answer among those of all runs, and a store that is only read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import AGENTS, Inspected, OpenPage, axe_findings, read_json, visit
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
def idle(serve: Callable[..., Served], store: Path) -> Served:
    """The store of this test without a worker, so that every run stays as it is."""
    return serve(AGENTS, "--db", store, "--no-worker")


def rows(page: Page) -> Any:
    return page.locator("main .table-row")


def listed(page: Page, number: int) -> None:
    expect(page.locator(".listed [role=status]")).to_have_text(re.compile(rf"^{number} runs? listed$"))


def test_runs_are_filtered_by_state_and_name_and_the_url_has_the_filter(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs")
    page.get_by_label("State", exact=True).select_option("retrying")
    expect(page).to_have_url(re.compile("state=retrying"))
    expect(rows(page).filter(has_text="import-nightly")).to_have_count(1)
    page.get_by_role("button", name=re.compile("state retrying")).click()
    page.get_by_label("State", exact=True).select_option("in_doubt")
    listed(page, 1)
    expect(rows(page).filter(has_text="payment-in-doubt")).to_have_count(1)
    page.get_by_role("button", name=re.compile("state in doubt")).click()
    page.get_by_label("Run id or key begins with").fill("warehouse-")
    listed(page, 3)
    page.reload()
    listed(page, 3)
    expect(page.get_by_label("Run id or key begins with")).to_have_value("warehouse-")
    page.get_by_label("Run id or key begins with").fill("nothing-has-this-name")
    expect(page.get_by_text("No run matches these filters.")).to_be_visible()


def test_the_counts_are_those_of_the_store_and_back_leads_back(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs")
    dead = read_json(idle, "queue")["by_status"]["dead"]
    counts = page.get_by_role("group", name="Runs in the store")
    counts.get_by_role("link", name=re.compile(r"\bdead$")).click()
    listed(page, dead)
    expect(counts).to_contain_text(f"{dead} dead")
    page.go_back()
    expect(rows(page).filter(has_text="payment-killed")).to_have_count(1)


def test_an_approval_is_answered_among_those_of_all_runs(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "approvals")
    card = page.get_by_role("row").filter(has_text="discount-1002")
    card.get_by_role("button").click()
    page.get_by_role("complementary").get_by_role("button", name="Decline").click()
    page.get_by_role("dialog").get_by_role("button", name="Decline").click()
    expect(page.get_by_role("status")).to_contain_text("Answered")
    expect(card).to_have_count(0)
    open_questions = read_json(idle, "approvals")["items"]
    assert "discount-1002" not in {each["key"] for each in open_questions}


def test_a_copy_that_nobody_may_write_is_inspected_without_actions(
    inspect: Callable[..., Inspected], stored: Path, tmp_path: Path, open_page: OpenPage
) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    db = folder / "agents.db"
    db.write_bytes(stored.read_bytes())
    db.chmod(0o444)
    folder.chmod(0o555)
    try:
        page = open_page(inspect(db).url)
        expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
        expect(page.get_by_text("read-only").first).to_be_visible()
        for path in (("runs",), ("runs", "refund-1004"), ("approvals",), ("dead",), ("agents",)):
            visit(page, *path)
            words = re.compile(
                "^(Cancel|Resume|Signal|Message|Fork|Delete|Requeue|Discard|Answer|Approve|Decline|New run|Submit)"
            )
            expect(page.locator("main").get_by_role("button", name=words)).to_have_count(0)
        assert axe_findings(page) == []
        visit(page, "runs", "ticker-200", "events")
        expect(page.get_by_text("The run has finished")).to_be_visible()
        assert [each.name for each in folder.iterdir()] == ["agents.db"]
    finally:
        folder.chmod(0o755)
