"""The pages behind nginx with the configuration of the guide: HTTPS, HTTP/2 and the name of a public host."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.browser.conftest import AGENTS, CEILING, ONLY_LOOPBACK, Guard, launched, visit
from tests.server.conftest import TOKEN, Served
from tests.support.nginx import NAME, Nginx, missing, serve_options

if TYPE_CHECKING:
    from playwright.sync_api import Playwright

URL = f"https://{NAME}/"


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_a_browser_signs_in_acts_and_watches_through_the_proxy(
    serve: Callable[..., Served], store: Path, playwright: Playwright, guard: Guard, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    guard.allow("status of 401")
    served = serve(AGENTS, "--db", store, *serve_options())
    with Nginx(tmp_path, served.port) as nginx:
        browser = launched(playwright, f"MAP {NAME}:443 127.0.0.1:{nginx.port}, {ONLY_LOOPBACK}")
        try:
            context = browser.new_context(ignore_https_errors=True)
            context.set_default_timeout(CEILING)
            guard.watch(context, urlsplit(URL).netloc)
            page = context.new_page()
            page.goto(URL)
            page.get_by_label("Token").fill(TOKEN)
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
            [cookie] = context.cookies()
            assert (cookie["name"], cookie["secure"]) == ("agent_runtime_session", True)
            protocol = "performance.getEntriesByType('navigation')[0].nextHopProtocol"
            assert page.evaluate(protocol) == "h2"
            visit(page, "runs", "order-77", "events")
            expect(page.get_by_text("Live", exact=True)).to_be_visible()
            page.locator(".page-actions").get_by_role("button", name="Cancel", exact=True).click()
            page.get_by_role("dialog").get_by_role("button", name="Cancel the run").click()
            expect(page.get_by_role("group", name="Events").get_by_text("run.cancelled").first).to_be_visible()
            expect(page.locator("main .page-head .state")).to_have_text(re.compile("cancelled"))
        finally:
            browser.close()
