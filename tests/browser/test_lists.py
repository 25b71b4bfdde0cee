"""What people do on the pages of lists: follow, filter, select, repair, answer, submit, and sign out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from tests.browser.conftest import AGENTS, Guard, OpenPage, axe_findings, read_json, visit
from tests.server.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect: Any = None


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


@pytest.fixture
def unprotected(store: object) -> Iterator[Served]:
    with Served("--no-auth", "--log-level", "warning", "--no-worker", AGENTS, "--db", store) as served:
        yield served


def post(served: Served, path: str, body: Any) -> Any:
    with served.client() as client:
        answer = client.post(f"/api/v1/{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()


def submitted(served: Served, *run_ids: str) -> None:
    for run_id in run_ids:
        post(served, "runs", {"agent": "report", "run_id": run_id})


def read_again(page: Page) -> None:
    """Have the list read its first page now, as it does when somebody comes back to the tab."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def rows(page: Page) -> Any:
    return page.locator(".table-row")


def names(page: Page) -> list[str]:
    found: list[str] = page.locator(".row-link").all_inner_texts()
    return found


def wheel_down(page: Page, until: str) -> None:
    """Turn the wheel until so many runs are listed."""
    listed = page.locator(".listed [role=status]")
    page.mouse.move(700, 500)
    for _ in range(200):
        if until in listed.inner_text():
            return
        page.mouse.wheel(0, 2000)
        page.evaluate("new Promise(requestAnimationFrame)")
    raise AssertionError(listed.inner_text())


def test_new_runs_appear_at_the_top_of_the_list(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    expect(rows(page).first).to_be_visible()
    submitted(idle, "new-1", "new-2")
    read_again(page)
    expect(rows(page).first).to_contain_text("new-2")
    assert names(page)[:2] == ["new-2", "new-1"]


def test_nothing_moves_under_a_reader_further_down(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    expect(rows(page).first).to_be_visible()
    wheel_down(page, "200 runs")
    before = names(page)
    submitted(idle, "new-1", "new-2", "new-3")
    read_again(page)
    assert names(page) == before
    page.evaluate("scrollTo(0, 0)")
    read_again(page)
    expect(rows(page).first).to_contain_text("new-3")


def test_who_comes_back_from_a_run_finds_the_list_where_it_was(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    expect(rows(page).first).to_be_visible()
    wheel_down(page, "200 runs")
    place = page.evaluate("scrollY")
    page.locator(".row-link").nth(20).click()
    expect(page.locator(".page-head .state")).to_be_visible()
    page.go_back()
    expect(rows(page).first).to_be_visible()
    # A click scrolls its row into view first.
    page.wait_for_function(f"() => Math.abs(scrollY - {place}) < 1500 && scrollY > 1500")


def test_rows_out_of_sight_are_neither_in_the_document_nor_in_memory(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    expect(rows(page).first).to_be_visible()
    devtools = page.context.new_cdp_session(page)

    def nodes() -> int:
        devtools.send("HeapProfiler.collectGarbage")
        return int(devtools.send("Memory.getDOMCounters")["nodes"])

    first = nodes()
    wheel_down(page, "300 runs")
    assert rows(page).count() <= 60
    for _ in range(10):
        page.evaluate("scrollTo(0, 0)")
        page.evaluate("new Promise(requestAnimationFrame)")
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        page.evaluate("new Promise(requestAnimationFrame)")
    assert nodes() < 3 * first


def test_filters_are_in_the_url_and_can_be_removed(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    page.get_by_role("combobox", name="State").select_option("in_doubt")
    expect(rows(page)).to_have_count(1)
    assert names(page) == ["payment-in-doubt"]
    page.get_by_role("combobox", name="State").select_option("retrying")
    expect(page.get_by_role("link", name="import-nightly")).to_be_visible()
    assert page.url.endswith("#/runs?state=in_doubt&state=retrying")
    page.get_by_role("button", name="state retrying").click()
    expect(rows(page)).to_have_count(1)
    page.keyboard.press("/")
    page.keyboard.type("nothing-like-this")
    expect(page.get_by_text("No run matches these filters.")).to_be_visible()
    page.get_by_role("link", name="Remove all filters").click()
    expect(page.get_by_role("searchbox")).to_have_value("")
    expect(rows(page).nth(10)).to_be_visible()
    assert page.url.endswith("#/runs")


def test_a_failed_query_keeps_the_rows(idle: Served, open_page: OpenPage, guard: Guard) -> None:
    guard.allow("status of 503")
    page = open_page(idle.ready["sign_in"])
    expect(rows(page).first).to_be_visible()
    page.route("**/api/v1/runs?*", lambda route: route.fulfill(status=503, json={"detail": "The store is busy."}))
    read_again(page)
    expect(page.get_by_role("alert")).to_contain_text("The store is busy.")
    expect(rows(page).first).to_be_visible()
    page.unroute("**/api/v1/runs?*")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_first_query_that_fails_is_no_empty_list(idle: Served, open_page: OpenPage, guard: Guard) -> None:
    guard.allow("status of 503")
    page = open_page(idle.ready["sign_in"])
    page.route("**/api/v1/runs?*", lambda route: route.fulfill(status=503, json={"detail": "The store is busy."}))
    visit(page, "runs?agent=report")
    expect(page.get_by_role("alert")).to_contain_text("The store is busy.")
    expect(page.get_by_text("No run matches")).to_have_count(0)


def test_selected_runs_are_cancelled_and_the_failed_ones_are_named(
    idle: Served, open_page: OpenPage, guard: Guard
) -> None:
    guard.allow("status of 409")
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs?q=later-")
    expect(rows(page)).to_have_count(4)
    page.get_by_role("checkbox", name="Select all loaded runs").check()
    page.get_by_role("button", name="Cancel 4").click()
    dialog = page.get_by_role("dialog", name="Cancel 4 runs")
    for name in ("later-1", "later-2", "later-3", "later-4"):
        expect(dialog.get_by_text(name, exact=True)).to_be_visible()
    assert axe_findings(page) == []
    failing = read_json(idle, "runs?q=later-2")["items"][0]["run_id"]
    page.route(f"**/runs/{failing}/cancel", lambda route: route.fulfill(status=409, json={"detail": "It is busy."}))
    dialog.get_by_role("button", name="Cancel 4 runs").click()
    expect(dialog.get_by_text("3 runs asked to stop.")).to_be_visible()
    expect(dialog.get_by_role("alert")).to_have_text(re.compile("1 run failed.*later-2.*It is busy.", re.DOTALL))
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator(".table-row .is-cancelled")).to_have_count(3)


def test_selected_failed_runs_are_requeued(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs?q=parse-prices")
    page.get_by_role("checkbox", name="Select parse-prices").check()
    page.get_by_role("button", name="Requeue 1").click()
    dialog = page.get_by_role("dialog", name="Requeue 1 run")
    dialog.get_by_role("button", name="Requeue 1 run").click()
    expect(dialog.get_by_text("1 run requeued.")).to_be_visible()
    assert read_json(idle, "runs/parse-prices")["state"] == "pending"


def test_requeue_of_all_changes_nothing_if_the_number_has_changed(
    idle: Served, open_page: OpenPage, guard: Guard
) -> None:
    guard.allow("status of 409")
    dead = read_json(idle, "queue")["by_status"]["dead"]
    page = open_page(idle.ready["sign_in"])
    visit(page, "dead")
    page.get_by_role("button", name=f"Requeue all {dead}").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_have_accessible_name(f"Requeue all {dead} runs in the state dead")
    post(idle, "dead/requeue", {"ids": ["trainer-1"]})
    dialog.get_by_role("button", name=f"Requeue {dead} runs").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Nothing was changed.")
    assert read_json(idle, "queue")["by_status"]["dead"] == dead - 1
    dialog.get_by_role("button", name=f"Requeue {dead - 1} runs").click()
    expect(page.get_by_text("No run is dead.")).to_be_visible()
    assert "dead" not in read_json(idle, "queue")["by_status"]


def test_discarded_runs_are_gone(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "dead?state=failed")
    page.get_by_role("checkbox", name="Select parse-prices").check()
    page.get_by_role("button", name="Discard", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Discard 1 run").click()
    expect(page.get_by_role("dialog").get_by_text("1 run discarded.")).to_be_visible()
    with idle.client() as client:
        assert client.get("/api/v1/runs/parse-prices").status_code == 404


def test_an_answer_that_comes_too_late_is_explained(idle: Served, open_page: OpenPage, guard: Guard) -> None:
    guard.allow("status of 409")
    page = open_page(idle.ready["sign_in"])
    visit(page, "approvals")
    question = page.get_by_role("row").filter(has_text="discount-1002")
    question.get_by_role("button").click()
    page.get_by_role("complementary").get_by_role("button", name="Approve").click()
    asked = next(each for each in read_json(idle, "approvals")["items"] if each["key"] == "discount-1002")
    body = {"answer": False, "request_id": asked["request_id"]}
    post(idle, f"runs/discount-1002/approvals/{quote(asked['name'], safe='')}", body)
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Approve").click()
    expect(dialog.get_by_role("alert")).to_contain_text("The question was answered before.")
    page.keyboard.press("Escape")
    expect(question).to_have_count(0)


def test_a_run_is_submitted_with_a_form(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "agents")
    page.get_by_role("button", name="Submit a run of report").click()
    dialog = page.get_by_role("dialog", name="New run of report")
    dialog.get_by_role("textbox", name="Input").fill("[1]")
    dialog.get_by_role("button", name="Submit the run").click()
    expect(dialog.get_by_role("alert")).to_have_text("The input must be a JSON object.")
    dialog.get_by_role("textbox", name="Input").fill('{"params": {"source": "sales.csv", "factor": 1}}')
    dialog.get_by_role("textbox", name="Run key").fill("from-the-page")
    dialog.get_by_role("button", name="Submit the run").click()
    expect(page.get_by_role("heading", name="from-the-page")).to_be_visible()
    assert read_json(served, "runs/from-the-page")["input"]["params"]["factor"] == 1


LOSE_A_RESPONSE = """() => {
  const { fetch } = window;
  window.fetch = async (url, options) => {
    const answer = await fetch(url, options);
    if (!options || options.method !== "POST") return answer;
    window.fetch = fetch;
    throw new TypeError("lost");
  };
}"""


def test_a_run_is_submitted_once_though_its_response_is_lost(idle: Served, open_page: OpenPage) -> None:
    def stored() -> int:
        return len(read_json(idle, "runs?agent=report&limit=200")["items"])

    page, before = open_page(idle.ready["sign_in"]), stored()
    visit(page, "agents")
    page.get_by_role("button", name="Submit a run of report").click()
    dialog = page.get_by_role("dialog", name="New run of report")
    page.evaluate(LOSE_A_RESPONSE)
    dialog.get_by_role("button", name="Submit the run").click()
    expect(dialog.get_by_role("alert")).to_contain_text("does not answer")
    assert stored() == before + 1
    dialog.get_by_role("button", name="Submit the run").dblclick()
    page.wait_for_url("**/#/runs/*")
    assert stored() == before + 1


def test_the_keyboard_reaches_rows_pages_and_the_help(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    expect(rows(page).first).to_be_visible()
    second = names(page)[1]
    for key in "jjjk":
        page.keyboard.press(key)
    page.keyboard.press("x")
    expect(page.get_by_role("checkbox", name=f"Select {second}", exact=True)).to_be_checked()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=second)).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("u")
    expect(page.get_by_role("heading", name="Usage")).to_be_visible()


def test_usage_by_day_has_whole_days(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "usage")
    expect(page.get_by_role("region", name="Usage")).to_be_visible()
    with page.expect_request(lambda each: "by=day" in each.url) as asked:
        page.get_by_label("Group by").select_option("day")
    assert "T00%3A00%3A00.000Z" in asked.value.url
    expect(page.get_by_role("region", name="Usage")).to_be_visible()


def test_a_session_that_ends_asks_for_a_sign_in_and_opens_the_same_page(
    idle: Served, open_page: OpenPage, guard: Guard
) -> None:
    guard.allow("status of 401")
    page = open_page(idle.ready["sign_in"])
    visit(page, "usage")
    page.context.clear_cookies()
    page.get_by_label("Group by").select_option("day")
    expect(page.get_by_text("Your session has ended.")).to_be_visible()
    page.get_by_label("Token").fill(str(idle.client().headers["authorization"]).removeprefix("Bearer "))
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Usage")).to_be_visible()
    assert "by=day" in page.url


def test_who_signs_out_has_no_cookie_and_no_data(idle: Served, open_page: OpenPage, guard: Guard) -> None:
    guard.allow("status of 401")
    page = open_page(idle.ready["sign_in"])
    visit(page, "about")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert page.context.cookies() == []


def test_a_server_without_tokens_offers_no_sign_out(unprotected: Served, open_page: OpenPage) -> None:
    page = open_page(unprotected.url)
    visit(page, "about")
    expect(page.get_by_text("read and write")).to_be_visible()
    expect(page.get_by_role("button", name="Sign out")).to_have_count(0)


def test_the_tenant_of_a_run_is_shown_and_selects_runs(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    expect(rows(page).first).to_be_visible()
    choice = page.get_by_role("combobox", name="Tenant")
    expect(choice).to_have_count(0)  # no run has a tenant
    for tenant in ("Acme & Co", "globex"):
        body = {"agent": "report", "run_id": "same", "concurrency_key": "line", "tenant": tenant}
        post(idle, "runs", body)
    read_again(page)
    choice.select_option("Acme & Co")
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text("report · Acme & Co")
    assert "tenant=Acme" in page.url
    rows(page).get_by_role("link").first.click()
    expect(page.locator(".facts")).to_contain_text("Acme & Co")
    page.locator(".facts").get_by_role("link", name="Acme & Co").click()
    expect(rows(page)).to_have_count(1)
    choice.select_option("All tenants")
    expect(rows(page).nth(10)).to_be_visible()
    assert page.url.endswith("#/runs")
    visit(page, "queue")
    for tenant in ("Acme & Co", "globex"):
        expect(page.get_by_role("region", name="Concurrency keys")).to_contain_text(f"line · {tenant}")
