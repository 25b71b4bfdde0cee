"""Texts that stores cut, encode or normalise: by every way in, what comes out is equal, or a typed error refused it."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunnerConfig
from agent_runtime_core._core.codec.tagged import HALVES
from agent_runtime_core.cli.main import main as command
from agent_runtime_core.config import configure, get_config
from agent_runtime_core.errors import AgentRuntimeError
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.persistence import (
    AuditEntry,
    AuditEventType,
    Conversation,
    ConversationMessage,
    Embedding,
    ErrorRecord,
    Fact,
    PerformanceMetric,
    PersistenceManager,
    Summary,
    Task,
    TaskList,
    ToolCall,
)
from agent_runtime_core.runner.backends import open_url
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.backends import SERVERS, backends
from tests.support.fault_runs import Agent

#: NUL, halves of characters as from bytes that are no UTF-8, byte order marks, and what else is lost on the way.
ODD = (
    "\0", "a\0b", "a\0", "\0\0", "\udcff", "a\ud800", "\udc80b", "\ude00\ud83d", "\ud83d\ude00", "\ufeff", "\ufeffa",
    "a\ufeff", "\ufffe", "\x1b", "\x1b0000", "\x7f", "\x85", "\r\n", " ", " a ", "\u2028", "e\u0301", "é", "\U0001f600",
    "\U0010ffff", '"', "\\", "\\u0000", "$", '{"$":"uuid","v":1}', "null", "%", "{0}", "{a}", "*", "..", "A", "a:b",
    "x" * 600,
)  # fmt: skip
ALPHABET = (
    "\0\x01\t\n\x1b\x7f\x85\xa0é\u0301\u200d\u202e\u2028\ud800\udbff\udc80\udfff\ufeff\uffff\U0001f600\"\\$:/%{}'a 0"
)


def texts(seed: str, many: int = 12) -> list[str]:
    random = Random(seed)
    return list(
        dict.fromkeys([*ODD, *("".join(random.choices(ALPHABET, k=random.randint(1, 12))) for _ in range(many))])
    )


def tree(text: str) -> dict[str, list[str]]:
    """The text as a value and as a key, of which none may hold two halves that JSON would join."""
    return {HALVES.sub("", text): [text]}


Way = Callable[["Place", str], Awaitable[Any]]
NAMES: dict[str, Way] = {}
VALUES: dict[str, Way] = {}


def name(way: Way) -> Way:
    """A text that a store looks for: one that some store could not find again may be refused, on all of them."""
    NAMES[way.__name__] = way
    return way


def value(way: Way) -> Way:
    """A text that is only kept: none is refused."""
    VALUES[way.__name__] = way
    return way


class Place:
    """A runner and stores on one store, which is the same for all of them."""

    def __init__(self, runner: AgentRunner, stores: PersistenceManager) -> None:
        self.runner, self.stores = runner, stores

    async def ran(self, code: Callable[[Any], Awaitable[Any]], *given: Any) -> tuple[Any, uuid.UUID]:
        """What a run of that code gave, as it was stored, and its id."""
        run_id = uuid.uuid4()
        await self.runner.execute(Agent("agent", code), run_id, *given)
        result = (await self.runner.wait(run_id)).raise_for_status()
        return result.final_output.get("value"), run_id

    async def again(self, code: Callable[[Any], Awaitable[Any]]) -> tuple[Any, uuid.UUID]:
        """What it gave in a second attempt, which goes by the records of the first."""

        async def twice(ctx: Any) -> Any:
            value = await code(ctx)
            if ctx.attempt == 1:
                raise RuntimeError("once more")
            return value

        return await self.ran(twice)


# -- runs


@name
async def run_id(at: Place, text: str) -> Any:
    await at.runner.submit("nobody", run_id=text)
    return (await at.runner.get_run(text)).run_key


@name
async def agent_key(at: Place, text: str) -> Any:
    run = await at.runner.submit(text)
    [found] = await at.runner.runs(agent=text)
    assert found.run_id == run
    [row] = await at.runner.queue.claim_rows("w", agent_keys=[text])
    return row.agent


@name
async def idempotency_key(at: Place, text: str) -> Any:
    run = await at.runner.submit("nobody", idempotency_key=text)
    assert await at.runner.submit("nobody", idempotency_key=text) == run
    return (await at.runner.queue.require(run)).idem_key


@name
async def concurrency_key(at: Place, text: str) -> Any:
    first, second = [await at.runner.submit("nobody", concurrency_key=text) for _ in range(2)]
    assert [(await at.runner.get_run(each)).held for each in (first, second)] == [False, True]
    return (await at.runner.get_run(first)).concurrency_key


@name
async def worker_id(at: Place, text: str) -> Any:
    key = uuid.uuid4().hex
    run = await at.runner.submit(key)
    [row] = await at.runner.queue.claim_rows(text, agent_keys=[key])
    assert row.run_id == str(run)
    return (await at.runner.get_run(run)).worker


@name
async def signals_name(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        await at.runner.signal(ctx.run_id, f"{text}b", 0)
        await at.runner.signal(ctx.run_id, text, 1)
        return await ctx.wait_for_signal(text)

    value, run = await at.again(code)
    assert value == 1
    return (await at.runner.queue.mail(str(run)))[1].name


@name
async def message_id(at: Place, text: str) -> Any:
    run = await at.runner.submit("nobody")
    for each in (text, f"{text}b", text):
        await at.runner.signal(run, "go", message_id=each)
    first, second = await at.runner.queue.mail(str(run))
    assert second.msg_id == f"{text}b"
    return first.msg_id


@name
async def steps_name(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        return await ctx.step(text, lambda: 1), await ctx.step(f"{text}b", lambda: 2)

    value, run = await at.again(code)
    assert value == (1, 2)
    return next(each.name for each in await at.runner.state_store.records(run) if each.kind == "done")


@name
async def steps_key(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        return [await ctx.step("step", lambda n=n: n, key=each) for n, each in enumerate((text, f"{text}b"))]

    value, run = await at.again(code)
    assert value == [0, 1]
    records = await at.runner.state_store.records(run)
    return next(each.key for each in records if each.kind == "done").removeprefix("k:")


@name
async def listed_steps_name(at: Place, text: str) -> Any:
    async def one(ctx: Any, state: Any) -> int:
        return 1

    value, run = await at.again(lambda ctx: StepExecutor(ctx).run([Step(text, one), Step(f"{text}b", one)]))
    assert value == {text: 1, f"{text}b": 1}
    return next(each.name for each in await at.runner.state_store.records(run) if each.kind == "done")


@name
async def event_type(at: Place, text: str) -> Any:
    _, run = await at.ran(lambda ctx: ctx.emit(text, {}))
    [found] = [each for each in await at.runner.event_bus.get_events(run) if each.payload == {}]
    return found.event_type


@value
async def input(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        return ctx.params

    return (await at.ran(code, {"params": tree(text)}))[0]


@value
async def metadata(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        return ctx.metadata["key"]

    return (await at.ran(code, {}, {"key": tree(text)}))[0]


@value
async def result(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        return RunResult({"value": tree(text)}, [{"role": "user", "content": text}], artifacts={"key": text})

    value, run = await at.ran(code)
    told = await at.runner.wait(run)
    assert told.final_messages[0]["content"] == text
    assert told.artifacts == {"key": text}
    return value


@value
async def steps_result(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        return await ctx.step("step", lambda: tree(text) if ctx.attempt == 1 else None)

    return (await at.again(code))[0]


@value
async def signals_payload(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        await at.runner.signal(ctx.run_id, "go", tree(text))
        return await ctx.wait_for_signal("go")

    return (await at.again(code))[0]


@value
async def events_payload(at: Place, text: str) -> Any:
    _, run = await at.ran(lambda ctx: ctx.emit("said", tree(text)))
    [found] = [each for each in await at.runner.event_bus.get_events(run) if each.event_type == "said"]
    return found.payload


@value
async def checkpoint(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        if ctx.attempt == 1:
            await ctx.checkpoint(tree(text))
        return await ctx.get_state()

    return (await at.again(code))[0]


@value
async def failure(at: Place, text: str) -> Any:
    async def code(ctx: Any) -> Any:
        raise ValueError(text)

    run = uuid.uuid4()
    first = await at.runner.execute(Agent("agent", code), run)
    kept = await at.runner.wait(run)
    assert first.error is not None
    assert kept.error is not None
    assert kept.error.message == first.error.message
    return tree(kept.error.message)


# -- stores


@name
async def memorys_key(at: Place, text: str) -> Any:
    await at.stores.memory.clear()
    for n, each in enumerate((text, f"{text}b")):
        await at.stores.memory.set(each, n)
    assert [await at.stores.memory.get(each) for each in (text, f"{text}b")] == [0, 1]
    assert await at.stores.memory.delete(f"{text}b")
    [key] = await at.stores.memory.list_keys()
    return key


@name
async def preferences_key(at: Place, text: str) -> Any:
    await at.stores.preferences.set(text, 1)
    [key] = await at.stores.preferences.get_all()
    assert await at.stores.preferences.delete(key)
    return key


@name
async def facts_key(at: Place, text: str) -> Any:
    await knowledge(at).save_fact(Fact(key=text, value=1))
    fact = await knowledge(at).get_fact_by_key(text)
    return fact and fact.key


@name
async def metrics_name(at: Place, text: str) -> Any:
    await audit(at).record_metric(PerformanceMetric(name=text, value=1.0))
    [found] = await audit(at).get_metrics(text)
    return found.name


@value
async def memorys_value(at: Place, text: str) -> Any:
    await at.stores.memory.set("key", tree(text))
    return await at.stores.memory.get("key")


@value
async def preferences_value(at: Place, text: str) -> Any:
    await at.stores.preferences.set("key", tree(text))
    value = await at.stores.preferences.get("key")
    await at.stores.preferences.delete("key")
    return value


@value
async def conversation(at: Place, text: str) -> Any:
    call = ToolCall(id=text, name=text, arguments={"key": text})
    message = ConversationMessage(
        role=text,
        content=text,
        tool_calls=[call],
        tool_call_id=text,
        model=text,
        usage={"key": text},
        metadata={"key": text},
    )
    kept = Conversation(title=text, agent_key=text, summary=text, metadata={"key": text}, messages=[message])
    await at.stores.conversations.save(kept)
    more = ConversationMessage(role="tool", content=tree(text))
    await at.stores.conversations.add_message(kept.id, more)
    found = await at.stores.conversations.get(kept.id)
    assert found is not None
    assert [each.id for each in await at.stores.conversations.list_conversations(agent_key=text)] == [kept.id]
    assert plain(found, "messages", "updated_at") == plain(kept, "messages", "updated_at")
    assert plain(found.messages[0]) == plain(message)
    return found.messages[1].content


@value
async def task(at: Place, text: str) -> Any:
    kept = Task(name=text, description=text, metadata={"key": text}, checkpoint_data={"key": text}, last_error=text)
    tasks = TaskList(name=text, tasks=[kept])
    await at.stores.tasks.save(tasks)
    found = await at.stores.tasks.get(tasks.id)
    assert found is not None
    assert found.name == text
    assert plain(found.tasks[0], "updated_at") == plain(kept, "updated_at")
    await at.stores.tasks.delete(tasks.id)
    return tree(found.tasks[0].name)


@value
async def fact(at: Place, text: str) -> Any:
    kept = Fact(key="key", value=tree(text), source=text, metadata={"key": text})
    await knowledge(at).save_fact(kept)
    found = await knowledge(at).get_fact(kept.id)
    assert found is not None
    assert plain(found, "updated_at") == plain(kept, "updated_at")
    return found.value


@value
async def documents(at: Place, text: str) -> Any:
    summary = Summary(content=text, metadata={"key": text})
    await knowledge(at).save_summary(summary)
    found = await knowledge(at).get_summary(summary.id)
    assert found is not None
    assert plain(found) == plain(summary)
    embedding = Embedding(vector=[1.0, 0.0], content=text, content_type=text, model=text, metadata=tree(text))
    await knowledge(at).save_embedding(embedding)
    [(near, _)] = await knowledge(at).search_similar([1.0, 0.0], 1, content_type=text)
    assert near.content == text
    await knowledge(at).delete_embedding(near.id)
    return near.metadata


@value
async def audits(at: Place, text: str) -> Any:
    entry = AuditEntry(
        event_type=AuditEventType.CUSTOM, run_id=uuid.uuid4(), agent_key=text, action=text, details=tree(text),
        actor_type=text, actor_id=text, request_id=text,
    )  # fmt: skip
    await audit(at).log_event(entry)
    [found] = await audit(at).get_events(run_id=entry.run_id)
    assert plain(found) == plain(entry)
    error = ErrorRecord(error_type=text, message=text, stack_trace=text, agent_key=text)
    await audit(at).log_error(error)
    assert plain((await audit(at).get_errors(limit=1))[0]) == plain(error)
    return found.details


def knowledge(at: Place) -> Any:
    return at.stores.knowledge


def audit(at: Place) -> Any:
    return at.stores.audit


def plain(model: Any, *but: str) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(model).items() if name not in but}


# -- the tests


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Place]:
    queue, bus, state = open_url(url, max_retries=2)
    runner = AgentRunner(queue, bus, state, RunnerConfig(max_retries=2, retry_backoff_base=0))
    async with runner, PersistenceManager.open(url) as stores:
        yield Place(runner, stores)


@pytest.fixture(params=backends(["memory", "sqlite", "redis", "postgres"], default=["sqlite", "redis"]))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        found: str = request.getfixturevalue(f"{request.param}_url")
        return found
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'there.db'}"


async def refused(way: Way, at: Place, text: str) -> bool:
    """Whether it was, by an error of ours that a log and a terminal can show."""
    try:
        assert await way(at, text) == text, ascii(text)
    except AgentRuntimeError as error:
        return 20 < len(str(error).encode()) < 1000
    return False


@pytest.mark.parametrize("way", NAMES.values(), ids=NAMES)
async def test_a_name_is_found_again_or_refused_on_every_store(way: Way, url: str) -> None:
    async with opened(url) as at:
        given = texts(way.__name__)
        not_kept = {text for text in given if await refused(way, at, text)}
    assert all(not text.isprintable() or len(text) > 512 for text in not_kept), not_kept


@pytest.mark.parametrize("way", VALUES.values(), ids=VALUES)
async def test_a_value_comes_back_equal_on_every_store(way: Way, url: str) -> None:
    async with opened(url) as at:
        for text in texts(way.__name__):
            assert await way(at, text) == tree(text), ascii(text)


def test_a_command_ends_with_a_code_and_prints_what_can_be_printed(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    url = str(tmp_path / "there.db")

    async def fails(ctx: Any) -> None:
        await ctx.emit("said", {"text": ctx.params["text"]})
        raise ValueError(ctx.params["text"])

    async def runs() -> None:
        async with opened(url) as at:
            for n, text in enumerate(ODD):
                await at.runner.execute(Agent("agent", fails), f"r{n}", {"params": {"text": text}}, {"text": text})

    asyncio.run(runs())
    for n, text in enumerate(ODD):
        for args in (["show", f"r{n}", "--events"], ["show", f"r{n}", "--json"], ["runs", "--agent", text]):
            assert command([*args, "--url", url]) in (0, 1), ascii(text)
        for args in (["show", text, "--url", url], ["cancel", text, "--url", url]):
            assert command(args) in (1, 2), ascii(text)
    assert b"\x1b" not in capfdbinary.readouterr().out


@pytest.mark.parametrize("setting", ["default_model", "model_provider", "sqlite_path", "redis_url", "queue_backend"])
def test_a_setting_is_as_it_was_given_or_refused(setting: str) -> None:
    for text in texts(setting):
        try:
            configure(**{setting: text})
        except AgentRuntimeError as error:
            assert str(error).encode()  # noqa: PT017 - either may be
        else:
            assert getattr(get_config(), setting) == text
            assert repr(get_config()).encode()
