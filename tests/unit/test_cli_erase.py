"""`agent-runtime erase` prints counts, refuses live runs, and names what stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from tests.support.backends import POSTGRES, SERVERS
from tests.support.command_line import Commands
from tests.support.runs import Script

COUNTS = """runs, with child runs and forks: {runs}
journal records: {records}
events: {events}
mailbox messages: 0
results of guarded steps (their digests stay): {effects}
events of topics: 0
messages in conversations that stay (their text is replaced): {blanked}
documents: {documents}
"""
NOTHING = COUNTS.format(runs=0, records=0, events=0, effects=0, blanked=0, documents=0)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Commands:
    """Commands on an empty store."""
    monkeypatch.chdir(tmp_path)
    url = request.getfixturevalue(f"{request.param}_url") if request.param in SERVERS else str(tmp_path / "runs.db")
    return Commands(capsys, url)


async def pays(ctx: Any) -> RunResult:
    await ctx.step("pay", lambda: "paid", on_in_doubt="fail")
    return RunResult({"response": "done"})


async def waits(ctx: Any) -> None:
    await ctx.wait_for_signal("go")


def filled(url: str, *runs: tuple[str, str, str | None]) -> None:
    """Execute runs (agent, run key, tenant), each in the conversation of its key."""

    async def act() -> None:
        registry = Registry()
        registry.register(Script(pays, "pays"))
        registry.register(Script(waits, "waits"))
        async with AgentRunner.open(url, registry=registry, config=RunnerConfig(park_after=0)) as runner:
            for agent, key, tenant in runs:
                about = {"messages": [{"role": "user", "content": "hi"}], "conversation_id": f"room of {key}"}
                await runner.submit(agent, about, run_id=key, tenant=tenant)
            while await runner.run_once():
                pass

    asyncio.run(act())


def test_the_counts_of_each_target(run: Commands) -> None:
    url = run.url
    filled(url, ("pays", "a", None), ("pays", "b", None), ("pays", "c", "acme"))
    one = {"runs": 1, "records": 5, "events": 4, "effects": 1, "blanked": 0}
    with_documents = COUNTS.format(**one, documents="3 (1 conversation, 2 message)")
    of_run = COUNTS.format(**{**one, "blanked": 2}, documents="0")
    for options, counts in (
        (("--run", "a"), of_run),
        (("--conversation", "room of b"), with_documents),
        (("--tenant", "acme"), with_documents),
    ):
        for _ in range(2):
            assert run("erase", *options, "--dry-run") == (0, f"would erase:\n{counts}", "")
        assert run("erase", *options, "--yes") == (0, f"erased:\n{counts}", "")
        said = "agent-runtime: run 'a' not found. What named it is erased. Check its name, and its --tenant\n"
        assert run("erase", *options, "--yes") == (0, f"erased:\n{NOTHING}", said if options[0] == "--run" else "")
    assert run.json("runs") == []


def test_the_store_may_be_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "runs.db")
    filled(path, ("pays", "a", None))
    assert Commands(capsys)("erase", path, "--run", "a", "--dry-run")[:2] == (
        0,
        "would erase:\n" + COUNTS.format(runs=1, records=5, events=4, effects=1, blanked=2, documents=0),
    )


def test_live_runs_are_refused_until_they_are_to_be_cancelled(run: Commands) -> None:
    url = run.url
    filled(url, ("waits", "a", None), ("waits", "b", None), ("pays", "c", None))
    code, out, said = run("erase", "--run", "a", "--run", "c", "--yes")
    assert (code, out) == (2, "")
    assert said == (
        "agent-runtime: 1 run has not finished and cannot be erased: 'a'. Wait, or cancel them with cancel=True "
        "(--cancel)\n"
    )
    assert len(run.json("runs")) == 3
    found = run.json("erase", "--run", "a", "--run", "c", "--cancel", "--yes")
    assert (found["runs"], found["live"], found["audited"]) == (2, 1, True)
    assert [each["run_key"] for each in run.json("runs")] == ["b"]


def test_wrong_arguments_change_nothing(run: Commands) -> None:
    filled(run.url, ("pays", "a", "acme"))
    code, _, said = run("erase")
    assert code == 2
    assert "erase must be given a target, got none. Pass tenant= (--tenant)" in said
    assert len(run.json("runs")) == 1


def test_a_missing_file_is_not_created(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = Commands(capsys, str(tmp_path / "none.db"))
    code, _, said = run("erase", "--tenant", "acme")
    assert code == 2
    assert "not found" in said
    assert [*tmp_path.iterdir()] == []
