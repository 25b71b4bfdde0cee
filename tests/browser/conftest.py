"""A real Chromium that reaches no other host, real servers, and what must not happen on any page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import HAS_SERVER, TOKEN, Served
from tests.support.processes import PATIENCE, ROOT, Command

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Playwright

HERE = Path(__file__).parent
AGENTS = "tests.support.inspector_agents:agents"
#: Nothing is resolved or fetched by Chromium itself, and every test has the same fonts and rendering.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
ONLY_LOOPBACK = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
#: What Playwright waits at most, in milliseconds. Only what never happens takes that long.
CEILING = 1000 * PATIENCE
#: Reported by Chromium, in addition to the console, for what the content security policy has stopped.
REPORT_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`CSP: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""
#: Counts the requests of a page that have no answer yet, but for those that wait for something to happen.
COUNT_REQUESTS = """
{
  const { fetch } = window;
  window.pendingRequests = 0;
  window.fetch = (url, options) => {
    const counts = !/[?&]wait=/.test(url);
    if (counts) pendingRequests += 1;
    return fetch(url, options).finally(() => { if (counts) pendingRequests -= 1; });
  };
}"""
SETTLED = """() => new Promise((done) => {
  let quiet = 0;
  const look = () => {
    quiet = window.pendingRequests ? 0 : quiet + 1;
    if (quiet > 3) done();
    else requestAnimationFrame(look);
  };
  look();
})"""
T = TypeVar("T")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all of them in one process, with one Chromium."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.xdist_group("browser"))


def chromium_path() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def missing() -> str | None:
    """What is not installed here."""
    if not HAS_SERVER:
        return "the extra server and httpx"
    if not all(map(find_spec, ("playwright", "axe_playwright_python"))):
        return "playwright and axe-playwright-python"
    return None if chromium_path() else "Chromium (apt-get install chromium, or CHROMIUM=path)"


def in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. This thread has the loop of Playwright."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    """Playwright, stopped at the end of the package: until then no test of this thread may have a loop."""
    if (what := missing()) is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"needs {what}")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=CEILING)
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="package")
def chromium(playwright: Playwright) -> Iterator[Browser]:
    with contextlib.closing(launched(playwright)) as browser:
        yield browser


def launched(playwright: Playwright, resolver_rules: str = ONLY_LOOPBACK) -> Browser:
    flags = [*FLAGS, f"--host-resolver-rules={resolver_rules}"]
    return playwright.chromium.launch(executable_path=chromium_path(), args=flags)


@dataclass
class Guard:
    """What no page may do. A response that a test asks for, such as a 409, is `allowed` by its message."""

    found: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    def allow(self, pattern: str) -> None:
        self.patterns.append(pattern)

    def watch(self, context: BrowserContext, host: str) -> None:
        context.add_init_script(REPORT_VIOLATIONS)
        context.add_init_script(COUNT_REQUESTS)

        def request(route: Any) -> None:
            url = urlsplit(route.request.url)
            if url.scheme in ("data", "blob", "file") or url.netloc == host:
                route.continue_()
            else:
                self.found.append(f"request to another host: {route.request.url}")
                route.abort()

        def dialog(shown: Any) -> None:
            self.found.append(f"dialog: {shown.message}")
            shown.dismiss()

        context.route("**/*", request)

        def console(said: Any) -> None:
            if said.type in ("error", "warning"):
                self.found.append(said.text)

        context.on("console", console)
        context.on("weberror", lambda error: self.found.append(f"page error: {error.error}"))
        context.on("dialog", dialog)

    @property
    def problems(self) -> list[str]:
        return [each for each in self.found if not any(re.search(pattern, each) for pattern in self.patterns)]


@pytest.fixture
def guard() -> Iterator[Guard]:
    """Ends the test with a failure if a page logged an error, opened a dialog or sent a request to another host."""
    guard = Guard()
    yield guard
    assert not guard.problems


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(chromium: Browser, guard: Guard) -> Iterator[OpenPage]:
    """`open_page(url, width=1280, dark=False)`: the page in a context of its own, without any cookie."""
    with contextlib.ExitStack() as contexts:

        def opened(url: str, *, width: int = 1280, height: int = 900, dark: bool = False, **options: Any) -> Page:
            context = chromium.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light",
                reduced_motion="reduce",
                locale="en-US", timezone_id="UTC", **options,
            )  # fmt: skip
            contexts.callback(context.close)
            context.set_default_timeout(CEILING)
            guard.watch(context, urlsplit(url).netloc)
            page = context.new_page()
            page.goto(url)
            # The code leaves the URL when it is sent, so that another page may be opened then.
            page.wait_for_url(lambda now: "#code=" not in now)
            return page

        yield opened


@pytest.fixture(scope="package")
def stored(playwright: Playwright) -> Iterator[Path]:
    """A store with runs of every kind. Nobody writes to it: tests have their copies."""
    with tempfile.TemporaryDirectory(prefix="browser-") as name:
        db = Path(name, "stored.db")
        made("--runs", 300, db=db)
        yield db


def made(*options: object, db: Path) -> None:
    command = [sys.executable, "-m", "tests.support.inspector_data", str(db), *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def store(stored: Path, tmp_path: Path) -> Path:
    """A copy of that store, for this test."""
    return copied(stored, tmp_path / "agents.db")


def copied(source: Path, target: Path) -> Path:
    for suffix in ("", "-wal"):
        if (part := Path(f"{source}{suffix}")).exists():
            shutil.copyfile(part, f"{target}{suffix}")
    return target


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """`serve(*arguments)`: a process of `agent-runtime serve` with `TOKEN`, until the end of the test."""
    with contextlib.ExitStack() as processes:

        def start(*args: object, token: str = TOKEN) -> Served:
            return processes.enter_context(Served("--token", token, "--log-level", "warning", *args))

        yield start


@pytest.fixture
def served(serve: Callable[..., Served], store: Path) -> Served:
    """The store of this test, with a worker for its agents."""
    return serve(AGENTS, "--db", store)


@pytest.fixture
def idle(serve: Callable[..., Served], store: Path) -> Served:
    """The store of this test without a worker: runs only change when a test changes them."""
    return serve(AGENTS, "--db", store, "--no-worker")


class Inspected(Command):
    """`agent-runtime inspect` of a file; `url` is what it prints."""

    def __init__(self, *args: object) -> None:
        super().__init__("agent_runtime_core", "inspect", "--port", "0", *args)
        self.url = ""

    def __enter__(self) -> Inspected:
        try:
            line = self.line()
            found = re.search(r"http://[^\s\"]+", line)
            assert found, line
            self.url = found[0].rstrip("/")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self


@pytest.fixture
def inspect() -> Iterator[Callable[..., Inspected]]:
    """`inspect(file)`: a process of `agent-runtime inspect`, until the end of the test."""
    with contextlib.ExitStack() as processes:
        yield lambda *args: processes.enter_context(Inspected(*args))


Scheme = Literal["light", "dark"]


def axe_findings(page: Page, *schemes: Scheme) -> list[str]:
    """What axe-core finds of serious or critical impact in these themes, or in both."""
    from axe_playwright_python.sync_playwright import Axe

    found = []
    for scheme in schemes or get_args(Scheme):
        page.emulate_media(color_scheme=scheme)
        results = Axe().run(page)
        for each in results.response["violations"]:
            if each["impact"] in ("serious", "critical"):
                nodes = "; ".join(node["html"][:200] for node in each["nodes"][:3])
                found.append(f"{scheme}: {each['id']}: {each['help']}: {nodes}")
    return found


def read_json(served: Served, path: str) -> Any:
    with served.client() as client:
        answer = client.get(f"/api/v1/{path}")
        assert answer.status_code == 200, answer.text
        return json.loads(answer.text)


def visit(page: Page, *path: str) -> None:
    """Go to a page of the application that is open, and wait until it has its data."""
    from playwright.sync_api import expect

    page.goto(f"{page.url.partition('#')[0]}#/{'/'.join(path)}")
    expect(page.locator("main")).to_be_visible()
    expect(page.locator("main .loading", has_text="Loading…")).to_have_count(0)
    page.evaluate(SETTLED)  # a few frames without a request: everything that was read is shown


def sideways(page: Page) -> int:
    """How many pixels the page can be scrolled to the side."""
    pixels: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return pixels
