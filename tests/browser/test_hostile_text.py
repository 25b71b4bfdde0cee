"""Hostile texts in every field: pages show them, and no text becomes markup, a request, a dialog or a style."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from tests.browser.conftest import OpenPage, copied, visit
from tests.server.conftest import Served
from tests.support.hostile_store import harmless
from tests.support.hostile_texts import STORABLE
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Page

TABS = ("timeline", "trace", "events", "messages", "plan", "journal")
LISTS = (
    "runs",
    "dashboard",
    "approvals",
    "queue",
    "workers",
    "schedules",
    "pools",
    "dead?state=failed",
    "usage",
    "agents",
    "about",
)
#: High enough that windowed lists have all of their rows in the document: of all runs, and of a run with one text.
#: Chromium paints all of it, which takes the most time of these tests.
TALL, LOW = 15_000, 3_000
NAMES = """() => {
  const found = new Set();
  for (const element of document.querySelectorAll("*:not(.loading)")) {
    found.add(element.localName);
    for (const { name } of element.attributes) found.add(`${element.localName}[${name}]`);
  }
  return [...found];
}"""


@pytest.fixture(scope="module")
def stores(playwright: object, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two stores with the same runs: one with hostile texts, one with plain texts."""
    folder = tmp_path_factory.mktemp("hostile")
    made = {"hostile": folder / "hostile.db", "harmless": folder / "harmless.db"}
    for kind, db in made.items():
        more = ["--harmless"] if kind == "harmless" else []
        command = [sys.executable, "-m", "tests.support.hostile_store", str(db), *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def pages(
    request: pytest.FixtureRequest, stores: dict[str, Path], serve: Callable[..., Served], open_page: OpenPage,
    tmp_path: Path,
) -> Iterator[dict[str, Page]]:  # fmt: skip
    """A page on each of the two stores, of a height that a test may choose."""
    found = {}
    for kind, db in stores.items():
        copy = copied(db, tmp_path / f"{kind}.db")
        served = serve("--db", copy, "--no-worker")
        found[kind] = open_page(served.ready["sign_in"], height=getattr(request, "param", TALL))
    yield found
    assert not [each for each in map(polluted, found.values()) if each]


def polluted(page: Page) -> bool:
    return bool(page.evaluate("() => 'polluted' in {} || document.querySelectorAll('.foreign').length > 0"))


def names_on(page: Page, paths: Iterable[tuple[str, ...]]) -> dict[str, set[str]]:
    found = {}
    for path in paths:
        visit(page, *path)
        opened(page)
        found["/".join(path)] = set(page.evaluate(NAMES))
        assert not polluted(page), path
    return found


def opened(page: Page) -> None:
    """Open what is folded: details, and the first rows of each kind."""
    page.evaluate("() => document.querySelectorAll('main details').forEach((each) => { each.open = true; })")


#: What the Markdown of a message becomes. test_follow.py checks that it becomes nothing else.
MARKDOWN = frozenset(
    [
        "em",
        "del",
        "blockquote",
        "hr",
        "ul",
        "ol",
        "li",
        "li[value]",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "th[scope]",
        "strong",
    ]
)


def foreign(found: dict[str, set[str]], known: dict[str, set[str]]) -> dict[str, set[str]]:
    every = set().union(*known.values())
    new = {path: names - every - (MARKDOWN if "/messages" in path else set()) for path, names in found.items()}
    return {path: names for path, names in new.items() if names}


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([("wide", "events"), ("planned", "plan")], id="some"),
        pytest.param([(run, tab) for run in ("wide", "planned") for tab in TABS], id="all", marks=pytest.mark.slow),
    ],
)
def test_lists_and_the_parts_of_a_run_with_all_of_the_texts(
    pages: dict[str, Page], parts: list[tuple[str, str]]
) -> None:
    """The other parts show each text too, one at a time, in the next test."""
    paths: list[tuple[str, ...]] = [(name,) for name in LISTS]
    paths += [("runs", *part) for part in parts]
    paths += [("compare", "wide", "planned")]
    known, found = (names_on(pages[kind], paths) for kind in ("harmless", "hostile"))
    assert foreign(found, known) == {}
    text = "<img src=x onerror=alert(1)>"
    visit(pages["hostile"], "runs")
    assert text in pages["hostile"].locator("main").inner_text()
    visit(pages["hostile"], "runs", "wide", "events")
    assert text in pages["hostile"].locator("main").inner_text()


@pytest.mark.parametrize("pages", [LOW], indirect=True)
@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_the_page_of_a_run_with_the_text_in_every_field(each: int, pages: dict[str, Page]) -> None:
    """The head, the question with its form, and one part after the other, for each seventh text or for all."""
    known: dict[str, set[str]] = {}
    plain = harmless(STORABLE)
    for number, tab in enumerate(TABS):
        known |= names_on(pages["harmless"], [("runs", name, tab) for name in (plain[number], f"2 {plain[number]}")])
    found: dict[str, set[str]] = {}
    page = pages["hostile"]
    for number, text in [*enumerate(STORABLE)][::each]:
        name = text if number % 2 else f"2 {text}"
        part = TABS[number // 2 % len(TABS)]
        found |= names_on(page, [("runs", ids(page)[name], part)])
        assert page.locator("h1").evaluate("element => element.textContent") == name
    assert foreign(found, known) == {}


_IDS: dict[int, dict[str, str]] = {}


def ids(page: Page) -> dict[str, str]:
    """The run ids by key. Some keys, such as "..", are no path."""
    if id(page) not in _IDS:
        runs: list[Any] = []
        cursor = ""
        while True:
            path = f"/api/v1/runs?limit=200{cursor}"
            answer = page.evaluate("path => fetch(path).then((answer) => answer.json())", path)
            runs += answer["items"]
            if answer["next"] is None:
                break
            cursor = f"&cursor={quote(answer['next'])}"
        _IDS[id(page)] = {each["key"]: each["run_id"] for each in runs}
    return _IDS[id(page)]
