"""The redaction hook: before logs and sinks, and with `redact_stored` before the store."""

from __future__ import annotations

import gc
import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent_runtime_core._core.log import log
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import InvalidArgument, RedactionFailed, StepExecutionError
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.persistence import Conversation, ConversationMessage, PersistenceManager
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.tracing import JsonFormatter, TraceSink
from tests.support.runs import Script

CANARY = "canary-of-contents"
SAFE = "[redacted]"


def redact(kind: str, value: Any) -> Any:
    """Replace the canary everywhere in a value."""
    if isinstance(value, str):
        return value.replace(CANARY, SAFE)
    if isinstance(value, dict):
        return {redact(kind, name): redact(kind, each) for name, each in value.items()}
    return [redact(kind, each) for each in value] if isinstance(value, list) else value


def broken(kind: str, value: Any) -> Any:
    raise RuntimeError(f"{kind} {value}")


def not_json(kind: str, value: Any) -> Any:
    return object()


class Seen(TraceSink):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def trace(self, event: dict[str, Any]) -> None:
        self.events.append(event)


@dataclass
class Person:
    name: str
    age: int


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    yield
    reset_config()
    gc.collect()  # a hook applies to the log while something uses it


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield stream
    log.removeHandler(handler)
    log.setLevel(level)


def bytes_under(folder: Path) -> bytes:
    return b"\n".join(each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file())


async def speak(ctx: Any) -> RunResult:
    seen: dict[str, Any] = {"input": ctx.input, "metadata": ctx.metadata}

    async def tell() -> dict[str, Any]:
        return {"said": CANARY, CANARY: 1}

    async def person() -> Person:
        return Person(CANARY, 40)

    async def add(ctx: Any, state: Any) -> str:
        state["said"] = [CANARY]
        return CANARY

    async def see(ctx: Any, state: Any) -> Any:
        return dict(state)

    async def fail() -> None:
        raise ValueError(CANARY, 5)

    seen["step"] = await ctx.step("tell", tell)
    seen["typed"] = (await ctx.step("person", person)).name
    found = await StepExecutor(ctx).run([Step("one", add), Step("two", see)], initial_state={"begin": CANARY})
    seen["list"] = found
    try:
        await ctx.step("fail", fail)
    except StepExecutionError as error:
        seen["error"] = [error.message, str(error.__cause__), [str(each) for each in error.error_args]]
    await ctx.checkpoint({"at": CANARY})
    seen["state"] = await ctx.get_state()
    await ctx.emit("my.event", {"text": CANARY})
    seen["value"] = await ctx.recorded_value("value", _value)
    ctx.trace("llm.call", {"model": "m", "input": [{"role": "user", "content": CANARY}], "usage": {"total_tokens": 3}})
    log.warning("says %s", CANARY)
    seen["answer"] = await ctx.wait_for_signal("answer")
    seen["messages"] = await ctx.messages()
    return RunResult({"seen": seen}, final_messages=[{"role": "assistant", "content": CANARY}])


async def _value() -> str:
    return CANARY


async def crash(ctx: Any) -> Any:
    raise LookupError(CANARY)


def opened(url: str, *sinks: TraceSink, **settings: Any) -> AgentRunner:
    configure(park_after=0, max_retries=1, **settings)
    runner = AgentRunner.open(url, trace_sinks=sinks)
    for name, body in (("speaker", speak), ("crasher", crash)):
        runner.registry.unregister(name)
        runner.registry.register(Script(body, name))
    return runner


async def executed(runner: AgentRunner) -> dict[str, Any]:
    await runner.submit("speaker", {"text": CANARY}, run_id="r", metadata={"note": CANARY})
    await runner.run_once()
    await runner.signal("r", "answer", {"text": CANARY})
    await runner.send("r", CANARY)
    await runner.run_once()
    result = await runner.wait("r", timeout=5)
    result.raise_for_status()
    seen: dict[str, Any] = result.final_output["seen"]
    return seen


async def test_nothing_leaves_by_logs_and_sinks(tmp_path: Path, logged: io.StringIO) -> None:
    sink = Seen()
    async with opened(str(tmp_path / "runs.db"), sink, redact=redact) as runner:
        seen = await executed(runner)
        assert seen["step"]["said"] == CANARY, "the agent and the store have the value itself"
        await runner.execute("crasher", run_id="c")
        log.exception("failed with %s", CANARY, exc_info=ValueError(CANARY))
    traced = repr(sink.events)
    assert CANARY not in traced
    assert SAFE in traced
    assert {"run.started", "step.completed", "my.event", "llm.call", "end_run"} <= {
        each["type"] for each in sink.events
    }
    assert CANARY not in logged.getvalue()
    assert f"says {SAFE}" in logged.getvalue()
    assert f"ValueError: {SAFE}" in logged.getvalue()
    assert CANARY.encode() in bytes_under(tmp_path)


async def test_what_is_stored_is_what_the_agent_gets(tmp_path: Path, logged: io.StringIO) -> None:
    url = str(tmp_path / "runs.db")
    async with opened(url, redact=redact, redact_stored=True) as runner:
        seen = await executed(runner)
        events = [event.payload async for event in runner.stream("r")]
        await runner.execute("crasher", run_id="c")
        assert CANARY not in json.dumps([dict(each) for each in events], default=str)
    assert CANARY not in json.dumps(seen)
    assert seen["step"] == {"said": SAFE, SAFE: 1}
    assert seen["error"] == [f"('{SAFE}', 5)", f"('{SAFE}', 5)", [SAFE, "5"]]
    assert seen["list"]["two"] == {"begin": SAFE, "said": [SAFE]}
    assert CANARY.encode() not in bytes_under(tmp_path)
    assert CANARY not in logged.getvalue()


async def test_a_resumed_run_sees_what_the_first_execution_saw(tmp_path: Path) -> None:
    url, settings = str(tmp_path / "runs.db"), {"redact": redact, "redact_stored": True}
    shown: list[Any] = []

    async def twice(ctx: Any) -> Any:
        shown.append([ctx.input, await ctx.step("tell", _value), await ctx.recorded_value("value", _value)])
        await ctx.wait_for_signal("go")
        return None

    for _ in range(2):
        async with opened(url, **settings) as runner:
            runner.registry.register(Script(twice, f"twice{len(shown)}"))
            runner.registry.unregister("twice")
            runner.registry.register(Script(twice, "twice"))
            await runner.submit("twice", {"text": CANARY}, run_id="t")
            if shown:
                await runner.signal("t", "go", CANARY)
            await runner.run_once()
    assert shown == [[{"text": SAFE}, SAFE, SAFE]] * 2


async def test_memory_has_no_content_either(logged: io.StringIO) -> None:
    async with opened("memory://", redact=redact, redact_stored=True) as runner:
        seen = await executed(runner)
        assert CANARY not in json.dumps(seen)
        run = await runner.get_run("r")
        assert (run.input["text"], run.metadata["note"]) == (SAFE, SAFE)


@pytest.mark.parametrize("hook", [broken, not_json])
async def test_a_sink_gets_ids_and_names_if_the_hook_fails(hook: Any, tmp_path: Path, logged: io.StringIO) -> None:
    sink = Seen()
    async with opened(str(tmp_path / "runs.db"), sink, redact=hook) as runner:
        await executed(runner)
        assert runner.tracer is not None
    assert runner.tracer.redaction_failures > 5
    assert CANARY not in repr(sink.events)
    steps = [each for each in sink.events if each["type"] == "step.completed"]
    assert {each["step_name"] for each in steps} >= {"tell", "person", "one", "two"}
    assert all(each["step_id"] and "duration_ms" in each for each in steps)
    text = logged.getvalue()
    assert CANARY not in text
    assert text.count("the redact hook failed") == 1
    assert "says [left out]" in text


@pytest.mark.parametrize("hook", [broken, not_json])
async def test_a_write_fails_if_the_hook_fails(hook: Any, tmp_path: Path) -> None:
    async with opened(str(tmp_path / "runs.db"), redact=hook, redact_stored=True) as runner:
        with pytest.raises(RedactionFailed, match="for the input of run ") as failed:
            await runner.submit("speaker", {"text": CANARY})
        assert CANARY not in str(failed.value)
        assert failed.value.__cause__ is None
        assert failed.value.__context__ is None
        run = await runner.submit("speaker", {})
        with pytest.raises(RedactionFailed, match=f"for the message of run {run}"):
            await runner.signal(run, "answer", CANARY)
    assert CANARY.encode() not in bytes_under(tmp_path)


def only_inputs(kind: str, value: Any) -> Any:
    return value if kind == "input" else broken(kind, value)


async def test_a_run_whose_step_result_is_not_redacted_fails_and_says_why(tmp_path: Path) -> None:
    async with opened(str(tmp_path / "runs.db"), redact=only_inputs, redact_stored=True) as runner:
        result = await runner.execute("speaker", "r", {"text": "fine"})
        assert result.error is not None
        assert result.error.type == "RedactionFailed"
        result = await runner.execute("crasher", run_id="c")
        assert result.error is not None
        assert result.error.type == "LookupError"
        assert "left out" in result.error.message
    assert CANARY.encode() not in bytes_under(tmp_path)


async def test_a_result_that_is_no_value_of_its_type_is_refused(tmp_path: Path) -> None:
    def wrong(kind: str, value: Any) -> Any:
        return {"name": 5, "years": "x"} if kind == "result" and "age" in value else value

    async def body(ctx: Any) -> Any:
        async def person() -> Person:
            return Person(CANARY, 40)

        with pytest.raises(RedactionFailed, match=r"returned a value that is no .*Person for the result of step 'who'"):
            await ctx.step("who", person)

    async with opened(str(tmp_path / "runs.db"), redact=wrong, redact_stored=True) as runner:
        (await runner.execute(Script(body, "body"), run_id="r")).raise_for_status()


async def test_messages_of_conversations_are_redacted(tmp_path: Path) -> None:
    configure(redact=redact, redact_stored=True, backend_url=f"sqlite:///{tmp_path / 'docs.db'}")
    async with PersistenceManager() as stores:
        talk = Conversation(id=uuid4(), messages=[ConversationMessage(role="user", content=CANARY)])
        await stores.conversations.save(talk)
        await stores.conversations.append(talk.id, [ConversationMessage(role="assistant", content=[{"text": CANARY}])])
        found = await stores.conversations.get_messages(talk.id)
        assert [each.content for each in found] == [SAFE, [{"text": SAFE}]]
    assert CANARY.encode() not in bytes_under(tmp_path)


async def test_the_conversation_of_a_run_is_redacted(tmp_path: Path) -> None:
    async def answer(ctx: Any) -> RunResult:
        return RunResult({"n": len(ctx.input_messages)}, final_messages=[
            *ctx.input_messages, {"role": "assistant", "content": f"{len(ctx.input_messages)} {CANARY}"}
        ])  # fmt: skip

    async with opened(str(tmp_path / "runs.db"), redact=redact, redact_stored=True) as runner:
        messages = [{"role": "user", "content": CANARY}]
        for number in range(2):
            asked = {"conversation_id": str(UUID(int=7)), "messages": messages}
            result = await runner.execute(Script(answer, "answerer"), f"t{number}", asked)
            assert result.final_output == {"n": 1 + 2 * number}
    assert CANARY.encode() not in bytes_under(tmp_path)


def test_the_settings_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="redact_stored must be set together with redact"):
        configure(redact_stored=True)
    with pytest.raises(InvalidArgument, match="redact must be a function or its place"):
        configure(redact=5)
    with pytest.raises(InvalidArgument, match="redact must be a function or its place"):
        configure(redact=_value)


async def test_the_hook_may_be_named(tmp_path: Path) -> None:
    async with opened(str(tmp_path / "runs.db"), redact=f"{__name__}:redact", redact_stored=True) as runner:
        await runner.submit("speaker", {"text": CANARY}, run_id="r")
        assert (await runner.get_run("r")).input == {"text": SAFE}
