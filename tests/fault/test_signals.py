"""Worker loops share SIGTERM and SIGINT with each other and with their host program: real processes and signals."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.processes import Child

TERM, INT = signal.SIGTERM, signal.SIGINT

uvicorn = pytest.mark.skipif(find_spec("uvicorn") is None or find_spec("starlette") is None, reason="needs uvicorn")


def said(how: str, db: Path, *numbers: signal.Signals, begun: int = 1) -> tuple[list[str], int]:
    """What a host said after all its runs had begun and it was sent these signals, and its exit code."""
    with Child("hosts", how, db) as child:
        for _ in range(begun):
            assert child.line() == "begun"
        for number in numbers:
            child.send(number)
        return rest(child)


def rest(child: Child) -> tuple[list[str], int]:
    code = child.ended()
    lines: list[str] = []
    while (line := child.poll_line(0)) is not None:
        lines.append(line)
    return lines, code


@pytest.mark.parametrize("number", [TERM, INT])
@pytest.mark.parametrize(
    ("how", "lines", "code"),
    [
        ("default", ["finished", "returned", "closed"], 0),
        ("dies", ["finished", "returned", "closed"], 0),
        ("handler", ["finished", "host {}", "returned", "closed"], 0),
        ("exits", ["finished"], 7),
    ],
)
def test_the_handler_of_the_host_is_called_after_the_drain(
    how: str, lines: Sequence[str], code: int, number: signal.Signals, tmp_path: Path
) -> None:
    assert said(how, tmp_path / "a.db", number) == ([line.format(number.name) for line in lines], code)


def test_sigterm_that_the_host_made_a_keyboard_interrupt_is_passed_on(tmp_path: Path) -> None:
    assert said("interrupts", tmp_path / "a.db", TERM) == (["finished"], -INT)


def test_a_signal_that_the_process_ignores_stays_ignored(tmp_path: Path) -> None:
    # Had it been handled, the other one would be the second signal, which cancels the run.
    assert said("ignored", tmp_path / "a.db", INT, TERM) == (["finished", "returned", "closed"], 0)


def test_a_handler_of_the_event_loop_is_called_once_after_the_drain_and_is_back_then(tmp_path: Path) -> None:
    lines, code = said("loop handler", tmp_path / "a.db", TERM)
    assert (lines, code) == (["finished", "host SIGTERM", "returned", "host SIGTERM"], 0)


@pytest.mark.parametrize("how", ["two", "in thread"])
def test_one_signal_stops_all_loops_and_the_last_one_passes_it_on(how: str, tmp_path: Path) -> None:
    lines, code = said(how, tmp_path / "a.db", TERM, begun=2)
    assert lines[:2] == ["finished", "finished"]
    assert (sorted(lines[2:]), code) == (["host SIGTERM", "returned"], 0)


def test_a_second_signal_makes_every_loop_release_its_runs_and_is_passed_on_too(tmp_path: Path) -> None:
    with Child("hosts", "two endless", tmp_path / "a.db") as child:
        for line in ("begun", "stopping"):
            assert [child.line(), child.line()] == [line, line]
            child.send(TERM)
        lines, code = rest(child)
    assert (lines, code) == (["released", "released", "host SIGTERM", "host SIGTERM", "returned"], 0)


def test_a_loop_that_ends_leaves_the_handler_to_the_others(tmp_path: Path) -> None:
    with Child("hosts", "one is stopped", tmp_path / "a.db") as child:
        assert [child.line() for _ in range(4)] == ["begun", "begun", "finished", "stopped"]
        child.send(TERM)
        assert rest(child) == (["finished", "returned"], 0)


def test_a_second_sigterm_does_not_kill_a_process_that_closes_its_runner(tmp_path: Path) -> None:
    lines, code = said("after the drain", tmp_path / "a.db", TERM)
    assert (lines, code) == (["finished", "returned", "closed"], -TERM)


def test_a_forked_child_has_the_handlers_of_the_host(tmp_path: Path) -> None:
    with Child("hosts", "forks", tmp_path / "a.db") as child:
        assert [child.line(), child.line()] == ["begun", f"child {-TERM}"]
        child.send(TERM)
        assert rest(child) == (["finished"], 0)


@uvicorn
@pytest.mark.parametrize(("number", "code"), [(TERM, -TERM), (INT, 0)])
def test_one_signal_ends_a_worker_in_the_lifespan_of_uvicorn_and_the_server(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    lines, ended = said("under uvicorn", tmp_path / "a.db", number)
    assert (lines, ended) == (["finished", "closed"], code)


@uvicorn
@pytest.mark.parametrize(("how", "lines", "code"), [
    ("uvicorn first", ["finished"], -TERM),  # it raises the signal again when it has ended
    ("uvicorn last", ["finished", "returned", "closed"], 0),
])  # fmt: skip
def test_one_signal_ends_a_worker_and_the_server_in_one_loop(
    how: str, lines: list[str], code: int, tmp_path: Path
) -> None:
    with Child("hosts", how, tmp_path / "a.db") as child:
        assert {child.line(), child.line()} == {"begun", "serving"}
        child.send(TERM)
        assert rest(child) == (lines, code)
