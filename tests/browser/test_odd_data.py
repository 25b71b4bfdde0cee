"""Data that no page expects: numbers that JavaScript lacks, and answers that make a page fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_runtime_core import AgentRunner, RunnerConfig, RunResult
from agent_runtime_core.registry import Registry
from tests.browser.conftest import Guard, Inspected, OpenPage, in_thread, read_json, visit
from tests.server.conftest import Served
from tests.support.runs import Script

LARGE = 12345678901234567890


async def _write(db: Path) -> None:
    async def body(ctx: Any) -> dict[str, Any]:
        await ctx.step("order", lambda: {"id": LARGE, "negative": -LARGE, "small": 7})
        return {"id": await ctx.approve("number", {"id": LARGE}, schema={"type": "number"})}

    registry = Registry()
    registry.register(Script(body, "numbers"))
    async with AgentRunner.open(db, registry=registry, config=RunnerConfig(park_after=0)) as runner:
        for key in ("large", "fraction"):
            await runner.submit("numbers", {"params": {"id": LARGE}}, run_id=key)
        while await runner.run_once():
            pass


def test_large_integers_are_shown_and_sent_unchanged(
    serve: Callable[..., Served], open_page: OpenPage, tmp_path: Path
) -> None:
    in_thread(_write(tmp_path / "numbers.db"))
    served = serve("--db", tmp_path / "numbers.db", "--no-worker")
    page = open_page(served.ready["sign_in"])
    for key, typed, sent in (("large", str(LARGE), LARGE), ("fraction", ".5", 0.5)):
        visit(page, "runs", key)
        page.locator(".ask > summary").click()
        page.get_by_text(str(LARGE)).first.wait_for()
        page.locator("main input[type=number]").fill(typed)
        page.get_by_role("button", name="Answer", exact=True).click()
        page.locator("dialog button[type=submit]").click()
        page.get_by_text("The answer is stored.").wait_for()
        answers = in_thread(_answers(tmp_path / "numbers.db", key))
        assert answers == [str(sent)]
    assert read_json(served, "runs/large")["input"] == {"params": {"id": LARGE}}


async def _write_call(db: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": json.dumps({"order": LARGE})}}
    messages = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": json.dumps([LARGE, 1.5])},
    ]

    async def body(ctx: Any) -> RunResult:
        await ctx.emit("order.seen", {"order": LARGE})
        return RunResult(final_output={"id": LARGE}, final_messages=messages)

    registry = Registry()
    registry.register(Script(body, "numbers"))
    async with AgentRunner.open(db, registry=registry) as runner:
        await runner.execute("numbers", "call", {"messages": messages[:1]})


def test_large_integers_are_exact_on_every_page_of_a_run(
    serve: Callable[..., Served], open_page: OpenPage, tmp_path: Path
) -> None:
    in_thread(_write_call(tmp_path / "numbers.db"))
    served = serve("--db", tmp_path / "numbers.db", "--no-worker")
    page = open_page(served.ready["sign_in"])
    for part, times in (("messages", 3), ("events", 1)):
        visit(page, "runs", "call", part)
        if part == "messages":
            page.locator(".call > summary").click()
        page.locator("main").get_by_text(str(LARGE)).locator("visible=true").first.wait_for()
        text = page.inner_text("main")
        assert text.count(str(LARGE)) >= times, (part, text)
        for rounded in (str(float(LARGE)), f"{float(LARGE):.0f}", "12345678901234567000", "rawJSON", "[object"):
            assert rounded not in text, part


async def _answers(db: Path, key: str) -> list[str]:
    async with AgentRunner.open(db, registry=Registry(), read_only=True) as runner:
        row = await runner.queue.require(key)
        return [each.payload for each in await runner.queue.mail(row.run_id) if each.kind == "signal"]


def test_a_page_that_fails_says_so_and_the_others_work(
    inspect: Callable[..., Inspected], store: Path, open_page: OpenPage, guard: Guard
) -> None:
    guard.allow("TypeError")
    page = open_page(inspect(store).url)
    page.route("**/api/v1/usage**", lambda route: route.fulfill(json={"by": "agent", "items": [None], "total": None}))
    page.goto(f"{page.url.partition('#')[0]}#/usage")
    page.locator("main .failed").wait_for()
    visit(page, "queue")
    assert page.locator("h1").inner_text() == "Queue"
    assert page.locator("main .failed").count() == 0
