"""The inspector in Chromium, on large stores. Needs Chromium, Playwright and the extra `server`.

Times of a page are those that the page itself measures: from the start of the navigation to the second frame that has a
row, and between two frames while the wheel turns. Nothing else uses the machine but the server and Chromium, which
takes a core by itself. The heap is measured after a garbage collection.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .floor import Line, Size, in_turns

ROOT = Path(__file__).parents[1]
PAINTED = 500.0  # milliseconds until rows are on the screen
FRAME = 50.0  # milliseconds between two frames while scrolling
HEAP = 64.0  # MB
FIRST_ANSWER = 400.0  # milliseconds of `inspect`
DASHBOARD = 1000.0  # milliseconds
COST = 3.0  # percent of a core that a server needs for an open page
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
WHEEL = 60
TURNS = 300.0  # pixels for one turn of the wheel
#: Remembers when the first row was painted, and the longest time between two frames since `frames` was emptied.
RECORDER = """
window.frames_ = [];
let before = 0;
const frame = (now) => {
  if (before) window.frames_.push(now - before);
  before = now;
  if (!window.painted_ && document.querySelector(".table-row, .tl-row, .log-row")) {
    requestAnimationFrame(() => { window.painted_ ||= performance.now(); });
  }
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""
# A string that is evaluated inside the page, as `wait_for_function` does it, is against the policy of the page.
UNTIL_PAINTED = """new Promise((done) => {
  const look = () => (window.painted_ ? done(window.painted_) : requestAnimationFrame(look));
  look();
})"""


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def missing() -> list[str]:
    """What is not installed here."""
    absent = [name for name in ("playwright", "fastapi", "uvicorn") if find_spec(name) is None]
    return absent if chromium() else [*absent, "chromium"]


@contextmanager
def command(*arguments: object) -> Iterator[str]:
    """A process of `agent-runtime`; the URL that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agent_runtime_core", *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = None
        while url is None and (line := process.stdout.readline()):
            url = re.search(r"http://[^\s\"]+", line)
        assert url is not None, process.wait()
        yield url[0].rstrip("/")
    finally:
        process.kill()
        process.communicate()


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        try:
            yield started
        finally:
            started.close()


def look(started: Any, url: str, fragment: str, rounds: int) -> tuple[float, float, float]:
    """Milliseconds until rows were painted, the longest frame while scrolling, and MB of the heap."""
    painted, longest, heap = [], [], []
    for _ in range(rounds):
        page = started.new_page(viewport={"width": 1280, "height": 900})
        page.add_init_script(RECORDER)
        page.goto(f"{url}/#/{fragment}")
        painted.append(page.evaluate(UNTIL_PAINTED))
        page.mouse.move(700, 600)
        page.evaluate("window.frames_.length = 0")
        for _ in range(WHEEL):
            page.mouse.wheel(0, TURNS)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        longest.append(page.evaluate("Math.max(...window.frames_)"))
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        heap.append(session.send("Runtime.getHeapUsage")["usedSize"] / 2**20)
        page.close()
    return statistics.median(painted), statistics.median(longest), max(heap)


def rows(size: Size) -> Iterator[Line]:
    """Lists of runs, a run with many events, the start of `inspect`, and what an open page costs a worker."""
    rounds = size.rounds(3)
    for count in (size.of(10_000, 100), size.of(1_000_000, 200)):
        with size.file() as db, browser() as started:
            in_process("runs", db, count)
            with command("inspect", db, "--port", 0) as url:
                yield from lines(f"Runs with {count:,} runs", look(started, url, "runs", rounds))
                yield dashboard(started, url, count, rounds)
    with size.file() as db, browser() as started:
        count = size.of(20_000, 200)
        in_process("events", db, count)
        with command("inspect", db, "--port", 0) as url:
            for part in ("events", "timeline"):
                yield from lines(
                    f"{part} of a run of {count:,} events", look(started, url, f"runs/ticker-{count}/{part}", rounds)
                )
    yield first_answer(size)
    yield from open_page(size)


def dashboard(started: Any, url: str, count: int, rounds: int) -> Line:
    """From the start of the navigation until the charts of the last hour are on the screen."""
    times = []
    for _ in range(rounds):
        page = started.new_page(viewport={"width": 1280, "height": 900})
        since = time.perf_counter()
        page.goto(f"{url}/#/dashboard")
        page.wait_for_selector("svg.chart")
        times.append(1000 * (time.perf_counter() - since))
        page.close()
    return Line(f"dashboard with {count:,} runs", statistics.median(times), "ms", most=DASHBOARD)


def lines(what: str, found: tuple[float, float, float]) -> Iterator[Line]:
    painted, longest, heap = found
    yield Line(f"{what}: rows painted", painted, "ms", most=PAINTED)
    yield Line(f"{what}: longest frame while scrolling", longest, "ms", most=FRAME)
    yield Line(f"{what}: heap", heap, "MB", most=HEAP)


def first_answer(size: Size) -> Line:
    """From the start of the process to its first list of runs, beside the same for a small file."""
    with size.file() as db, size.file() as small:
        in_process("runs", db, size.of(1_000_000, 100))
        in_process("runs", small, 100)

        def start(file: Path) -> float:
            since = time.perf_counter()
            with command("inspect", file, "--port", 0) as url:
                client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
                with contextlib.closing(client):
                    client.request("GET", "/api/v1/runs?limit=50")
                    assert client.getresponse().status == 200
                return time.perf_counter() - since

        ours, least = (1000 * each for each in in_turns(size.rounds(5), partial(start, db), partial(start, small)))
        note = f"{db.stat().st_size / 2**20:.0f} MB; beside a file of 100 runs"
        return Line("inspect: start to first list", ours, "ms", beside=least, most=FIRST_ANSWER, note=note)


def open_page(size: Size) -> Iterator[Line]:
    """The processor time that a server needs for an open page. A worker in the same process has so much less."""
    with size.file() as db, browser() as started:
        count, seconds = size.of(100_000, 200), size.of(20, 1)
        in_process("runs", db, count)
        pages = (None, "runs", f"runs/{first_run(db, 'waiting')}")
        used = in_turns(size.rounds(3), *(partial(processor_time, started, db, each, seconds) for each in pages))
    for what, ours in zip((f"Runs with {count:,} runs", "a run that waits"), used[1:], strict=True):
        yield Line(f"open page: {what}", 100 * max(ours - used[0], 0.0) / seconds, "% of a core", most=COST)


def processor_time(started: Any, db: Path, fragment: str | None, seconds: float) -> float:
    """Seconds of the processor that a server has used from its start on, with a page open for some seconds."""
    import resource  # not on Windows

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with command("serve", "--db", db, "--port", 0, "--no-auth", "--no-worker", "--log-level", "warning") as url:
        page = started.new_page()
        if fragment is not None:
            page.goto(f"{url}/#/{fragment}")
            page.wait_for_selector("h1")
        page.wait_for_timeout(1000 * seconds)
        page.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # of children that have ended, so not of Chromium
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_run(db: Path, status: str) -> str:
    with contextlib.closing(sqlite3.connect(db)) as connection:
        (found,) = connection.execute("SELECT run_id FROM arc_runs WHERE status = ? LIMIT 1", (status,)).fetchone()
    return str(found)


def in_process(what: str, db: Path, count: int) -> None:
    """Do it in a process of its own: this one has the event loop of Playwright."""
    arguments = [sys.executable, "-m", "benchmarks.inspector", what, str(db), str(count)]
    subprocess.run(arguments, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main(what: str, db: str, count: str) -> None:
    from tests.support.inspector_data import many_events, many_runs

    work = many_runs(Path(db), int(count), time.time()) if what == "runs" else many_events(Path(db), int(count))
    asyncio.run(work)


if __name__ == "__main__":
    main(*sys.argv[1:])
