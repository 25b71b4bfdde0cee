"""The commands know tenants: they select a run by tenant and run key, show tenants, and give stored runs to one."""

from __future__ import annotations

import asyncio
import os
import pty
import random
import shlex
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.persistence.manager import PersistenceManager
from agent_runtime_core.queue.base import RunQueue
from agent_runtime_core.queue.records import LIVE, RunFilter, RunRow
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.runner.tenants import Assignment, assign_runs
from tests.support.backends import POSTGRES, SERVERS
from tests.support.command_line import ROOT, Commands, on
from tests.support.runs import Script

LONG = 10_000.0  # seconds of a lease


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Commands:
    """Commands on an empty store."""
    monkeypatch.chdir(tmp_path)
    url = request.getfixturevalue(f"{request.param}_url") if request.param in SERVERS else str(tmp_path / "runs.db")
    return Commands(capsys, url)


async def ask(ctx: Any) -> Any:
    return await ctx.approve(ctx.input.get("asks", "plan"))


async def parent(ctx: Any) -> Any:
    return [await ctx.call("child", {"n": n}) for n in range(2)]


async def child(ctx: Any) -> Any:
    return await ctx.call("grandchild", {"n": ctx.input["n"]})


async def done(ctx: Any) -> Any:
    await ctx.step("work", lambda: 1)
    return ctx.input


AGENTS = [Script(ask, "asker"), Script(parent, "parent"), Script(child, "child"), Script(done, "grandchild"),
          Script(done, "doer")]  # fmt: skip


def registry() -> Registry:
    known = Registry()
    for each in AGENTS:
        known.register(each)
    return known


async def work(runner: AgentRunner) -> None:
    """Execute what can be executed."""
    runner.registry = registry()
    while await runner.run_once():
        pass


def filled(url: str, *runs: tuple[str, str, str | None], works: bool = True, **options: Any) -> list[str]:
    """Submit runs (agent, run key, tenant), and execute what can be executed. Return their ids."""

    async def act(runner: AgentRunner) -> list[str]:
        ids = [str(await runner.submit(agent, {}, run_id=key, tenant=of, **options)) for agent, key, of in runs]
        if works:
            await work(runner)
        return ids

    found: list[str] = on(url, act)
    return found


def rows(url: str, **wanted: Any) -> list[RunRow]:
    found: list[RunRow] = on(url, lambda runner: runner.queue.find(RunFilter(limit=1000, **wanted)))
    return found


class Killed(BaseException):
    """Ends a call as if its process was killed."""


# -- selecting


COMMANDS: dict[str, tuple[str, ...]] = {
    "show": (), "events": (), "export": (), "cancel": (), "send": ("hello",), "signal": ("paid",),
    "approve": ("plan",), "fork": (), "resume": (),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_selects_a_run_by_tenant_and_run_key(run: Commands, command: str) -> None:
    filled(run.url, ("asker", "job", "acme"), ("asker", "job", "zenith"))
    if command == "resume":
        for tenant in ("acme", "zenith"):
            assert run("cancel", "job", "--tenant", tenant)[0] == 0
    before = {each.tenant: each for each in rows(run.url)}
    code, _, err = run(command, "job", *COMMANDS[command])
    assert code == 2
    assert "'acme'" in err
    assert "'zenith'" in err
    assert {each.tenant: each for each in rows(run.url)} == before
    assert run(command, "job", *COMMANDS[command], "--tenant", "other")[0] == 1
    code, out, err = run(command, "job", *COMMANDS[command], "--tenant", "acme")
    assert (code, err if command != "signal" else "") == (0, "")
    after = {each.run_id: each for each in rows(run.url)}
    assert after[before["zenith"].run_id] == before["zenith"], "the run of the other tenant is as before"
    if command in ("show", "export"):
        assert before["acme"].run_id in out
    elif command == "fork":
        [new] = [each for each in after.values() if each.run_id not in {old.run_id for old in before.values()}]
        assert new.tenant == "acme"
    elif command != "events":
        assert after[before["acme"].run_id] != before["acme"]


def test_a_run_key_alone_is_the_run_without_a_tenant_or_the_only_one(run: Commands) -> None:
    [of_acme] = filled(run.url, ("asker", "job", "acme"))
    assert run.json("show", "job")["run_id"] == of_acme
    [of_none] = filled(run.url, ("asker", "job", None))
    assert run.json("show", "job")["run_id"] == of_none
    assert run.json("show", "job")["tenant"] is None
    assert run.json("show", "job", "--tenant", "acme")["run_id"] == of_acme
    assert run.json("show", of_acme)["tenant"] == "acme", "a run id names one run in the whole store"
    assert run("show", of_acme, "--tenant", "zenith")[0] == 1
    code, _, err = run("show", "jab", "--tenant", "zenith")
    assert (code, "Tenant 'zenith' has no runs" in err) == (1, True)


def test_the_printed_command_that_answers_names_the_tenant(run: Commands) -> None:
    filled(run.url, ("asker", "job", "acme & sons"), ("asker", "job", "zenith"))
    out = run("show", "job", "--tenant", "acme & sons")[1]
    [line] = [line for line in out.splitlines() if line.startswith("answer with")]
    words = shlex.split(line.removeprefix("answer with"))
    assert words[:1] == ["agent-runtime"]
    assert run(*words[1:-2])[0] == 0, "without --url, which the helper adds"
    assert [each.tenant for each in rows(run.url, statuses=("pending",))] == ["acme & sons"]


def test_two_tenants_submit_the_same_run_id(run: Commands) -> None:
    acme = run.json("submit", "greeter", "--run-id", "job", "--tenant", "acme")
    assert (acme["tenant"], acme["existed"]) == ("acme", False)
    zenith = run.json("submit", "greeter", "--run-id", "job", "--tenant", "zenith")
    assert (zenith["tenant"], zenith["existed"]) == ("zenith", False)
    assert run.json("submit", "greeter", "--run-id", "job", "--tenant", "acme") == {**acme, "existed": True}
    none = run.json("submit", "greeter", "--run-id", "job")
    assert (none["tenant"], none["existed"]) == (None, False)
    assert len({acme["run_id"], zenith["run_id"], none["run_id"]}) == 3
    code, out, _ = run("submit", "greeter", "--run-id", "job", "--tenant", "acme")
    assert (code, out) == (0, "run job of agent greeter exists already and is pending\n")
    code, _, err = run("submit", "greeter", "--run-id", acme["run_id"], "--tenant", "zenith")
    assert (code, "another tenant" in err) == (1, True)
    for wrong in ("", "x" * 129, "a\nb"):
        code, _, err = run("submit", "greeter", "--tenant", wrong)
        assert (code, "--tenant: tenant must" in err) == (2, True)


def test_lists_show_tenants_if_a_run_has_one(run: Commands) -> None:
    filled(run.url, ("asker", "a", None), works=False)
    assert "TENANT" not in run("runs")[1]
    assert [each["tenant"] for each in run.json("runs")] == [None]
    filled(run.url, ("asker", "b", "acme"), ("asker", "c", "zenith"), works=False)
    head, *lines = run("runs")[1].splitlines()
    assert head.split()[2] == "TENANT"
    assert [line.split()[2] for line in lines] == ["-", "acme", "zenith"]
    assert [each["run_key"] for each in run.json("runs", "--tenant", "acme")] == ["b"]
    assert "tenant            acme" in run("show", "b")[1]
    assert "tenant" not in run("show", "a")[1]


def test_dead_runs_are_listed_and_requeued_by_tenant(run: Commands) -> None:
    async def break_(ctx: Any) -> Any:
        raise LookupError("no")

    async def act(runner: AgentRunner) -> None:
        runner.registry.register(Script(break_, "broken"))
        for tenant in ("acme", "zenith"):
            await runner.submit("broken", {}, run_id="job", tenant=tenant)
            await runner.run_once()

    on(run.url, act)
    of_failed = ("--status", "failed")
    assert [each["tenant"] for each in run.json("dead", "list", *of_failed, "--tenant", "acme")] == ["acme"]
    assert "zenith" in run("dead", "list", *of_failed)[1]
    assert run("dead", "requeue", "job", *of_failed)[0] == 2
    assert run("dead", "requeue", "job", *of_failed, "--tenant", "acme")[:2] == (0, "1 run requeued\n")
    assert run("dead", "discard", "--all", "--yes", *of_failed, "--tenant", "acme")[1] == "0 runs discarded\n"
    assert run("dead", "discard", "--all", "--yes", *of_failed, "--tenant", "zenith")[1] == "1 run discarded\n"


@pytest.mark.parametrize("tenant", ["acme", None])
def test_the_first_event_names_the_tenant_only_if_there_is_one(run: Commands, tenant: str | None) -> None:
    filled(run.url, ("doer", "job", tenant), ("asker", "other", tenant))
    for key in ("job", "other"):
        [first] = run.json("events", key, "--type", "run.started")
        named = {} if tenant is None else {"tenant": tenant}
        assert first["payload"] == {"agent_key": "doer" if key == "job" else "asker", "attempt": 1, **named}
        assert [each for each in run.json("events", key)[1:] if "tenant" in each["payload"]] == []


# -- giving runs to a tenant


def test_runs_are_given_to_a_tenant_and_found_by_their_keys(run: Commands) -> None:
    filled(run.url, ("doer", "acme-1", None), ("asker", "acme-2", None), ("doer", "other", None))
    [idem] = filled(run.url, ("doer", "acme-3", None), idempotency_key="once")
    before = {each.run_key: each.run_id for each in rows(run.url)}
    code, out, err = run("tenant", "set", "acme", "--prefix", "acme-")
    assert (code, out, err) == (0, "3 runs given to tenant 'acme', with 0 child runs and 0 conversations\n", "")
    assert {each.run_key: each.tenant for each in rows(run.url)} == {
        "acme-1": "acme", "acme-2": "acme", "acme-3": "acme", "other": "",
    }  # fmt: skip
    for key in ("acme-1", "acme-2", "acme-3"):
        assert run.json("show", key, "--tenant", "acme")["run_id"] == before[key]
        assert run.json("show", key)["run_id"] == before[key], "it is the only one"
    again = run.json("submit", "doer", "--run-id", "acme-1", "--tenant", "acme")
    assert (again["run_id"], again["existed"]) == (before["acme-1"], True)

    async def by_key(runner: AgentRunner) -> tuple[str, str]:
        first = await runner.submit("doer", {}, idempotency_key="once", tenant="acme")
        return str(first), str(await runner.submit("doer", {}, idempotency_key="once"))

    stored, new = on(run.url, by_key)
    assert stored == idem
    assert new != idem, "without a tenant, the key is free again"
    assert run.json("tenant", "set", "acme", "--prefix", "acme-")["runs"] == 0


def test_each_filter_of_the_list_chooses_runs(run: Commands) -> None:
    async def act(runner: AgentRunner) -> None:
        await runner.submit("doer", {"conversation_id": "talk"}, run_id="a")
        await runner.submit("doer", {}, run_id="b", concurrency_key="account")
        await runner.submit("asker", {}, run_id="c")
        await work(runner)
        await runner.submit("doer", {}, run_id="d")

    on(run.url, act)
    for filters, keys in (
        (("--conversation", "talk"), {"a"}), (("--concurrency-key", "account"), {"b"}), (("--agent", "asker"), {"c"}),
        (("--status", "waiting"), {"c"}), (("--status", "pending", "--agent", "doer"), {"d"}),
        (("--prefix", "a"), {"a"}), (("--since", "0s"), set()), (("--until", "1h"), set()),
        (("--since", "1h"), {"a", "b", "c", "d"}),
    ):  # fmt: skip
        assert {each["run_key"] for each in run.json("runs", *filters)} == keys
        told = run.json("tenant", "set", "acme", *filters, "--dry-run")
        assert (told["runs"], told["dry_run"]) == (len(keys), True)
        assert {each.tenant for each in rows(run.url)} == {""}, "a dry run changes nothing"


def test_child_runs_follow_their_run_and_a_fork_is_a_run_of_its_own(run: Commands) -> None:
    filled(run.url, ("parent", "job", None), ("parent", "other", None))
    filled(run.url, ("asker", "source", None))
    assert run("fork", "source", "--new-run-id", "job-fork")[0] == 0
    told = run.json("tenant", "set", "acme", "--prefix", "job")
    assert (told["runs"], told["child_runs"]) == (2, 4)
    found = rows(run.url)
    of_acme = {each.run_id for each in found if each.tenant}
    assert {each.run_key for each in found if each.tenant and each.run_key} == {"job", "job-fork"}
    for each in found:
        if each.parent_id is not None:
            assert (each.run_id in of_acme) == (each.parent_id in of_acme)
    assert run.json("tenant", "set", "acme", "--agent", "child")["runs"] == 0, "children follow, and are not chosen"


def test_a_child_whose_parent_was_deleted_is_chosen_like_a_run(run: Commands) -> None:
    filled(run.url, ("parent", "job", None))
    assert run("dead", "discard", "--status", "failed", "job")[0] == 1
    on(run.url, lambda runner: runner.discard("job"))
    told = run.json("tenant", "set", "acme", "--agent", "child")
    assert (told["runs"], told["child_runs"]) == (2, 2)


def test_a_run_that_waits_for_a_child_goes_on_between_the_two_commits(run: Commands) -> None:
    async def act(runner: AgentRunner) -> None:
        runner.registry = registry()
        await runner.submit("parent", {}, run_id="job")
        await runner.run_once()  # it waits for its first child
        [job] = await runner.queue.find(RunFilter(prefix="job"))
        assert await runner.queue.assign(job.run_id, "acme") == "assigned"
        await work(runner)
        assert (await runner.get_run("job")).status == "succeeded"

    on(run.url, act)
    found = {each.agent: set[str]() for each in rows(run.url)}
    for each in rows(run.url):
        found[each.agent].add(each.tenant)
    assert found == {"parent": {"acme"}, "child": {"", "acme"}, "grandchild": {"", "acme"}}
    told = run.json("tenant", "set", "acme", "--prefix", "job")
    assert (told["runs"], told["child_runs"]) == (0, 2), "what an interrupted call has left"
    assert {each.tenant for each in rows(run.url)} == {"acme"}


def test_a_running_run_is_skipped_and_named_and_those_behind_it_stay(run: Commands) -> None:
    filled(run.url, ("doer", "free", None), works=True)
    ids = filled(run.url, ("doer", "first", None), ("doer", "second", None), works=False, concurrency_key="account")

    async def act(runner: AgentRunner) -> Any:
        return await runner.queue.claim_rows("another process", LONG)

    [row] = on(run.url, act)
    assert row.run_id == ids[0]
    code, out, err = run("tenant", "set", "acme", "--yes")
    assert (code, out.split()[0]) == (1, "1")
    assert "run 'first': a worker executes it. Run the command again later" in err
    assert "run 'second': it is behind run 'first' with concurrency key 'account'" in err
    assert {each.run_key: each.tenant for each in rows(run.url)} == {"free": "acme", "first": "", "second": ""}

    async def end(runner: AgentRunner) -> None:
        update = runner.queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")
        await runner.queue.settle(row.run_id, update)

    on(run.url, end)
    assert run.json("tenant", "set", "acme", "--yes")["runs"] == 2
    assert {each.tenant for each in rows(run.url)} == {"acme"}
    on(run.url, work)
    assert {each.status for each in rows(run.url)} == {"succeeded"}


@pytest.mark.parametrize("agent", ["asker", "doer"])
def test_a_concurrency_key_keeps_its_order(run: Commands, agent: str) -> None:
    """The active run waits or is pending; the others are behind it, and one is delayed."""
    keys = [(agent, f"r{n}", None) for n in range(3)]
    filled(run.url, *keys, works=agent == "asker", concurrency_key="account")
    filled(run.url, ("doer", "urgent", None), works=False, concurrency_key="account", priority=5)
    filled(run.url, ("doer", "later", None), works=False, concurrency_key="account", delay=LONG)
    filled(run.url, ("doer", "other", "acme"), works=False, concurrency_key="other account")
    told = run.json("tenant", "set", "acme", "--concurrency-key", "account")
    assert (told["runs"], told["skipped"], told["taken"]) == (5, {}, {})
    found = {each.run_key: each for each in rows(run.url, concurrency_key="account")}
    assert {each.tenant for each in found.values()} == {"acme"}
    assert [key for key, each in found.items() if not each.blocked] == ["r0"], "one run is active"
    order = list[str]()

    async def act(runner: AgentRunner) -> None:
        runner.registry = registry()
        for _ in range(4):
            while await runner.run_once():
                pass
            for each in await runner.queue.find(RunFilter(LIVE, concurrency_key="account")):
                if each.status == "waiting":
                    await runner.approve(each.run_id, "plan")
        done = [
            each for each in await runner.queue.find(RunFilter(concurrency_key="account")) if each.status not in LIVE
        ]
        order.extend(str(each.run_key) for each in sorted(done, key=lambda each: each.ended_at or 0))

    on(run.url, act)
    assert order == ["r0", "urgent", "r1", "r2"]


def test_a_run_whose_keys_the_tenant_uses_is_not_moved(run: Commands) -> None:
    filled(run.url, ("doer", "job", None), ("doer", "job", "acme"))
    filled(run.url, ("doer", "once-1", None), idempotency_key="once")
    filled(run.url, ("doer", "once-2", "acme"), idempotency_key="once")
    filled(run.url, ("asker", "waits-1", None), concurrency_key="account")
    filled(run.url, ("asker", "waits-2", "acme"), concurrency_key="account")
    code, out, err = run("tenant", "set", "acme", "--yes")
    assert (code, out) == (1, "0 runs given to tenant 'acme', with 0 child runs and 0 conversations\n")
    assert "run 'job': the tenant has a run with this run_id" in err
    assert "run 'once-1': it has the idempotency key of a run of the tenant" in err
    assert "run 'waits-1': it has the concurrency key of an active run of the tenant" in err
    assert len(run.json("tenant", "set", "acme", "--yes")["taken"]) == 3
    assert len([each for each in rows(run.url) if not each.tenant]) == 3
    on(run.url, lambda runner: runner.cancel("waits-2", tenant="acme"))
    assert run.json("tenant", "set", "acme", "--prefix", "waits")["runs"] == 1


def test_runs_are_moved_between_tenants_only_if_that_is_said(run: Commands) -> None:
    filled(run.url, ("doer", "a", "acme"), ("doer", "b", None), ("doer", "c", "zenith"))
    assert run.json("tenant", "set", "new", "--yes")["runs"] == 1
    assert run.json("tenant", "set", "new", "--yes", "--from", "acme")["runs"] == 1
    assert {each.run_key: each.tenant for each in rows(run.url)} == {"a": "new", "b": "new", "c": "zenith"}
    assert run.json("show", "a", "--tenant", "new")["tenant"] == "new"
    assert run("tenant", "set", "new", "--yes", "--from", "new")[0] == 2


def test_without_a_filter_it_asks(run: Commands) -> None:
    filled(run.url, ("doer", "a", None))
    code, _, err = run("tenant", "set", "acme")
    assert (code, "Add --yes to give 1 run without a tenant to tenant 'acme'" in err) == (2, True)
    assert {each.tenant for each in rows(run.url)} == {""}


@pytest.mark.parametrize(("answer", "code", "tenant"), [("n", 1, ""), ("", 1, ""), ("y", 0, "acme"), ("\x03", 130, "")])
async def test_a_person_is_asked(tmp_path: Path, answer: str, code: int, tenant: str) -> None:
    url = str(tmp_path / "runs.db")
    await asyncio.to_thread(filled, url, ("doer", "a", None))
    master, slave = pty.openpty()
    program = (
        "import os, sys; os.setsid(); import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "from agent_runtime_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "tenant", "set", "acme", "--url", url, stdin=slave,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{ROOT}/src"},
    )  # fmt: skip
    os.close(slave)
    assert process.stderr is not None
    question = await asyncio.wait_for(process.stderr.readuntil(b"[y/N] "), 60)
    assert question == b"Give 1 run without a tenant to tenant 'acme'? [y/N] "
    os.write(master, answer.encode() if answer == "\x03" else f"{answer}\n".encode())
    assert await asyncio.wait_for(process.wait(), 60) == code
    os.close(master)
    assert {each.tenant for each in await asyncio.to_thread(rows, url)} == {tenant}


# -- conversations


async def answer(ctx: Any) -> Any:
    answered = {"role": "assistant", "content": f"message {len(ctx.input_messages)}"}
    return RunResult({}, [*ctx.input_messages, answered])


def talked(url: str, *runs: tuple[str, str, str | None], agent: str = "talker") -> None:
    """Execute runs (run key, conversation, tenant) with the conversations of the store."""

    async def act() -> None:
        async with AgentRunner.open(url, config=RunnerConfig(park_after=0, max_retries=1)) as runner:
            runner.registry.register(Script(answer, "talker"))
            for key, conversation, tenant in runs:
                given = {"conversation_id": conversation, "messages": [{"role": "user", "content": key}]}
                await runner.submit(agent, given, run_id=key, tenant=tenant)
                await runner.run_once()

    asyncio.run(act())


def said(url: str, conversation: str, tenant: str | None) -> list[Any]:
    async def act() -> list[Any]:
        async with AgentRunner.open(url) as runner:
            stores: Any = runner.persistence
            found = await stores.for_tenant(tenant).conversations.get(UUID(conversation))
            return [] if found is None else [each.content for each in found.messages]

    return asyncio.run(act())


TALK, OTHER = "6a0f2b1e-5c4d-4e8f-9b7a-0c1d2e3f4a5b", "7b1f3c2e-6d5e-4f9a-8c8b-1d2e3f4a5b6c"


def test_a_conversation_follows_its_runs_when_the_last_one_is_moved(run: Commands) -> None:
    talked(run.url, ("a-1", TALK, None), ("a-2", TALK, None), ("b-1", OTHER, None))
    before = said(run.url, TALK, None)
    assert len(before) == 4
    code, out, err = run("tenant", "set", "acme", "--prefix", "a-1")
    assert (code, out) == (1, "1 run given to tenant 'acme', with 0 child runs and 0 conversations\n")
    assert f"conversation '{TALK}': run 'a-2' without a tenant names it" in err
    assert said(run.url, TALK, "acme") == []
    assert run.json("tenant", "set", "acme", "--prefix", "a-", "--dry-run")["conversations"] == 1
    assert run.json("tenant", "set", "acme", "--prefix", "a-")["conversations"] == 1
    assert (said(run.url, TALK, "acme"), said(run.url, TALK, None)) == (before, [])
    assert len(said(run.url, OTHER, None)) == 2
    talked(run.url, ("a-3", TALK, "acme"))
    assert said(run.url, TALK, "acme")[:4] == before, "a later run of the tenant continues it"
    assert run.json("tenant", "set", "acme", "--prefix", "a-")["conversations"] == 0


def test_a_conversation_that_the_tenant_has_stays(run: Commands) -> None:
    talked(run.url, ("a-1", TALK, None), ("b-1", TALK, "acme"))
    told = run.json("tenant", "set", "acme", "--prefix", "a-")
    assert (told["runs"], told["conversations"]) == (1, 0)
    assert told["kept"] == {TALK: f"conversation {TALK!r}: the tenant has a conversation with this id"}
    assert (len(said(run.url, TALK, None)), len(said(run.url, TALK, "acme"))) == (2, 2)


def test_a_conversation_is_moved_by_the_call_after_a_killed_one(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    talked(run.url, ("a-1", TALK, None), ("a-2", TALK, None))

    async def killed(*args: Any) -> bool:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(PersistenceManager, "assign_conversation", killed)
        with pytest.raises(Killed):
            run("tenant", "set", "acme", "--prefix", "a-")
    assert {each.tenant for each in rows(run.url)} == {"acme"}
    assert run.json("tenant", "set", "acme", "--prefix", "a-")["conversations"] == 1
    assert len(said(run.url, TALK, "acme")) == 4


# -- interrupted calls


async def everything(runner: AgentRunner) -> None:
    """Runs with child runs, a fork, a group with a waiting, a queued and a delayed run, and keys."""
    runner.registry = registry()
    await runner.submit("parent", {}, run_id="tree-done")
    await work(runner)
    await runner.submit("parent", {}, run_id="tree-waits")
    await runner.run_once()
    await runner.submit("asker", {}, run_id="asks")
    await runner.submit("asker", {}, run_id="lane-1", concurrency_key="account")
    await runner.submit("doer", {}, run_id="lane-2", concurrency_key="account", idempotency_key="once")
    await runner.submit("doer", {}, run_id="lane-3", concurrency_key="account", delay=LONG)
    while await runner.run_once():
        pass
    await runner.submit("parent", {}, run_id="tree-new")
    await runner.run_once()
    await runner.fork("asks", new_run_id="asks-fork")


def described(found: list[RunRow]) -> list[tuple[Any, ...]]:
    return sorted((each.run_id, each.tenant, each.status, each.blocked, each.concurrency_key or "") for each in found)


async def moved(runner: AgentRunner) -> Assignment:
    return await assign_runs(runner, "acme", RunFilter())


@pytest.mark.parametrize("after_commit", [False, True])
def test_a_call_that_is_killed_at_any_commit_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_commit: bool
) -> None:
    assign, left = RunQueue.assign, 10**6

    async def interrupted(self: RunQueue, run_id: str, tenant: str) -> str:
        nonlocal left
        left -= 1
        if left < 0 and not after_commit:
            raise Killed
        outcome = await assign(self, run_id, tenant)
        if left < 0:
            raise Killed
        return outcome

    async def at(name: str, *numbers: int) -> list[RunRow]:
        nonlocal left
        config = RunnerConfig(park_after=0, max_retries=1)
        async with AgentRunner.open(tmp_path / name, config=config, persistence=None) as runner:
            await everything(runner)
            for number in numbers:
                left = number
                with pytest.raises(Killed):
                    await moved(runner)
            left = 10**6
            found = await moved(runner)
            assert (found.skipped, found.taken) == ({}, {})
            rows = await runner.queue.find(RunFilter())
            assert {each.tenant for each in rows} == {"acme"}
            active = [each for each in rows if each.concurrency_key and each.status in LIVE and not each.blocked]
            assert len(active) == 1
            for each in rows:
                if each.run_key:
                    assert (await runner.queue.require(each.run_key, "acme")).run_id == each.run_id
                    again = await runner.submit(each.agent, {}, run_id=each.run_key, tenant="acme")
                    assert str(again) == each.run_id
            await work(runner)
            for each in await runner.queue.find(RunFilter(statuses=("waiting",))):
                await runner.approve(each.run_id, "plan")
            await work(runner)
            ended = await runner.queue.find(RunFilter())
            assert {each.run_key for each in ended if each.status != "succeeded"} == {"lane-3"}
            assert {each.tenant for each in ended} == {"acme"}
            agents = [each.agent for each in ended]
            assert [agents.count(each) for each in ("parent", "child", "grandchild")] == [3, 6, 6], "none is repeated"
            return rows

    monkeypatch.setattr(RunQueue, "assign", interrupted)
    calls = len(asyncio.run(at("whole.db")))
    assert calls > 15
    for number in range(calls):
        asyncio.run(at(f"{number}.db", number))


@pytest.mark.parametrize("seed", range(60))
async def test_a_dry_run_says_what_the_call_does(seed: int) -> None:
    """Runs of concurrency keys with several slots, of two tenants: active, parked, running, blocked and delayed."""
    rng = random.Random(seed)
    async with AgentRunner.open("memory://") as runner:
        queue = runner.queue
        for number in range(rng.randrange(4, 14)):
            await runner.submit(
                "a", run_id=f"r{number}", tenant=rng.choice([None, "acme"]), priority=rng.randrange(3),
                concurrency_key=rng.choice([None, "k", "k", "k2"]), concurrency_limit=rng.randrange(1, 4),
                delay=rng.choice([0, 0, LONG]),
            )  # fmt: skip
            if rng.random() < 0.5 and (found := await queue.claim_rows("w", LONG)):
                status = rng.choice(["running", "waiting", "waiting", "succeeded"])
                if status != "running":
                    update = queue.unchanged_update(found[0], found[0].claim_id)._replace(status=status)
                    await queue.settle(found[0].run_id, update)
        expected = await assign_runs(runner, "acme", RunFilter(), dry_run=True)
        assert await assign_runs(runner, "acme", RunFilter()) == expected


async def test_a_free_slot_of_the_tenant_takes_a_parked_run() -> None:
    async with AgentRunner.open("memory://") as runner:
        for name, tenant in (("mine", None), ("theirs", "acme")):
            options: Any = {"concurrency_key": "k", "concurrency_limit": 2}
            await runner.submit("a", run_id=name, tenant=tenant, **options)
        for row in await runner.queue.claim_rows("w", LONG, limit=2):
            update = runner.queue.unchanged_update(row, row.claim_id)._replace(status="waiting")
            await runner.queue.settle(row.run_id, update)
        found = await assign_runs(runner, "acme", RunFilter(), dry_run=True)
        assert (found.runs, found.taken) == (1, {})
