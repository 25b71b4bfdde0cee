"""Every page, with runs of every kind: no error, no other host, accessible in both themes, and narrow enough."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.conftest import AGENTS, OpenPage, axe_findings, read_json, sideways, visit
from tests.server.conftest import Served

PARTS = ("timeline", "events", "messages", "plan", "journal")
RUNS = (
    "refund-1004", "chat-3", "report-november", "digest", "parse-prices", "payment-in-doubt", "payment-resumed",
    "trainer-1", "too-long", "cancelled-1", "edit-catalogue", "ticker-200", "import-nightly", "warehouse-2",
)  # fmt: skip
PATHS = [
    *[(name,) for name in ("runs", "approvals", "queue", "dead", "usage", "agents", "about", "no-such-page")],
    ("runs", "no-such-run"),
    ("compare", "report-november", "report-november-fork"),
]


@pytest.fixture
def idle(serve: Callable[..., Served], store: object) -> Served:
    """The store of this test without a worker, so that every run stays as it is."""
    return serve(AGENTS, "--db", store, "--no-worker")


def checked(page: object, path: tuple[str, ...], width: int) -> list[str]:
    from playwright.sync_api import Page

    assert isinstance(page, Page)
    page.set_viewport_size({"width": width, "height": 900})
    visit(page, *path)
    found = [f"{'/'.join(path)} at {width}: {each}" for each in axe_findings(page)]
    if (pixels := sideways(page)) > 0:
        found.append(f"{'/'.join(path)} at {width}: {pixels} pixels too wide")
    return found


def test_every_page_is_accessible_and_fits_a_phone(idle: Served, open_page: OpenPage, guard: object) -> None:
    from tests.browser.conftest import Guard

    assert isinstance(guard, Guard)
    guard.allow("status of 404")  # of the run that does not exist
    page = open_page(idle.ready["sign_in"])
    found = [each for path in PATHS for width in (1280, 360) for each in checked(page, path, width)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_part_of_every_run_is_accessible_and_fits_a_phone(
    idle: Served, open_page: OpenPage, part: str, each: int
) -> None:
    """Every run, each with one or two of the parts; the long form has every part of every run."""
    page = open_page(idle.ready["sign_in"])
    planned = read_json(idle, "runs?agent=orchestrator")["items"][0]["run_id"]
    found = []
    for number, run in [*enumerate((*RUNS, planned))][PARTS.index(part) % each :: each]:
        found += checked(page, ("runs", run, part), (1280, 360)[number % 2])
    assert not found, "\n".join(found)
