"""How an operator watches a store: its workers, its open questions, who did what, and the tasks of few actions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import Guard, OpenPage, axe_findings, read_json, visit
from tests.server.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

expect: Any = None


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


def post(served: Served, path: str, body: Any) -> Any:
    with served.client() as client:
        answer = client.post(f"/api/v1/{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()


def refunds(served: Served, page: Page, count: int = 3) -> Locator:
    """Runs that ask whether to pay orders back, and the rows of their questions."""
    for number in range(1, count + 1):
        post(
            served, "runs", {"agent": "refunds", "run_id": f"pay-{number}", "input": {"params": {"order": str(number)}}}
        )
    visit(page, "approvals")
    rows = page.get_by_role("row").filter(has_text=re.compile(r"pay-\d"))
    expect(rows).to_have_count(count)
    return rows


# -- workers


def test_an_idle_worker_and_agents_that_no_worker_knows_are_listed(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    visit(page, "workers")
    [process] = [each for each in read_json(served, "workers")["items"] if each["living"]]
    row = page.get_by_role("region", name="Processes").get_by_role("row").filter(has_text=process["worker"])
    expect(row).to_contain_text(str(process["pid"]))
    expect(row.locator(".state")).to_have_text(re.compile(f"(idle, |of ){process['slots']} slots"))
    row.get_by_text(f"{len(process['agents'])} agents").click()
    expect(row.get_by_role("link", name="support")).to_be_visible()
    unknown = page.get_by_role("region", name="Agents that no worker knows")
    expect(unknown).to_contain_text("newsletter")
    expect(unknown.get_by_role("link", name="order", exact=True)).to_have_count(0)
    assert axe_findings(page) == []


def test_a_store_without_a_worker_says_so(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "workers")
    expect(
        page.get_by_role("region", name="Agents that no worker knows").get_by_role("link", name="order")
    ).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("q")
    expect(page.get_by_role("heading", name="Queue")).to_be_visible()
    page.get_by_role("main").get_by_role("link", name="workers").click()
    expect(page.get_by_role("heading", name="Workers")).to_be_visible()


# -- approvals


def test_questions_are_filtered_sorted_and_opened(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "approvals")
    rows = page.get_by_role("region", name="Open questions").locator("tbody tr")
    expect(rows).to_have_count(3)
    oldest = rows.locator("td a").all_inner_texts()
    page.get_by_label("Order").select_option("newest")
    expect(rows.first).to_contain_text(oldest[-1])
    assert rows.locator("td a").all_inner_texts() == oldest[::-1]
    page.get_by_label("Agent").select_option("payment")
    expect(rows).to_have_count(1)
    page.get_by_label("Agent").select_option("")
    page.get_by_label("Run or details contain").fill("REFUND-1004")
    expect(rows).to_have_count(1)
    assert "q=REFUND-1004" in page.url
    rows.get_by_role("button", name="refund").press("Enter")
    panel = page.get_by_role("complementary", name="refund")
    expect(panel.get_by_role("form", name="Answer refund")).to_be_visible()
    assert axe_findings(page) == []
    page.reload()
    expect(panel.get_by_label("Details", exact=True)).to_contain_text("Refund this order?")
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)


def test_only_questions_of_one_kind_are_answered_together(served: Served, open_page: OpenPage, guard: Guard) -> None:
    guard.allow("status of 409")
    page = open_page(served.ready["sign_in"])
    rows = refunds(served, page)
    page.get_by_role("checkbox", name="Select refund of pay-1").check()
    expect(page.get_by_role("checkbox", name="Select refund of refund-1004")).to_be_disabled()
    page.get_by_role("checkbox", name="Select refund of pay-2").check()
    page.get_by_role("button", name="Decline 2 questions").click()
    dialog = page.get_by_role("dialog", name="Decline 2 questions")
    expect(dialog.get_by_role("list", name="Runs")).to_have_text(re.compile("pay-1.*pay-2", re.DOTALL))
    assert axe_findings(page) == []
    asked = {each["key"]: each for each in read_json(served, "approvals")["items"]}
    post(served, "runs/pay-1/approvals/refund", {"answer": True, "request_id": asked["pay-1"]["request_id"]})
    dialog.get_by_role("button", name="Decline 2 questions").click()
    expect(dialog.get_by_role("alert")).to_have_text(re.compile("1 question not answered.*pay-1", re.DOTALL))
    dialog.get_by_role("button", name="Close").click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("pay-3")


def test_the_page_of_a_fork_says_who_forked_it(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    post(idle, "runs/report-november/fork", {"new_run_id": "forked"})
    visit(page, "runs", "forked")
    expect(page.get_by_role("list", name="Actions of people")).to_have_text(re.compile("Forked by default, just now"))


# -- the dashboard


def test_the_dashboard_has_the_numbers_of_the_store(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "dashboard")
    expect(page.get_by_label("Time", exact=True)).to_have_value("day")
    page.get_by_label("Time", exact=True).select_option("week")
    page.wait_for_url("**window=week")
    found = read_json(idle, "dashboard?window=week")
    assert found["complete"]
    assert found["failed"] > 3
    expect(page.locator(".facts")).to_have_text(
        re.compile(f"Started.*{found['started']}.*Ended.*{found['ended']}", re.DOTALL)
    )
    chart = page.get_by_role("img", name=f"{found['started']} runs started, {found['ended']} ended")
    expect(chart.locator("rect.is-failed")).to_have_count(sum(each["failed"] > 0 for each in found["series"]))
    latency = page.get_by_role("region", name="Latency")
    for kind in ("Queue", "Run", "Step", "Model call"):
        expect(latency.get_by_role("row").filter(has_text=kind)).to_contain_text(re.compile(r"\d+ m?s"))
    expect(page.get_by_role("region", name="Cost by model")).to_contain_text("demo-1")
    expect(page.get_by_role("region", name="Errors")).to_contain_text("ConnectionError")
    assert axe_findings(page) == []
    page.get_by_role("region", name="Cost by agent").get_by_role("link", name="crawler").click()
    expect(page.locator(".table-row").first).to_contain_text("crawler")


# -- the tasks of an operator, each in at most four actions


def test_task_which_tenant_spends_most(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    for tenant, cost in (("Acme", 30), ("Globex", 40), ("Globex", 50)):
        given = {"agent": "buyer", "tenant": tenant, "input": {"params": {"cost": cost}}}
        run = post(served, "runs", given)["run_id"]
        assert read_json(served, f"runs/{run}/result?tenant={tenant}&wait=30")["state"] == "succeeded"
    page.get_by_role("link", name="Usage").click()
    page.get_by_label("Group by").select_option("tenant")
    rows = page.get_by_role("region", name="Usage").locator("tbody tr")
    expect(rows.first).to_have_text(re.compile("Globex.*90"))
    expect(rows.filter(has_text="no tenant")).to_have_count(1)
    rows.first.get_by_role("link").click()
    expect(page.locator(".table-row")).to_have_count(2)


def test_task_answer_three_refunds(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    refunds(served, page)
    visit(page, "runs")
    page.get_by_role("link", name="Approvals").click()
    page.get_by_role("button", name="Select 3: refund of refunds").click()
    page.get_by_role("button", name="Approve 3 questions").click()
    page.get_by_role("dialog").get_by_role("button", name="Approve 3 questions").click()
    expect(page.get_by_text("3 questions answered.")).to_be_visible()
    for number in (1, 2, 3):
        visit(page, "runs", f"pay-{number}")
        expect(page.locator("main .page-head .state")).to_have_text("succeeded")


def test_task_compare_a_run_with_its_fork(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs?q=report-november-fork")
    page.get_by_role("link", name="report-november-fork").click()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("dialog").get_by_role("button", name="Compare").click()
    expect(page.get_by_text(re.compile("Same until step 2"))).to_be_visible()
    expect(page.locator(".pair[open]").get_by_role("region", name="Result")).to_contain_text('"factor"')
