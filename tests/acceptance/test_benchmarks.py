"""Every benchmark row runs and measures something; how fast is not asked here, only what does not depend on speed."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth, http_server, inspector, page, report, run
from benchmarks.floor import Line, Size, in_turns
from benchmarks.peers import __main__ as peers
from benchmarks.peers import server
from benchmarks.peers.bars import FOUR, IDLE, ROWS, SIXTEEN, Bar, Row
from benchmarks.peers.contenders import QUEUES, Contender
from benchmarks.peers.turns import Entry


def _measured(name: str, where: Path, rows: report.Rows = run.ROWS) -> dict[str, Line]:
    lines = report.measure(rows, [name], Size(where, tiny=True), lambda line: None)
    found = {line.row: line for line in lines}
    assert len(found) == len(lines), "two rows have one name"
    return found


#: Rows over 3 s of processor time, or that start many processes or browsers. They are measured as the other rows are.
SLOW = {"conversation", "http", "inspector", "jobs", "loop", "memory", "payload", "replay"}
NAMES = [name for name in run.ROWS if name not in {*run.PARTS, "chain", "counts", "imports"}]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NAMES]
)
def test_a_row_measures_something(name: str, tmp_path: Path) -> None:
    if name == "http" and (absent := http_server.missing()):
        pytest.skip(f"needs {', '.join(absent)}")
    if name == "inspector" and (absent := inspector.missing()):
        pytest.skip(f"needs {', '.join(absent)}")
    lines = _measured(name, tmp_path)
    assert lines
    # A part of a core is the difference of two measurements. On a busy machine it is nothing now and then.
    assert all(line.ours > 0 or line.unit == "% of a core" for line in lines.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in growth.ROWS]
)
def test_a_row_of_growth_measures_something(name: str, tmp_path: Path) -> None:
    lines = _measured(name, tmp_path, growth.ROWS)
    assert lines
    assert all(line.ours > 0 for line in lines.values())
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_small_steps_keep_the_store_small(tmp_path: Path) -> None:
    lines = _measured("chain", tmp_path)
    assert all(line.ours > 0 for line in lines.values())
    store = lines["store after 100 steps"]
    assert store.most == pytest.approx(0.04)
    assert store.holds(), store


def test_no_third_party_module_is_imported(tmp_path: Path) -> None:
    lines = _measured("imports", tmp_path)
    assert lines["third-party modules behind all public names"].holds()


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


def test_the_page_shows_figures_targets_and_misses() -> None:
    lines = [
        Line("a commit", 30.0, "µs", floor=10.0, most=2.0),
        Line("a rate", 2000.0, "runs/s", least=1800.0),
        Line("a | cost", 1.5, "MB"),
    ]
    machine = {"python": "3.11.7", "sqlite": "3.40.1", "cores": "2"}
    report = {"machine": machine, "rows": [line.as_dict() for line in lines]}
    growth = {"machine": machine, "rows": [Line("replay", 5.0, "/s").as_dict()]}
    text = page.page([(report, "2026-11-26"), (growth, "2026-11-27")])
    assert "Measured on 2026-11-26 with Python 3.11.7, SQLite 3.40.1 and 2 cores of a virtual machine." in text
    assert "1 of 2 targets were missed." in text
    assert "| a commit | 30 µs | 10 | 3.00 | ≤ 2 | missed |\n| a rate | 2,000 runs/s |  |  | ≥ 1,800 |  |\n" in text
    assert "| a \\| cost | 1.5 MB |  |  |  |  |\n" in text
    assert "Measured on 2026-11-27 " in text.partition("## Where work grows")[2]
    assert text.count("0 of 0 targets were missed.") == 1


def test_what_a_process_has_frozen_stays_frozen() -> None:
    """Otherwise each later collection of a process of pytest-xdist looks through all tests, for half a second."""
    gc.freeze()
    before = gc.get_freeze_count()
    in_turns(1, lambda: 0.0)
    assert gc.get_freeze_count() > before // 2


def test_an_unknown_row_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err


def _beside_peers(where: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """What a tiny run says, by the name of a figure."""
    report, folder = where / "report.json", where / "files"
    folder.mkdir()
    common = ["--tiny", "--rounds", "1", "--dir", str(folder), "--json", str(report)]
    assert peers.main([*arguments, *common]) == 0
    assert list(folder.iterdir()) == []
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    return {f"{row['row']} {row['shape']}, {row['who']}": row for row in rows}


@pytest.mark.slow
def test_ours_is_measured_as_its_peers_are(tmp_path: Path) -> None:
    found = _beside_peers(tmp_path, "sqlite", "events", "--only", "ours, SQLite FULL")
    shapes = sum(len(ROWS[name].shapes) for name in ("sqlite-drain", "sqlite-idle", "sqlite-enqueue", "events"))
    assert len(found) == shapes
    assert all(row["figure"] is not None and row["figure"] > 0 for row in found.values()), found
    four = found[f"sqlite-drain {FOUR.name}, ours, SQLite FULL"]
    assert four["of_one_process"] == pytest.approx(
        four["figure"] / found[f"sqlite-drain {SIXTEEN.name}, ours, SQLite FULL"]["figure"]
    )


def test_a_peer_that_is_not_installed_says_how_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Contender("absent", "absent:Queue", "sqlite", ("a_package_of_nobody",))
    monkeypatch.setitem(ROWS, "sqlite-idle", Row("queue", (absent,), (IDLE,), {}))
    (row,) = _beside_peers(tmp_path, "sqlite-idle").values()
    assert row["figure"] is None
    assert "a_package_of_nobody" in row["note"]
    assert "requirements.txt" in capsys.readouterr().out


def test_without_a_server_the_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise server.NoServer("nobody serves here")

    monkeypatch.setattr(server, "binary", nowhere)
    ours = Contender("ours, Redis", "ours:Queue", "redis", ours=True)
    monkeypatch.setitem(ROWS, "redis-idle", Row("queue", (ours,), (IDLE,), {}))
    (row,) = _beside_peers(tmp_path, "redis-idle").values()
    assert (row["figure"], row["note"]) == (None, "nobody serves here")


@pytest.mark.parametrize(
    ("bar", "held"),
    [
        (Bar("ours, Redis", "figure", least=5000), True),
        (Bar("ours, Redis", "figure", least=7000), False),
        (Bar("ours, Redis", "figure", most=5999), False),
        (Bar("ours, Redis", "best", least=1.5), True),
        (Bar("ours, Redis", "best", least=1.6), False),
        (Bar("ours, Redis", "against", least=2), None),
    ],
)
def test_a_bar_is_on_the_figure_or_on_a_ratio(bar: Bar, held: bool | None) -> None:
    entry = Entry("redis-drain", SIXTEEN, QUEUES[0], figure=6000.0, best=4000.0, bars=[bar])
    assert entry.judged() == [(bar, held)]


def test_a_row_of_peers_that_is_unknown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err
