"""Runs are found on their page: by any text, by filters, sorted, and with the reason why they are where they are."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines.base import Op
from agent_runtime_core.queue import RunRow
from tests.browser.conftest import AGENTS, OpenPage, axe_findings, in_thread, sideways
from tests.server.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect: Any = None
MIDNIGHT = dt.datetime.now(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
MOST_ACTIONS = 4


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


async def _stored(db: Path) -> None:
    """Runs of yesterday and of today, besides those of the store."""
    now = dt.datetime.now(dt.UTC).timestamp()
    rows = [
        _row(number, "quick", MIDNIGHT - 3600 - number, seconds=5.0 + number, error=None) for number in range(1, 30)
    ]
    rows += [
        _row(100, "slowest-of-yesterday", MIDNIGHT - 40_000, seconds=30_000.0),
        _row(101, "slower-of-today", now - 40, seconds=1.0),
        _row(102, "slower-before", MIDNIGHT - 3 * 86_400, seconds=80_000.0),
        _row(
            103,
            "lost-link",
            now - 600,
            seconds=2.0,
            error={"type": "PrinterError", "message": "the peer answered: Connection reset by printer"},
        ),
        _row(104, "tagged", now - 60, metadata={"customer": "acme", "agent-runtime.tags": ["nightly"]}, failures=2),
        _row(105, "old-link", now - 90_000, error={"type": "PrinterError", "message": "connection reset by printer"}),
    ]
    async with AgentRunner.open(db) as runner:
        for row in rows:
            await runner.queue.commits.commit(None, [Op("queue.insert", (row,))])
        await runner.submit("nobody", run_id="without-worker")


async def _index(db: Path) -> None:
    async with AgentRunner.open(db) as runner:
        await runner.search_index.build()


def _row(
    number: int,
    name: str,
    at: float,
    *,
    seconds: float = 1.0,
    error: Any = None,
    metadata: Any = None,
    failures: int = 0,
) -> RunRow:
    return RunRow(
        f"0000000{number % 10}-0000-4000-8000-{number:012}",
        "import",
        metadata=json.dumps(metadata or {}),
        run_key=f"{name}-{number}",
        created_at=at,
        updated_at=at + seconds,
        started_at=at,
        ended_at=at + seconds,
        status="failed" if error else "succeeded",
        error=json.dumps(error) if error else None,
        failures=failures,
    )


@pytest.fixture
def runs(serve: Callable[..., Served], store: Path, open_page: OpenPage) -> Page:
    in_thread(_stored(store))
    page = open_page(serve(AGENTS, "--db", store, "--no-worker").ready["sign_in"])
    expect(rows(page).first).to_be_visible()
    return page


def rows(page: Page) -> Any:
    return page.locator(".table-row")


def names(page: Page) -> list[str]:
    found: list[str] = page.locator(".row-link").all_inner_texts()
    return found


class Operator:
    """A person who must find something with few actions: a click, a text that is typed, a key, a choice."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.actions = 0

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        assert failed or self.actions <= MOST_ACTIONS

    def click(self, what: Any) -> None:
        self.actions += 1
        what.click()

    def type(self, text: str) -> None:
        self.actions += 1
        self.page.keyboard.type(text)

    def press(self, key: str) -> None:
        self.actions += 1
        self.page.keyboard.press(key)

    def choose(self, label: str, option: str) -> None:
        self.actions += 1
        self.page.get_by_role("combobox", name=label, exact=True).select_option(label=option)


# -- tasks of an operator


def test_the_run_with_connection_reset_in_its_error(runs: Page, store: Path) -> None:
    with Operator(runs) as operator:
        operator.press("/")
        operator.type("connection reset by printer")
        operator.press("Enter")
        expect(rows(runs)).to_have_count(1)
    assert names(runs) == ["lost-link-103"]
    expect(rows(runs)).to_contain_text("PrinterError: the peer answered: Connection reset by printer")
    expect(runs.locator(".listed")).to_contain_text("Only runs since")
    in_thread(_index(store))
    runs.reload()
    expect(rows(runs)).to_have_count(2)
    expect(runs.locator(".listed")).not_to_contain_text("Only runs since")
    assert runs.url.endswith("#/runs?search=connection+reset+by+printer")


def test_the_slowest_run_of_yesterday(runs: Page) -> None:
    with Operator(runs) as operator:
        operator.choose("Created", "Yesterday")
        operator.click(runs.get_by_role("button", name="Duration"))
        expect(rows(runs).first).to_contain_text("slowest-of-yesterday")
    assert names(runs)[0] == "slowest-of-yesterday-100"
    expect(runs.get_by_role("columnheader", name="Duration")).to_have_attribute("aria-sort", "descending")
    assert "sort=duration" in runs.url


def test_why_a_run_does_not_start(runs: Page) -> None:
    for run, why in (
        ("warehouse-2", "blocked by run warehouse-1 (order, waiting) of concurrency key 'warehouse:zurich'"),
        ("without-worker", "no living worker executes agent 'nobody'"),
    ):
        with Operator(runs) as operator:
            operator.click(runs.get_by_role("searchbox"))
            operator.press("Control+a")
            operator.type(run)
            expect(rows(runs)).to_have_count(1)
            expect(rows(runs).locator(".why")).to_contain_text(why)


# -- the parts of the page


def test_a_reason_leads_to_the_run_that_it_names(runs: Page) -> None:
    runs.goto(f"{runs.url.partition('#')[0]}#/runs?q=warehouse-3")
    rows(runs).locator(".why a").click()
    expect(runs.get_by_role("heading", name="warehouse-1")).to_be_visible()


def test_reasons_name_questions_times_errors_and_sources(runs: Page) -> None:
    home = runs.url.partition("#")[0]
    for run, why in (
        ("refund-1004", "waits for the answer to 'refund'"),
        ("later-1", "due in "),
        ("payment-in-doubt", "waits for the review of step 'charge'"),
        ("import-nightly", "last error: "),
        ("report-november-fork", "fork of run report-november (report, succeeded)"),
        ("lost-link", "PrinterError: "),
    ):
        runs.goto(f"{home}#/runs?q={run}")
        expect(rows(runs).locator(".why").first).to_contain_text(why)


def test_filters_of_contents_are_in_the_url(runs: Page) -> None:
    runs.get_by_text("More filters").click()
    runs.get_by_label("Tag", exact=True).fill("nightly")
    runs.get_by_label("Tag", exact=True).press("Enter")
    expect(rows(runs)).to_have_count(1)
    runs.get_by_label("Metadata", exact=True).fill("customer=acme")
    runs.get_by_label("Metadata", exact=True).press("Enter")
    runs.get_by_label("Attempts, at least").fill("3")
    runs.get_by_label("Attempts, at least").press("Enter")
    expect(runs.get_by_role("button", name="attempts ≥ 3")).to_be_visible()
    expect(rows(runs)).to_have_count(1)
    assert names(runs) == ["tagged-104"]
    assert runs.url.endswith("#/runs?metadata=customer%3Dacme&tag=nightly&min_attempts=3")
    runs.reload()
    expect(rows(runs)).to_have_count(1)
    runs.get_by_role("button", name="tag nightly").click()
    runs.get_by_role("button", name="metadata customer=acme").click()
    expect(runs.get_by_role("button", name="tag nightly")).to_have_count(0)
    runs.get_by_text("More filters").click()
    runs.get_by_label("Error type").fill("PrinterError")
    runs.get_by_label("Error type").press("Enter")
    expect(runs.get_by_text("No run matches these filters.")).to_be_visible()
    runs.get_by_role("button", name="attempts ≥ 3").click()
    expect(rows(runs)).to_have_count(2)


def test_a_key_that_no_run_has_can_be_searched_in_the_contents(runs: Page) -> None:
    runs.keyboard.press("/")
    runs.keyboard.type("answered: connection")
    runs.get_by_role("button", name="Search the contents of runs").click()
    expect(rows(runs)).to_have_count(1)
    expect(runs.get_by_role("searchbox")).to_have_value("answered: connection")
    runs.get_by_role("searchbox").fill("")
    expect(rows(runs).nth(10)).to_be_visible()


def test_columns_can_be_chosen_and_shared(runs: Page) -> None:
    runs.get_by_text("Columns").click()
    runs.get_by_role("checkbox", name="Tags").check()
    runs.get_by_role("checkbox", name="Tokens").uncheck()
    heads = ["State", "Run", "Age", "Duration", "Attempt", "Cost", "Tags"]
    expect(runs.locator(".table-head > [role=columnheader]:not(.cell-check)")).to_have_text(heads)
    expect(rows(runs).filter(has_text="tagged-104").locator(".cell-more")).to_have_text("nightly")
    assert "columns=age%2Cduration%2Cattempt%2Ccost%2Ctags" in runs.url
    runs.reload()
    expect(runs.locator(".table-head > [role=columnheader]:not(.cell-check)")).to_have_text(heads)
    runs.get_by_role("button", name="Cost").click()
    expect(runs.get_by_role("columnheader", name="Tags")).to_be_visible()
    assert "sort=cost" in runs.url
    assert "columns=" in runs.url


@pytest.mark.parametrize("width", [360, 1280])
def test_the_list_with_all_its_parts_is_accessible(runs: Page, width: int) -> None:
    runs.set_viewport_size({"width": width, "height": 900})
    runs.goto(f"{runs.url.partition('#')[0]}#/runs?sort=duration&tag=nightly&columns=age,tags,worker")
    runs.get_by_text("More filters").click()
    runs.get_by_text("Columns").click()
    expect(rows(runs)).to_have_count(1)
    assert sideways(runs) <= 0
    assert axe_findings(runs) == []
