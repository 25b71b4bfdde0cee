"""The pages of schedules: next and last ticks, last results, and pause, resume, run now and delete."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from tests.browser.conftest import AGENTS, Guard, OpenPage, axe_findings, read_json, sideways, visit
from tests.server.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect: Any = None
NAME = "reports/<b>daily</b>"


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


@pytest.fixture
def idle(serve: Callable[..., Served], store: object) -> Served:
    return serve(AGENTS, "--db", store, "--no-worker")


def put(served: Served, id: str, **options: Any) -> None:
    with served.client() as client:
        path = f"/api/v1/schedules/{quote(id, safe='')}"
        answer = client.put(path, params=options.pop("params", {}), json={"agent": "report", **options})
        assert answer.is_success, answer.text


def confirmed(page: Page, button: str, verb: str) -> None:
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=verb).click()


def test_a_schedule_is_run_paused_resumed_and_deleted(idle: Served, open_page: OpenPage, guard: Guard) -> None:
    guard.allow("status of 404")  # of a schedule that was deleted while its page is open
    page = open_page(idle.ready["sign_in"])
    visit(page, "schedules")
    expect(page.get_by_text("There is no schedule.")).to_be_visible()
    put(idle, NAME, every=3600, input={"topic": "sales"})
    put(idle, "cron", cron="0 9 * * *", timezone="Europe/Berlin", paused=True, params={"tenant": "acme"})
    visit(page, "runs")
    visit(page, "schedules")
    table = page.get_by_role("region", name="Schedules")
    expect(table.get_by_role("row")).to_have_count(3)
    expect(table.get_by_role("row", name="cron · acme")).to_contain_text("paused")
    expect(table.get_by_role("row", name="cron · acme")).to_contain_text("0 9 * * * Europe/Berlin")
    assert axe_findings(page, "light", "dark") == []
    page.get_by_role("link", name=NAME).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(NAME)
    expect(page.get_by_role("listitem")).to_have_count(5)
    expect(page.get_by_text("The store has no run of this schedule.")).to_be_visible()
    confirmed(page, "Pause", "Pause the schedule")
    expect(page.get_by_text("They do not run while the schedule is paused.")).to_be_visible()
    confirmed(page, "Resume", "Resume the schedule")
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_visible()
    confirmed(page, "Run now", "Run the schedule now")
    expect(page.get_by_role("heading", level=1)).to_contain_text(f"schedule:{NAME}:")
    page.go_back()
    runs = page.get_by_role("region", name="Last runs")
    expect(runs.get_by_role("row")).to_have_count(2)
    expect(runs).to_contain_text("pending")
    page.set_viewport_size({"width": 360, "height": 900})
    assert axe_findings(page, "light", "dark") == []
    assert sideways(page) <= 0
    confirmed(page, "Delete", "Delete the schedule")
    expect(page.get_by_role("region", name="Schedules").get_by_role("row")).to_have_count(2)
    assert [each["id"] for each in read_json(idle, "schedules")["items"]] == ["cron"]
    page.get_by_role("link", name="cron · acme").click()
    expect(page.get_by_text("Schedule of tenant acme")).to_be_visible()
    confirmed(page, "Resume", "Resume the schedule")
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_visible()
    assert read_json(idle, "schedules/cron?tenant=acme")["paused"] is False


def test_the_last_result_of_a_schedule_is_listed(
    serve: Callable[..., Served], store: object, open_page: OpenPage
) -> None:
    served = serve(AGENTS, "--db", store)
    put(served, "soon", every=1, overlap="queue")
    page = open_page(served.ready["sign_in"])
    visit(page, "schedules")
    expect(page.get_by_role("row", name="soon").locator(".state").first).to_be_visible()


def test_a_store_that_is_only_read_shows_no_actions(
    store: Any, inspect: Callable[..., Any], serve: Callable[..., Served], open_page: OpenPage
) -> None:
    served = serve(AGENTS, "--db", store, "--no-worker")
    put(served, "daily", every=3600)
    page = open_page(inspect(store).url)
    visit(page, "schedules", "daily")
    expect(page.get_by_role("listitem")).to_have_count(5)
    for name in ("Run now", "Pause", "Delete"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
