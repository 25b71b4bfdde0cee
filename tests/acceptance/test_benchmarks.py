"""Every benchmark row runs and measures something; how fast is not asked here, only what does not depend on speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.floor import Line, Size


def _measured(name: str, where: Path) -> dict[str, Line]:
    lines = run.measure([name], Size(where, tiny=True), lambda line: None)
    found = {line.row: line for line in lines}
    assert len(found) == len(lines), "two rows have one name"
    return found


@pytest.mark.parametrize("name", [name for name in run.ROWS if name not in {*run.PARTS, "chain", "imports"}])
def test_a_row_measures_something(name: str, tmp_path: Path) -> None:
    lines = _measured(name, tmp_path)
    assert lines
    assert all(line.ours > 0 for line in lines.values())
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_small_steps_keep_the_store_small(tmp_path: Path) -> None:
    lines = _measured("chain", tmp_path)
    assert all(line.ours > 0 for line in lines.values())
    store = lines["store after 100 steps"]
    assert store.most == pytest.approx(0.04)
    assert store.holds(), store


def test_nothing_foreign_is_imported_and_the_bare_import_is_cheap(tmp_path: Path) -> None:
    lines = _measured("imports", tmp_path)
    assert lines["third-party modules behind all public names"].holds()
    # Wall time of one pair of processes, so the bar is wide here.
    assert lines["import agent_runtime_core, over bare Python"].holds(slack=4)


@pytest.mark.parametrize(
    ("line", "slack", "held"),
    [
        (Line("r", 19.0, "µs", 10.0, most=2.0), 1.0, True),
        (Line("r", 21.0, "µs", 10.0, most=2.0), 1.0, False),
        (Line("r", 21.0, "µs", 10.0, most=2.0), 1.5, True),
        (Line("r", 24.0, "/s", 100.0, least=0.25), 1.0, False),
        (Line("r", 24.0, "/s", 100.0, least=0.25), 1.5, True),
        (Line("r", 24.0, "/s", least=25.0), 1.0, False),
        (Line("r", 1.0, "ms", most=0.0), 5.0, False),
        (Line("r", 24.0, "/s", beside=1.0), 1.0, True),
    ],
)
def test_a_bar_is_on_the_ratio_where_there_is_a_floor(line: Line, slack: float, held: bool) -> None:
    assert line.holds(slack) is held


def test_check_fails_on_a_missed_bar_and_the_report_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (Line("good", 1.0, "ms", most=2.0), Line("bad", 3.0, "ms", 1.0, most=2.0))
    monkeypatch.setattr(run, "ROWS", {"row": lambda size: iter(rows)})
    report = tmp_path / "report.json"
    assert run.main(["row"]) == 0
    assert run.main(["row", "--check", "--json", str(report)]) == 1
    assert run.main(["row", "--check", "--slack", "1.6"]) == 0
    assert "MISSED" in capsys.readouterr().out
    held = {row["row"]: row["held"] for row in json.loads(report.read_text(encoding="utf-8"))["rows"]}
    assert held == {"good": True, "bad": False}


def test_an_unknown_row_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err
