"""How a reader follows a run: its first screen, its parts, its plan, its events, and what differs from another run."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import OpenPage, axe_findings, read_json, visit
from tests.server.conftest import Served
from tests.support.hostile_texts import STORABLE

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect: Any = None


@pytest.fixture(autouse=True)
def _expect(playwright: object) -> None:
    global expect
    from playwright.sync_api import expect

    assert playwright is not None


def tabs(page: Page) -> list[str]:
    found: list[str] = page.get_by_role("navigation", name="Parts of the run").get_by_role("link").all_inner_texts()
    return found


def test_an_open_question_leaves_the_timeline_on_the_first_screen(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", "refund-1004")
    expect(page.locator(".ask > summary")).to_contain_text(re.compile("refund.*asked"))
    expect(page.get_by_role("form", name="Answer refund")).to_be_hidden()
    expect(page.locator(".tl-row").last).to_be_in_viewport(ratio=1)
    page.locator(".ask > summary").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("form", name="Answer refund")).to_be_visible()
    assert axe_findings(page) == []


def test_a_run_has_only_the_tabs_that_it_can_have(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    planned = read_json(idle, "runs?agent=orchestrator")["items"][0]["run_id"]
    shown = {}
    for run in ("refund-1005", "order-77", "report-november", planned):
        visit(page, "runs", run)
        shown[run] = [each for each in ("Messages", "Plan") if each in tabs(page)]
    assert shown == {"refund-1005": ["Messages"], "order-77": [], "report-november": ["Plan"],
                     planned: ["Messages", "Plan"]}  # fmt: skip
    visit(page, "runs", "order-77", "plan")  # the address of a part that the run does not have
    expect(page.get_by_text("The run has no plan.")).to_be_visible()
    assert "Plan" in tabs(page)


def test_the_steps_of_a_plan_show_their_tools(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", read_json(idle, "runs?agent=orchestrator")["items"][0]["run_id"], "plan")
    nodes = page.locator(".plan-node")
    expect(nodes).to_have_count(6)
    expect(nodes.locator("code")).to_have_text(["calculator"] * 6)


def test_an_event_shows_its_ids(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", "refund-1005", "events")
    row = page.locator(".log-row", has_text="approval.requested")
    request = read_json(idle, "runs/refund-1005/events?follow=false&types=approval.requested")["items"][0]
    assert request["payload"]["request_id"]
    expect(row).to_contain_text("request_id=")


def test_a_comparison_opens_the_first_difference_and_folds_what_is_equal(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "compare", "report-november", "report-november-fork")
    first = page.locator(".pair[open]")
    expect(first).to_have_count(1)
    expect(first).to_be_in_viewport()
    expect(first.locator("summary").first).to_contain_text("analyse")
    changes = first.get_by_role("region", name="Result")
    expect(changes.locator(".only-first", has_text="factor")).to_have_text(re.compile('^-.*"factor": 1'))
    expect(changes.locator(".only-second", has_text="factor")).to_have_text(re.compile('^\\+.*"factor": 2'))
    equal = page.get_by_text("Steps 1 to 2 are equal: fetch, clean")
    expect(page.locator(".pair", has_text="fetch").locator(".pair")).to_have_count(0)
    equal.click()
    expect(page.locator(".pair .pair")).to_have_count(2)
    assert axe_findings(page) == []


DIFF = """async (before, after) => {
  const { diffLines, folded } = await import("/static/diff.js");
  return folded(diffLines(before, after)).map((each) => (each.equal ? each.equal.length : each.mark + each.text));
}"""


@pytest.fixture
def diff(idle: Served, open_page: OpenPage) -> Callable[[str, str], list[Any]]:
    page = open_page(idle.ready["sign_in"], bypass_csp=True)
    return lambda before, after: page.evaluate(f"([a, b]) => ({DIFF})([...a], [...b])", [before, after])


def test_lines_of_two_values_are_compared(diff: Callable[[str, str], list[Any]]) -> None:
    assert diff("abc", "abc") == [3]
    assert diff("abc", "abd") == [" a", " b", "-c", "+d"]
    assert diff("", "ab") == ["+a", "+b"]
    assert diff("ab", "") == ["-a", "-b"]
    assert diff("abcdefgx", "abcdefgy") == [5, " f", " g", "-x", "+y"]
    assert diff("xaby", "aXb") == ["-x", " a", "+X", " b", "-y"]
    assert diff("x1234567y", "X1234567Y") == ["-x", "+X", " 1", " 2", 3, " 6", " 7", "-y", "+Y"]


# -- the trace


def test_a_trace_nests_tool_calls_and_adds_up_what_was_used(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", "refund-1005", "trace")
    table = page.get_by_role("table", name="Trace")
    rows = table.locator(".tl-row")
    expect(rows).to_have_count(9)
    depths = rows.locator(".tl-name").evaluate_all("all => all.map((each) => each.style.getPropertyValue('--depth'))")
    assert depths == ["1", "2", "2", "2", "1", "2", "1", "1", "1"]
    used = read_json(idle, "runs/refund-1005")["usage"]
    expect(table.get_by_role("row").nth(1)).to_contain_text(f"{used['total_tokens']:,}")
    page.get_by_role("link", name=re.compile("^tool, find_order")).first.click()
    panel = page.get_by_role("complementary", name="Call find_order")
    expect(panel.get_by_label("Input")).to_contain_text('"order": "1004"')
    expect(panel.get_by_label("Output")).to_contain_text('"article": "lamp"')
    assert axe_findings(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Calls in demo-1").first.press("Enter")
    expect(rows).to_have_count(6)


def test_a_trace_has_the_steps_of_child_runs(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", "edit-catalogue", "trace")
    rows = page.locator(".trace .tl-row")
    expect(rows.locator(".tl-link")).to_have_text(
        [
            "draft",
            *[text for language in ("German", "French", "Italian") for text in (f"translator {language}", "translate")],
        ]
    )
    rows.nth(2).get_by_role("link").click()
    panel = page.get_by_role("complementary", name="Call translate")
    expect(panel.get_by_label("Output")).to_contain_text("GERMAN: LAMPS")


def test_a_step_of_less_than_a_millisecond_is_seen(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    for part in ("trace", "timeline"):
        visit(page, "runs", "edit-catalogue", part)
        row = page.locator(".tl-row", has_text="draft")
        expect(row).to_contain_text("< 1 ms")
        width = row.locator(".tl-bar").evaluate("bar => parseFloat(getComputedStyle(bar).strokeWidth)")
        assert width >= 2, part


def test_one_click_leads_from_an_error_to_the_call(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", "parse-prices")
    page.get_by_role("link", name="Show the failed call").click()
    panel = page.get_by_role("complementary", name="Call parse")
    expect(panel).to_contain_text("ValueError")
    expect(page.get_by_role("link", name=re.compile("^parse, failed"))).to_have_attribute("aria-current", "true")
    visit(page, "runs", "report-november", "trace?step=failed")
    expect(page.get_by_text("No call of this run has failed.")).to_be_visible()


TREE = """async (body, runs) => {
  const tree = await import("/static/pages/trace_tree.js");
  const nodes = tree.treeOf("r", (id) => runs[id]);
  const shown = (each) => [each.row.label, each.tokens, each.cost, each.children.map(shown)];
  return body === "failed" ? tree.failedCall(nodes)?.row.label ?? null : nodes.map(shown);
}"""


def call(label: str, kind: str, key: str, **fields: Any) -> dict[str, Any]:
    given = {"step_id": label, "parent": None, "child_run_id": None, "tokens": None, "cost_usd": None, "state": "done"}
    return given | {"label": label, "kind": kind, "key": key} | fields


def test_tokens_and_cost_are_summed_upward_once(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"], bypass_csp=True)

    def found(what: str, **runs: list[dict[str, Any]]) -> Any:
        return page.evaluate(f"([what, runs]) => ({TREE})(what, runs)", [what, runs])

    outer = call("outer", "step", "0", tokens=5, cost_usd=0.5)
    model = call("model", "model", "l:0:0", tokens=10, cost_usd=1, parent="outer")
    tool = call("tool", "tool", "l:0:0:0", parent="outer")
    child = call("child", "child", "a", tokens=100, cost_usd=2, child_run_id="c")
    live = call("live", "child", "b", child_run_id="l")
    inside = [call("inside", "model", "l:0:0", tokens=100, cost_usd=2, state="failed")]
    started = [call("started", "model", "l:0:0", tokens=7, cost_usd=3), call("later", "model", "l:0:1")]
    runs = {"r": [outer, model, tool, child, live], "c": inside, "l": started}
    assert found("sums", **runs) == [
        ["outer", 15, 1.5, [["model", 10, 1, [["tool", None, None, []]]]]],
        ["child", 100, 2, [["inside", 100, 2, []]]],
        ["live", 7, 3, [["started", 7, 3, []], ["later", None, None, []]]],
    ]
    assert found("failed", **runs) == "inside"
    assert found("failed", r=[outer, child]) is None
    circle = [call("child", "child", "a", child_run_id="r")]
    assert found("sums", r=circle) == [["child", None, None, []]]


# -- messages


def test_messages_fold_tool_calls_and_lead_to_the_trace(idle: Served, open_page: OpenPage) -> None:
    page = open_page(idle.ready["sign_in"])
    visit(page, "runs", "refund-1005", "messages")
    calls = page.locator(".call")
    expect(calls).to_have_count(4)
    expect(calls.first.locator("summary")).to_contain_text('find_order order: "1004"')
    expect(page.get_by_label("Arguments").first).to_be_hidden()
    calls.first.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(calls.first.get_by_label("Arguments")).to_contain_text('"order": "1004"')
    expect(calls.first.get_by_label("Result")).to_contain_text('"article": "lamp"')
    assert axe_findings(page) == []
    calls.first.get_by_role("link", name="Trace").click()
    expect(page.get_by_role("complementary", name="Call find_order")).to_be_visible()
    page.go_back()
    page.locator(".chat article", has_text="I suggest a refund").get_by_role("link", name="Trace").click()
    expect(page.get_by_role("complementary", name="Call demo-1")).to_be_visible()


def test_text_appears_while_it_is_written(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.ready["sign_in"])
    with served.client() as client:
        body = {"agent": "writer", "run_id": "draft", "input": {"messages": [{"role": "user", "content": "Write."}]}}
        assert client.post("/api/v1/runs", json=body).status_code == 201
        visit(page, "runs", "draft", "messages")
        writing = page.get_by_role("article", name="Answer that is being written")
        expect(writing.locator("strong")).to_have_text("first")
        expect(writing).to_contain_text("part of <b>the</b> answer")
        assert axe_findings(page) == []
        assert client.post("/api/v1/runs/draft/signals/finish", json={"ready": True}).is_success
    expect(writing).to_have_count(0)  # first: the stored answer may be shown beside it for a moment
    expect(page.locator(".chat strong")).to_have_text("whole")
    page.get_by_label("Show Markdown as it was written").check()
    expect(page.locator(".chat")).to_contain_text("## Draft")


RENDER = """async (texts) => {
  const { html, render } = await import("/static/ui.js");
  const { Markdown } = await import("/static/markdown.js");
  return texts.map((text) => {
    const root = document.createElement("div");
    document.body.append(root);
    render(html`<${Markdown} text=${text} />`, root);
    const all = [...root.querySelectorAll("*")];
    const found = {
      text: root.textContent, html: root.innerHTML, names: [...new Set(all.map((each) => each.localName))],
      attributes: [...new Set(all.flatMap((each) => [...each.attributes].map(({ name }) => name)))],
    };
    render(null, root);
    root.remove();
    return found;
  });
}"""
ELEMENTS = frozenset(
    [
        "div",
        "p",
        "pre",
        "code",
        "hr",
        "blockquote",
        "ul",
        "ol",
        "li",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "strong",
        "em",
        "del",
        "span",
    ]
)
ATTRIBUTES = {"class", "tabindex", "role", "aria-label", "scope", "value"}
MARKUP = (
    "*", "**", "_", "__", "~~", "`", "```", "~~~", "#", "- ", "> ", "|", "|-|-|", "[", "](", ")", "![", "\\", "\n",
    "\n\n", " ", "  ", "---", "<", ">", "&", "1. ",
)  # fmt: skip


@pytest.fixture
def rendered(idle: Served, open_page: OpenPage) -> Callable[[list[str]], list[dict[str, Any]]]:
    page = open_page(idle.ready["sign_in"], bypass_csp=True)
    return lambda texts: page.evaluate(RENDER, texts)


def test_markdown_becomes_elements(rendered: Callable[[list[str]], list[dict[str, Any]]]) -> None:
    shown = {
        "**a** _b_ `c*d*` ~~e~~": "<p><strong>a</strong> <em>b</em> <code>c*d*</code> <del>e</del></p>",
        "snake_case_name 2 * 3 * 4 \\*x\\*": "<p>snake_case_name 2 * 3 * 4 *x*</p>",
        "# T #\ntext\nmore": '<p class="md-head">T</p><p>text\nmore</p>',
        "```py\n**x**\n```\nend": '<pre tabindex="0"><code>**x**</code></pre><p>end</p>',
        "3. a\n4. b\n   - c": '<ol><li value="3">a</li><li value="4">b<ul><li>c</li></ul></li></ol>',
        "> q\n> r\n\n---": "<blockquote><p>q\nr</p></blockquote><hr>",
        "[a](https://x.invalid/y)": '<p>a <span class="quiet">(https://x.invalid/y)</span></p>',
        "![a](https://x.invalid/y.png)": '<p>a <span class="quiet">(image: https://x.invalid/y.png)</span></p>',
        "<b>x</b>": "<p>&lt;b&gt;x&lt;/b&gt;</p>",
    }
    assert [each["html"] for each in rendered([*shown])] == [f'<div class="md">{each}</div>' for each in shown.values()]
    [table] = rendered(["|a|b|\n|-|:-:|\n|1|**2**|"])
    assert "<td><strong>2</strong></td>" in table["html"]


def test_no_text_becomes_another_element_and_no_letter_is_lost(
    rendered: Callable[[list[str]], list[dict[str, Any]]],
) -> None:
    chance = random.Random(54)
    words = [each for each in STORABLE if len(each) < 400]
    texts = [
        *STORABLE,
        *("".join(chance.choices([*MARKUP, *words, "word"], k=chance.randint(1, 30))) for _ in range(600)),
    ]
    texts += ["*" * 5000, "[" * 5000, "> " * 3000, "- " * 3000, "`" * 4999 + "x", "|" * 3000 + "\n|-|", "![](" * 2000]
    found = rendered(texts)
    assert set().union(*(each["names"] for each in found)) <= ELEMENTS
    assert set().union(*(each["attributes"] for each in found)) <= ATTRIBUTES
    for text, each in zip(texts, found, strict=True):
        if "```" not in text and "~~~" not in text and "![" not in text and "|" not in text:
            assert letters(each["text"]) == letters(text), text


def letters(text: str) -> str:
    """The letters of a text. The numbers of a list are not in the text of the page."""
    return re.sub(r"[^A-Za-z]", "", text)
