"""`agent-runtime schedule`, and what `check` and `doctor` say about schedules."""

from __future__ import annotations

import datetime as dt
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.cli import doctor, parser
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.runner.schedules import CATCH_UP, OVERLAP
from tests.support.command_line import Commands, on

CODE = """
    from agent_runtime_core import AgentRuntime, RunResult

    class Known(AgentRuntime):
        key = "known"

        async def run(self, ctx):
            return RunResult()

    agents = Known()
"""
PUT = ("schedule", "put", "daily", "report", "--cron", "0 9 * * *", "--timezone", "Europe/Berlin",
       "--input", '{"x": 1}', "--overlap", "queue")  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Commands on an empty store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_code.py").write_text(textwrap.dedent(CODE), "utf-8")
    return Commands(capsys, str(tmp_path / "runs.db"))


def test_the_parser_knows_the_values_of_the_options() -> None:
    assert (parser.CATCH_UP, parser.OVERLAP) == (CATCH_UP, OVERLAP)


def test_a_schedule_is_stored_listed_and_shown(run: Commands) -> None:
    code, out, err = run(*PUT)
    assert (code, err) == (0, "")
    assert out.startswith("schedule daily stored; the next tick is 2")
    stored = run.json(*PUT)
    wanted = {"id": "daily", "agent": "report", "cron": "0 9 * * *", "timezone": "Europe/Berlin", "input": {"x": 1},
              "overlap": "queue", "catch_up": "last", "tenant": None, "paused": False, "skipped": 0}  # fmt: skip
    assert {name: stored[name] for name in wanted} == wanted
    assert run.json("schedule", "list") == [{**stored, "last_state": None, "error": None}]
    assert dt.datetime.fromisoformat(stored["next_tick"]).hour == 9
    assert "0 9 * * * Europe/Berlin" in run("schedule", "list")[1]
    shown = run.json("schedule", "show", "daily")
    assert {name: shown[name] for name in stored} == stored
    assert shown["next_ticks"][0] == stored["next_tick"]
    assert len(shown["next_ticks"]) == 5
    assert shown["runs"] == []
    assert "no runs" in run("schedule", "show", "daily")[1]
    after = run.json("schedule", "next", "daily", "--count", "2", "--after", "2027-07-01T00:00:00Z")
    assert after["ticks"] == ["2027-07-01T09:00:00+02:00", "2027-07-02T09:00:00+02:00"]
    assert len(run("schedule", "next", "daily")[1].splitlines()) == 5


def test_a_schedule_has_a_concurrency_key_and_tags(run: Commands) -> None:
    put = ("schedule", "put", "poll", "report", "--every", "1h", "--concurrency-key", "k", "--concurrency-limit", "2")
    stored = run.json(*put, "--tag", "nightly", "--tag", "slow")
    found = [stored[name] for name in ("concurrency_key", "concurrency_limit", "tags")]
    assert found == ["k", 2, ["nightly", "slow"]]
    assert "nightly, slow" in run("schedule", "show", "poll")[1]


def test_a_schedule_is_paused_resumed_run_and_deleted(run: Commands) -> None:
    run(*PUT, "--tenant", "acme")
    of = ("--tenant", "acme")
    assert run("schedule", "pause", "daily", *of)[1] == "schedule daily paused; no tick follows\n"
    assert run.json("schedule", "list", *of)[0]["paused"] is True
    assert run("schedule", "resume", "daily", *of)[1].startswith("schedule daily resumed; the next tick is")
    run_id = run.json("schedule", "run", "daily", *of)["run_id"]
    [shown] = run.json("schedule", "show", "daily", *of)["runs"]
    assert (shown["run_id"], shown["status"]) == (run_id, "pending")
    assert "pending" in run("schedule", "show", "daily", *of)[1]
    assert run("schedule", "delete", "daily", *of)[:2] == (0, "schedule daily deleted\n")
    assert run("schedule", "list")[1].splitlines()[1:] == []


@pytest.mark.parametrize("verb", ["show", "pause", "resume", "run", "delete", "next"])
def test_an_unknown_schedule_is_an_error(verb: str, run: Commands) -> None:
    run(*PUT)
    code, out, err = run("schedule", verb, "other")
    assert (code, out) == (1, "")
    assert "schedule 'other' " in err
    assert "list" in err


def test_wrong_arguments_store_nothing(run: Commands) -> None:
    for args in (
        ("--every", "0"), ("--cron", "61 * * * *"), ("--cron", "* * * * *", "--every", "5"), (),
        ("--every", "5", "--timezone", "Mars"), ("--every", "5", "--overlap", "?"),
    ):  # fmt: skip
        code, out, err = run("schedule", "put", "daily", "report", *args)
        assert (code, out) == (2, ""), args
        assert len(err.splitlines()) == 1, args
    assert "not found" in run("schedule", "list")[2] or run.json("schedule", "list") == []


def test_check_names_schedules_whose_agent_no_worker_knows(run: Commands) -> None:
    run("schedule", "put", "one", "known", "--every", "60")
    run("schedule", "put", "two", "unknown", "--every", "60", "--tenant", "acme")
    run("schedule", "put", "three", "unknown", "--every", "60", "--paused")
    code, out, err = run("check", "my_code:agents")
    assert (code, out) == (0, "0 runs checked: 0 can resume, 0 cannot, 0 unknown\n")
    assert err == "agent-runtime: schedule 'two' starts runs of agent 'unknown', which no worker knows\n"
    assert run.json("check", "my_code:agents")["schedules"] == [
        {"id": "two", "tenant": "acme", "agent": "unknown", "error": None}
    ]
    assert run("check", "my_code:agents", "--tenant", "other")[2] == ""


def test_doctor_does_not_report_a_schedule_as_a_run(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_WAITING", -1.0)

    async def filled(runner: AgentRunner) -> Any:
        await runner.schedules.put("daily", "report", every=60)

    on(run.url, filled)
    code, out, _ = run("doctor")
    assert code == 0
    assert "schedule:daily" not in out
    assert "1 waiting" not in out
