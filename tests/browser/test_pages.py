"""Every page, with runs of every kind: no error, no other host, accessible in both themes, and narrow enough."""

from __future__ import annotations

import pytest

from tests.browser.conftest import Guard, OpenPage, Scheme, axe_findings, read_json, sideways, visit
from tests.server.conftest import Served

PARTS = ("timeline", "trace", "events", "messages", "plan", "journal")
RUNS = (
    "refund-1004", "chat-3", "report-november", "digest", "parse-prices", "payment-in-doubt", "payment-resumed",
    "trainer-1", "too-long", "cancelled-1", "edit-catalogue", "ticker-200", "import-nightly", "warehouse-2",
)  # fmt: skip
LISTS = (
    "runs",
    "dashboard",
    "approvals",
    "queue",
    "workers",
    "schedules",
    "pools",
    "dead",
    "usage",
    "agents",
    "about",
    "no-such-page",
)
PATHS = [*[(name,) for name in LISTS], ("runs", "no-such-run"), ("compare", "report-november", "report-november-fork")]


def checked(page: object, path: tuple[str, ...], width: int, *schemes: Scheme) -> list[str]:
    from playwright.sync_api import Page

    assert isinstance(page, Page)
    page.set_viewport_size({"width": width, "height": 900})
    visit(page, *path)
    found = [f"{'/'.join(path)} at {width}: {each}" for each in axe_findings(page, *schemes)]
    if (pixels := sideways(page)) > 0:
        found.append(f"{'/'.join(path)} at {width}: {pixels} pixels too wide")
    return found


@pytest.mark.parametrize(
    "widths",
    [
        pytest.param({1280: ["light"], 360: ["dark"]}, id="some"),
        pytest.param({1280: [], 360: []}, id="all", marks=pytest.mark.slow),
    ],
)
def test_every_page_is_accessible_and_fits_a_phone(
    idle: Served, open_page: OpenPage, guard: Guard, widths: dict[int, list[Scheme]]
) -> None:
    guard.allow("status of 404")  # of the run that does not exist
    page = open_page(idle.ready["sign_in"])
    found = [
        each for path in PATHS for width, schemes in widths.items() for each in checked(page, path, width, *schemes)
    ]
    assert not found, "\n".join(found)


def test_every_run_is_accessible_and_fits_a_phone(idle: Served, open_page: OpenPage) -> None:
    """Every run with one of the parts, each part with three of the runs; the long form is the next test."""
    page = open_page(idle.ready["sign_in"])
    found = []
    for number, run in enumerate(every_run(idle)):
        scheme: Scheme = "dark" if number % 3 == 0 else "light"
        found += checked(page, ("runs", run, PARTS[number % len(PARTS)]), (1280, 360)[number % 2], scheme)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_every_run_is_accessible_and_fits_a_phone(idle: Served, open_page: OpenPage, part: str) -> None:
    page = open_page(idle.ready["sign_in"])
    found = []
    for number, run in enumerate(every_run(idle)):
        found += checked(page, ("runs", run, part), (1280, 360)[number % 2])
    assert not found, "\n".join(found)


def every_run(served: Served) -> list[str]:
    return [*RUNS, read_json(served, "runs?agent=orchestrator")["items"][0]["run_id"]]
