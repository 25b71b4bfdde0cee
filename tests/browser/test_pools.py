"""The page of pools: what runs share in a period, what is spent, reserved and left of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines.base import Op
from agent_runtime_core.queue.pools import PoolLimit
from tests.browser.conftest import AGENTS, OpenPage, axe_findings, in_thread, sideways, visit
from tests.server.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect: Any = None
NAME = "budget/<b>of all</b>"
USD = 1_000_000_000


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


async def reserved(store: Path) -> None:
    """Use up one pool, and reserve a part of another."""
    wanted = [
        PoolLimit(NAME, "", "day", (20 * USD, -1, -1), (5 * USD, 1200, 1)),
        PoolLimit("openai:gpt", "acme", 60.0, (-1, 1200, 50), (5 * USD, 1200, 1)),
    ]
    async with AgentRunner.open(store) as runner:
        now = runner.queue.clock.wall()
        await runner.queue.commits.commit(None, [Op("queue.reserve", ("run/call", wanted, now, False))])
        await runner.queue.commits.commit(None, [Op("queue.spend", ([NAME], "run/call", (4 * USD, 1000, 1), now))])


def cells(page: Page, name: str) -> list[str]:
    row = page.get_by_role("region", name="Pools").get_by_role("row", name=name)
    head, rest = row.get_by_role("rowheader"), row.get_by_role("cell")
    return [" ".join(each.split()) for each in (head.inner_text(), *rest.all_inner_texts())]


def test_pools_show_what_is_left(serve: Callable[..., Served], store: Path, open_page: OpenPage) -> None:
    served = serve(AGENTS, "--db", store, "--no-worker")
    page = open_page(served.ready["sign_in"])
    visit(page, "pools")
    expect(page.get_by_text("No pool counts anything now.")).to_be_visible()
    in_thread(reserved(store))
    visit(page, "runs")
    page.keyboard.press("g")
    page.keyboard.press("p")
    expect(page.get_by_role("region", name="Pools").get_by_role("row")).to_have_count(3)
    assert cells(page, NAME)[1:6] == [
        "day", "$20.00 no limit no limit", "$4.00 1,000 tokens 1 call", "$0 0 tokens 0 calls",
        "$16.00 no limit no limit",
    ]  # fmt: skip
    assert cells(page, "openai:gpt")[0] == "openai:gpt · acme used up"
    assert cells(page, "openai:gpt")[1] == "any 1 min"
    assert cells(page, "openai:gpt")[5:] == ["no limit 0 tokens 49 calls", "bit by bit"]
    page.keyboard.press("j")
    expect(page.get_by_text(NAME)).to_be_focused()
    page.keyboard.press("j")
    expect(page.get_by_text("openai:gpt")).to_be_focused()
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 900})
        assert axe_findings(page, "light", "dark") == []
        assert sideways(page) <= 0
