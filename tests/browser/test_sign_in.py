"""Signing in: with the printed URL, with a token, and not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser.conftest import Guard, OpenPage, launched
from tests.server.conftest import TOKEN, Served

if TYPE_CHECKING:
    from playwright.sync_api import Playwright


def test_the_printed_url_signs_in_once(served: Served, open_page: OpenPage, guard: Guard) -> None:
    from playwright.sync_api import expect

    page = open_page(served.ready["sign_in"])
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    assert "code" not in page.url
    page.reload()
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    guard.allow("status of 401")
    other = open_page(served.ready["sign_in"])
    expect(other.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_token_signs_in_and_a_wrong_one_does_not(served: Served, open_page: OpenPage, guard: Guard) -> None:
    from playwright.sync_api import expect

    guard.allow("status of 401")
    page = open_page(served.url)
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("401")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()


def test_a_code_that_is_none_leads_to_the_sign_in(served: Served, open_page: OpenPage, guard: Guard) -> None:
    from playwright.sync_api import expect

    guard.allow("status of 401")
    page = open_page(f"{served.url}/#code=%")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_another_host_name_for_this_server_gets_nothing(
    serve: Callable[..., Served], store: Path, playwright: Playwright
) -> None:
    """As in an attack by DNS rebinding: the name of a foreign page leads to this machine."""
    served = serve("--db", store, "--no-worker")
    browser = launched(playwright, "MAP attacker.example 127.0.0.1")
    try:
        page = browser.new_page()
        answer = page.goto(f"http://attacker.example:{served.port}/")
        assert answer is not None
        assert answer.status == 421
        for path in ("api/v1/about", "api/v1/runs", "static/main.js"):
            status = page.evaluate("path => fetch(path).then((answer) => answer.status)", f"/{path}")
            assert status == 421, path
    finally:
        browser.close()


def test_the_form_is_accessible(served: Served, open_page: OpenPage, guard: Guard) -> None:
    from playwright.sync_api import expect

    from tests.browser.conftest import axe_findings

    guard.allow("status of 401")
    page = open_page(served.url, width=360)
    expect(page.get_by_label("Token")).to_be_visible()
    assert axe_findings(page) == []
