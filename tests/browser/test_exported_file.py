"""An exported file in Chromium, from disk: every part shows, nothing is requested, and no text is more than text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core.inspector import run_html
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig
from tests.browser.conftest import OpenPage, axe_findings, in_thread, sideways, visit
from tests.support.command_line import process
from tests.support.hostile_texts import GROUPS, HOSTILE_TEXTS, STORABLE
from tests.support.runs import Script

if TYPE_CHECKING:
    from playwright.sync_api import Page

PARTS = ("timeline", "trace", "events", "messages", "plan", "journal")
RUNS = ("refund-1004", "report-november")


def exported(store: Path, run: str, *options: str) -> Path:
    file = store.with_name(f"{run}{''.join(options)}.html")
    done = process("export", run, "--html", *options, "--output", str(file), "--url", str(store), cwd=store.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return file


class Disk:
    """Opens files from disk. Of all that a page may request, it records what is not the file itself."""

    def __init__(self, open_page: OpenPage) -> None:
        self._open = open_page
        self.requests: list[str] = []

    def open(self, file: Path, **options: Any) -> Page:
        from playwright.sync_api import expect

        # The first page is empty, so that the requests of the second one are seen from the beginning.
        page = self._open("about:blank", **options)
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())
        expect(page.locator("h1")).to_be_visible()
        self.requests = [each for each in self.requests if each != file.as_uri() and not each.startswith("data:")]
        return page


@pytest.fixture
def disk(open_page: OpenPage) -> Disk:
    return Disk(open_page)


@pytest.mark.parametrize("options", [(), ("--redact",)], ids=["whole", "redacted"])
def test_every_part_of_a_file_shows_and_nothing_is_requested(store: Path, disk: Disk, options: tuple[str, ...]) -> None:
    from playwright.sync_api import expect

    found, opened = [], set()
    for number, run in enumerate(RUNS):
        page = disk.open(exported(store, run, *options), width=(1280, 360)[number % 2])
        run_page = page.url
        expect(page.locator(".exported-note")).to_contain_text("as of")
        assert page.locator(".exported-note", has_text="left out").count() == len(options)
        tabs = page.get_by_role("navigation", name="Parts of the run").get_by_role("link")
        for place, part in enumerate(tabs.all_inner_texts()):
            opened.add(part.lower())
            tabs.get_by_text(part, exact=True).click()
            expect(page.locator("main .loading", has_text="Loading…")).to_have_count(0)
            expect(page.locator(".failed")).to_have_count(0)
            # A redacted file has the same elements, and a part of one run those of most other runs.
            if not options and (number + place) % 3 == 0:
                found += [f"{run} {part}: {each}" for each in axe_findings(page)]
            if (pixels := sideways(page)) > 0:
                found.append(f"{run} {part}: {pixels} pixels too wide")
        assert page.url.partition("#")[0] == run_page.partition("#")[0]
        page.context.close()
    assert not found, "\n".join(found)
    assert opened == {*PARTS}
    assert disk.requests == []


def test_a_step_shows_its_contents_and_a_child_run_its_page(store: Path, disk: Disk) -> None:
    from playwright.sync_api import expect

    page = disk.open(exported(store, "edit-catalogue"))
    page.locator("[data-row]", has_text="draft").first.click()
    expect(page.get_by_text("Lamps for the winter").first).to_be_visible()
    child = page.evaluate(
        """() => JSON.parse(document.getElementById("exported-data").textContent)[
             Object.keys(JSON.parse(document.getElementById("exported-data").textContent))
               .find((path) => /^runs.[^/]+$/.test(path))].children[0].run_id"""
    )
    visit(page, "runs", child)
    expect(page.locator("main")).to_contain_text("translator")
    # There is no list of runs in a file: its links lead to the run.
    visit(page, "runs")
    expect(page.locator("h1")).to_contain_text("edit-catalogue")
    assert disk.requests == []


# -- hostile texts


def hostile_run(place: Path) -> None:
    """Write a run that has each of the texts in each of its fields, and its files."""

    async def body(ctx: Any) -> Any:
        for text in HOSTILE_TEXTS:
            await ctx.emit("hostile.text", {"text": text, text: [text]})
        for text in STORABLE:
            await ctx.step(text[:200], lambda text=text: {"text": text, text: [text]}, key=text)
        await ctx.checkpoint({"texts": list(HOSTILE_TEXTS)})
        await fails(ctx)

    async def fails(ctx: Any) -> None:
        await ctx.step("fails", fail)

    def fail() -> None:
        raise ValueError("\n".join(HOSTILE_TEXTS))

    async def written() -> None:
        config = RunnerConfig(max_retries=1, park_after=0)
        async with AgentRunner.open(str(place.with_suffix(".db")), config=config, registry=Registry()) as runner:
            for name in GROUPS:
                key = "".join(text for text in STORABLE if text in GROUPS[name])[:200]
                agent = Script(body if name == "elements" else fails, key[:100])
                runner.registry.register(agent)
                messages = [{"role": "user", "content": text} for text in HOSTILE_TEXTS]
                metadata = {text: text for text in HOSTILE_TEXTS}
                await runner.submit(agent.key, {"messages": messages}, run_id=key, metadata=metadata)
                await runner.run_once()
                place.with_name(f"{name}.html").write_text(await run_html(runner, key), "utf-8", newline="\n")

    in_thread(written())


FOREIGN = """() => [...document.querySelectorAll(
  ".foreign, [onerror], [onload], iframe, object, embed, base, link[rel=stylesheet], main script")]
  .map((each) => each.outerHTML)"""
TO_NEXT_ROWS = """async () => {
  const before = scrollY;
  scrollBy(0, innerHeight);
  await new Promise((painted) => requestAnimationFrame(() => requestAnimationFrame(painted)));
  return scrollY > before;
}"""


def test_hostile_texts_are_only_text(tmp_path: Path, disk: Disk) -> None:
    from playwright.sync_api import expect

    hostile_run(tmp_path / "hostile")
    for name in GROUPS:
        page = disk.open(tmp_path / f"{name}.html", height=2_000)
        # Only the keys and the agents of the runs differ.
        for part in PARTS if name == "elements" else PARTS[:1]:
            parts = page.get_by_role("navigation", name="Parts of the run")
            link = parts.get_by_role("link", name=part.capitalize(), exact=True)
            if part == "plan":
                expect(link).to_have_count(0)
                continue
            link.click()
            expect(link).to_have_attribute("aria-current", "page")
            expect(page.locator("main .loading", has_text="Loading…")).to_have_count(0)
            if part == "timeline":  # the long error of some runs moves the list below the window
                expect(page.locator("[data-row]").first).to_be_visible()
            for row in page.locator("[data-row]").all()[:3]:
                row.click()
            assert page.evaluate(FOREIGN) == [], (name, part)
            while name == "elements" and page.evaluate(TO_NEXT_ROWS):
                assert page.evaluate(FOREIGN) == [], part
        assert page.locator("script").count() == 2
        page.context.close()
    assert disk.requests == []


def test_contents_that_cannot_be_decrypted_are_marked(tmp_path: Path, disk: Disk) -> None:
    from playwright.sync_api import expect

    from agent_runtime_core.config import configure, reset_config
    from agent_runtime_core.encryption import AESGCMCodec

    async def body(ctx: Any) -> Any:
        return await ctx.step("tell", lambda: "canary of the contents")

    async def write() -> None:
        async with AgentRunner.open(tmp_path / "sealed.db", registry=Registry()) as runner:
            await runner.execute(Script(body, "body"), "sealed", {"text": "canary of the contents"})

    configure(payload_codec=AESGCMCodec({"2026-10": bytes(32)}, "2026-10"))
    try:
        in_thread(write())
    finally:
        reset_config()
    page = disk.open(exported(tmp_path / "sealed.db", "sealed"))
    for part in ("timeline", "messages", "journal"):
        page.get_by_role("navigation", name="Parts of the run").get_by_role(
            "link", name=part.capitalize(), exact=True
        ).click()
        expect(page.locator(".failed")).to_have_count(0)
        if part != "timeline":
            expect(page.locator("main")).to_contain_text("2026-10")
        assert "canary" not in page.content()
    page.get_by_role("navigation", name="Parts of the run").get_by_role("link", name="Timeline", exact=True).click()
    page.get_by_text("Input", exact=True).first.click()
    expect(page.locator("main")).to_contain_text("(encrypted with key '2026-10')")
