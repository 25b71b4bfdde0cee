"""The functions of the timeline, as they are served, in Chromium: times to positions, folding, grouping, lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.conftest import TOKEN, Served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Call = Callable[..., Any]
HOUR = 3600_000
RUN = """async ([body, args]) => {
  const scale = await import("/static/pages/timeline_scale.js");
  const rows = await import("/static/pages/timeline_rows.js");
  return eval(`(${body})`)(scale, rows, ...args);
}"""


@pytest.fixture(scope="module")
def call(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """`call("(scale, rows, …) => …", …)`: what a function of JavaScript returns that has both modules."""
    db: Path = tmp_path_factory.mktemp("functions") / "empty.db"
    with Served("--token", TOKEN, "--log-level", "warning", "--db", db, "--no-worker") as served:
        # `eval` is for the functions of these tests; the page itself does without.
        context = chromium.new_context(bypass_csp=True)
        try:
            page = context.new_page()
            page.goto(served.url)
            yield lambda body, *args: page.evaluate(RUN, [body, list(args)])
        finally:
            context.close()


def row(number: int, start: float | None, end: float | None, **fields: Any) -> dict[str, Any]:
    """A row of the page, with times in milliseconds."""
    given = {"step_id": f"s{number}", "sequence": number, "label": f"n{number}", "kind": "step", "state": "done"}
    return given | {"from": start, "to": end, "attempts": [], "parent": None} | fields


def scale_of(call: Call, intervals: list[list[float]], start: float, end: float) -> list[list[Any]]:
    made = call("(scale, rows, ...given) => scale.timeScale(...given)", intervals, start, end)
    return [[each["from"], each["to"], each["folded"]] for each in made["segments"]]


def test_times_keep_their_microseconds(call: Call) -> None:
    body = "(scale, rows, a, b) => scale.millis(b) - scale.millis(a)"
    assert call(body, "2026-11-26T10:00:00.000100Z", "2026-11-26T10:00:00.000350Z") == pytest.approx(0.25, abs=0.01)
    assert call("(scale) => scale.millis(null)") is None


def test_long_idle_time_is_folded_and_short_is_not(call: Call) -> None:
    busy: list[list[float]] = [[0, 3000], [4000, 6000], [6000 + 2 * HOUR, 9000 + 2 * HOUR]]
    assert scale_of(call, busy, 0, 9000 + 2 * HOUR) == [
        [0, 6000, False],
        [6000, 6000 + 2 * HOUR, True],
        [6000 + 2 * HOUR, 9000 + 2 * HOUR, False],
    ]


def test_positions_and_times_are_inverse(call: Call) -> None:
    found = call(
        """(scale, rows, busy, end) => {
          const made = scale.timeScale(busy, 0, end);
          return [0, 0.1, 0.25, 0.5, 0.75, 1].map((each) => scale.positionOf(made, scale.timeAt(made, each)));
        }""",
        [[0, 5000], [HOUR, HOUR + 5000], [9 * HOUR, 9 * HOUR + 1000]],
        9 * HOUR + 1000,
    )
    assert found == pytest.approx([0, 0.1, 0.25, 0.5, 0.75, 1])


def test_a_run_that_only_waits_fills_the_width(call: Call) -> None:
    made = call("(scale, rows, busy, end) => scale.timeScale(busy, 0, end)", [[0, 0]], HOUR)
    fold = next(each for each in made["segments"] if each["folded"])
    assert (fold["start"], fold["end"]) == (0, 1)


def test_waits_back_off_and_doubt_are_no_activity(call: Call) -> None:
    body = "(scale, rows, row, now) => scale.activityOf(row, now)"
    assert call(body, row(1, 0, HOUR, kind="sleep"), HOUR) == [[0, 0], [HOUR, HOUR]]
    assert call(body, row(1, 0, None, state="in doubt"), HOUR) == [[0, 0]]
    assert call(body, row(1, 0, None, state="running"), HOUR) == [[0, HOUR]]
    attempts = [{"from": 0, "to": 10, "state": "failed"}, {"from": 500, "to": None, "state": "running"}]
    assert call(body, row(1, 0, None, state="running", attempts=attempts), 900) == [[0, 10], [500, 900]]
    assert call(body, row(1, None, None, state="copied"), HOUR) == []


SHOWN = """(scale, rows, list, options) => rows.flatten(list, { ...options, toggled: new Set(options.toggled || []) })
  .map((each) => (each.type === "group" ? `${each.name}*${each.rows.length}` : each.id) + "/" + each.depth)"""


def test_rows_are_nested_below_their_parent_and_can_be_folded(call: Call) -> None:
    rows = [
        row(1, 0, 9),
        row(2, 1, 2, parent="s1"),
        row(3, 2, 3, parent="s2"),
        row(4, 9, 10),
        row(5, 9, 10, parent="no"),
    ]
    assert call(SHOWN, rows, {}) == ["s1/0", "s2/1", "s3/2", "s4/0", "s5/0"]
    assert call(SHOWN, rows, {"toggled": ["s1"]}) == ["s1/0", "s4/0", "s5/0"]
    assert call(SHOWN, rows, {"newest": True}) == ["s5/0", "s4/0", "s1/0", "s2/1", "s3/2"]


def test_fan_outs_are_one_row_until_they_are_opened(call: Call) -> None:
    rows = [row(0, 0, 1), *(row(n, n, n + 1, label="summarize") for n in range(1, 8)), row(8, 9, 10)]
    assert call(SHOWN, rows, {}) == ["s0/0", "summarize*7/0", "s8/0"]
    opened = ["s0/0", "summarize*7/0", *(f"s{n}/1" for n in range(1, 8)), "s8/0"]
    assert call(SHOWN, rows, {"toggled": ["+s1"]}) == opened
    assert call(SHOWN, [*rows[:5], rows[8]], {}) == ["s0/0", "s1/0", "s2/0", "s3/0", "s4/0", "s8/0"]


def test_done_rows_are_hidden_but_not_the_parents_of_others(call: Call) -> None:
    rows = [
        row(1, 0, 9),
        row(2, 1, None, parent="s1", state="running"),
        row(3, 2, 3),
        *(row(n, n, n + 1, label="map") for n in range(4, 9)),
        row(9, 9, 10, label="map", state="failed"),
    ]
    assert call(SHOWN, rows, {"hideDone": True}) == ["s1/0", "s2/1", "map*6/0"]
    assert call(SHOWN, rows, {"hideDone": True, "toggled": ["+s4"]}) == ["s1/0", "s2/1", "map*6/0", "s9/1"]


def test_ticks_are_round_apart_and_named_by_the_time_since_the_start(call: Call) -> None:
    body = """(scale, rows, busy, end, view, wanted) =>
      scale.ticks(scale.timeScale(busy, 0, end), view, wanted).map((each) => each.label)"""
    assert call(body, [[0, 10_000]], 10_000, [0, 1], 5) == ["0", "2 s", "4 s", "6 s", "8 s", "10 s"]
    assert call(body, [[0, 900]], 900, [0, 1], 5) == ["0", "200 ms", "400 ms", "600 ms", "800 ms"]
    after = call(body, [[0, 10_000], [2 * HOUR, 2 * HOUR + 10_000]], 2 * HOUR + 10_000, [0, 1], 8)
    assert after == ["1 h", "0", "5 s", "2:00:05", "2:00:10"]


def test_a_zoom_is_of_times(call: Call) -> None:
    body = """(scale) => {
      const made = scale.timeScale([[0, 1000]], 0, 1000);
      return [scale.viewOf(made, [250, 750]), scale.viewOf(made, null), scale.viewOf(made, [2000, 3000])];
    }"""
    assert call(body) == [pytest.approx([0.25, 0.75]), [0, 1], [0, 1]]


def test_a_linked_step_is_shown_in_its_fan_out(call: Call) -> None:
    rows = [row(0, 0, 99), *(row(n, n, n + 1, label="map", parent="s0") for n in range(1, 9))]
    assert call(SHOWN, rows, {}) == ["s0/0", "map*8/1"]
    assert "s4/2" in call(SHOWN, rows, {"selected": "s4"})


def test_a_group_counts_its_states_worst_first(call: Call) -> None:
    rows = [row(1, 5, 9), row(2, 0, None, state="running"), row(3, 1, 2, state="failed")]
    found = call("(scale, rows, list) => rows.summaryOf(list)", rows)
    assert [state for state, _ in found["states"]] == ["failed", "running", "done"]
    assert (found["from"], found["to"], found["open"]) == (0, 9, True)


def test_what_takes_long_is_read_less_often(call: Call) -> None:
    body = """async (scale, rows, took) => {
      const { pause } = await import("/static/queries.js");
      return pause(2000, performance.now() - took);
    }"""
    assert call(body, 0) == 2000
    assert 6000 <= call(body, 200) < 30_000
    assert call(body, 3_600_000) == 30_000
