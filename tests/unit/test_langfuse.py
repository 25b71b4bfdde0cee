"""What reaches Langfuse, decoded at a local receiver of its OTLP endpoint."""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent_runtime_core._core.ids import RunTrace
from agent_runtime_core._core.lazy_import import load
from agent_runtime_core.config import configure
from agent_runtime_core.errors import MissingDependency, NotConfigured
from agent_runtime_core.interfaces import ErrorInfo
from agent_runtime_core.testing.clock import START, VirtualClock
from agent_runtime_core.tracing import LangfuseTraceSink, Tracer, get_trace_sink
from tests.support.otlp_receiver import PATH, Receiver, Seen, clients_let_go, receiving

langfuse = pytest.importorskip("langfuse")

RUN = UUID("0192f000-0000-7000-8000-00000000000a")
CONVERSATION = UUID("0192f000-0000-7000-8000-0000000000cc")
SOON = 20.0  # seconds after which a test gives up
CANARY = "sk-lf-canary-5f3a"


class Sink(LangfuseTraceSink):
    """A sink that is told of runs without a tracer."""

    def begin(self, run_id: UUID, about: dict[str, Any]) -> None:
        self._tell("start_run", run_id, about)

    def log(self, run_id: UUID, kind: str, payload: dict[str, Any]) -> None:
        self._tell(kind, run_id, payload)

    def finish(self, run_id: UUID, outcome: str, about: dict[str, Any] | None = None) -> None:
        self._tell("end_run", run_id, {"outcome": outcome, **(about or {})})

    def _tell(self, kind: str, run_id: UUID, about: dict[str, Any]) -> None:
        self.trace({"time": self._clock.wall(), **about, "type": kind, "run_id": str(run_id)})


Make = Callable[..., Sink]

START_RUN: dict[str, Any] = {
    "agent_key": "calculator",
    "attempt": 1,
    "conversation_id": CONVERSATION,
    "metadata": {"tenant": "acme", "n": 7},
    "input": [{"role": "user", "content": "what is 2 + 3?"}],
    "time": START,
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as it:
        yield it


@pytest.fixture(autouse=True)
def _clients() -> Iterator[None]:
    with clients_let_go():
        yield


@pytest.fixture
def make(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Sinks with a key of their own: in a process there is one Langfuse client for each."""
    for name in ("PUBLIC_KEY", "SECRET_KEY", "HOST", "BASE_URL", "TRACING_ENVIRONMENT"):
        monkeypatch.delenv(f"LANGFUSE_{name}", raising=False)

    def sink(**options: Any) -> Sink:
        keys = {"public_key": f"pk-lf-{uuid4()}", "secret_key": CANARY, "host": receiver.url}
        return Sink(**{"clock": VirtualClock(), "content": True, **keys, **options})

    return sink


def call(turn: int, output: dict[str, Any], **about: Any) -> dict[str, Any]:
    """What the loop tells of a model call; turn n takes place from 10 n to 10 n + 2 seconds."""
    return {
        "step_id": f"llm-{turn}",
        "parent_id": None,
        "model": "gpt-4o",
        "provider": "openai",
        "input": [{"role": "user", "content": f"prompt {turn}"}],
        "output": output,
        "usage": {"prompt_tokens": 100 * turn, "completion_tokens": 20, "total_tokens": 100 * turn + 20},
        "cost_usd": 0.25 * turn,
        "started_at": START + 10 * turn,
        "ended_at": START + 10 * turn + 2,
        "error": None,
        "model_parameters": {"temperature": 0.5, "max_tokens": 100},
        **about,
    }


def tool(turn: int, name: str, **about: Any) -> dict[str, Any]:
    return {
        "step_id": f"tool-{turn}-{name}",
        "tool_name": name,
        "tool_call_id": f"call-{turn}",
        "input": {"a": turn},
        "output": f"result {turn}",
        "started_at": START + 10 * turn + 3,
        "ended_at": START + 10 * turn + 4,
        "error": None,
        **about,
    }


def three_turns(sink: Sink | Tracer, run_id: UUID = RUN, **start: Any) -> None:
    """Two turns that call tools, the second one two of them, and an answer."""
    log = sink.event if isinstance(sink, Tracer) else sink.log
    begin = sink.start_run if isinstance(sink, Tracer) else sink.begin
    begin(run_id, {**START_RUN, **start})
    log(run_id, "run.started", {"attempt": 1})
    log(run_id, "llm.call", call(1, {"role": "assistant", "tool_calls": [{"id": "call-1"}]}))
    log(run_id, "tool.call", {"tool_name": "add", "tool_args": {"a": 1}, "tool_call_id": "call-1"})
    log(run_id, "tool.done", tool(1, "add"))
    log(run_id, "tool.result", {"tool_name": "add", "tool_call_id": "call-1", "result": "result 1"})
    cached = {
        "prompt_tokens": 200, "completion_tokens": 30, "total_tokens": 230,
        "cached_tokens": 64, "cache_write_tokens": 16, "reasoning_tokens": 10,
    }  # fmt: skip
    log(run_id, "llm.call", call(2, {"role": "assistant", "content": ""}, usage=cached, model="o9", cost_usd=None))
    log(run_id, "tool.done", tool(2, "mul"))
    log(run_id, "tool.done", tool(2, "sub", started_at=START + 23.5, error="ZeroDivisionError: by 0", output=None))
    log(run_id, "llm.call", call(3, {"role": "assistant", "content": "it is 5"}))
    log(run_id, "assistant.message", {"content": "it is 5"})
    about = {"output": {"response": "it is 5"}, "usage": {"total_tokens": 670}, "error": None, "time": START + 40}
    finish = sink.end_run if isinstance(sink, Tracer) else sink.finish
    finish(run_id, "succeeded", about)


def of(receiver: Receiver, kind: str) -> list[Seen]:
    return receiver.of(kind)


def trace_of(run_id: UUID) -> str:
    return str(langfuse.Langfuse.create_trace_id(seed=str(run_id)))


def near(seconds: float) -> Any:
    return pytest.approx(seconds, abs=1e-5)


# -- what a run looks like


def test_a_three_turn_tool_agent_is_there_in_full(make: Make, receiver: Receiver) -> None:
    sink = make()
    three_turns(sink)
    sink.flush()
    assert set(receiver.paths) == {PATH}
    assert len(receiver.spans) == 7
    [root] = of(receiver, "agent")
    calls, tools = of(receiver, "generation"), of(receiver, "tool")
    assert [span.name for span in calls] == ["gpt-4o", "o9", "gpt-4o"]
    assert [span.name for span in tools] == ["add", "mul", "sub"]

    # One trace; everything below the one agent, which is the trace's root.
    assert {span.trace for span in receiver.spans} == {trace_of(RUN)}
    assert {span.parent for span in calls + tools} == {root.id}
    assert root.parent == ""
    assert {span.about["session.id"] for span in receiver.spans} == {str(CONVERSATION)}
    assert {span.about["langfuse.trace.name"] for span in receiver.spans} == {"calculator"}

    assert root.name == "calculator"
    assert (root.start, root.end) == (near(START), near(START + 40))
    assert root.json("input") == START_RUN["input"]
    assert root.json("output") == {"response": "it is 5"}
    told = {name: root.json(f"metadata.{name}") for name in ("run_id", "agent_key", "attempt", "tenant", "n")}
    assert told == {"run_id": str(RUN), "agent_key": "calculator", "attempt": 1, "tenant": "acme", "n": 7}
    assert root.json("metadata.outcome") == "succeeded"
    assert root.json("metadata.usage") == {"total_tokens": 670}

    for turn, span in enumerate(calls, 1):
        assert (span.start, span.end) == (near(START + 10 * turn), near(START + 10 * turn + 2))
        assert span.about["langfuse.observation.model.name"] == span.name
        assert span.json("model.parameters") == {"temperature": 0.5, "max_tokens": 100}
        assert span.json("input") == [{"role": "user", "content": f"prompt {turn}"}]
        assert span.json("metadata.step_id") == f"llm-{turn}"
        assert span.json("metadata.provider") == "openai"
    assert calls[0].json("usage_details") == {"input": 100, "output": 20, "total": 120}
    assert calls[1].json("usage_details") == {
        "input": 120, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 16,
        "output": 20, "output_reasoning_tokens": 10, "total": 230,
    }  # fmt: skip
    assert calls[0].json("cost_details") == {"total": 0.25}
    assert "langfuse.observation.cost_details" not in calls[1].about
    assert calls[2].json("cost_details") == {"total": 0.75}
    assert calls[2].json("output") == {"role": "assistant", "content": "it is 5"}

    assert [(span.start, span.end) for span in tools[:2]] == [
        (near(START + 13), near(START + 14)),
        (near(START + 23), near(START + 24)),
    ]
    assert tools[0].json("input") == {"a": 1}
    assert tools[0].about["langfuse.observation.output"] == "result 1"
    assert tools[0].json("metadata.tool_call_id") == "call-1"
    assert [span.failed for span in tools] == [False, False, True]
    assert tools[2].about["langfuse.observation.level"] == "ERROR"
    assert tools[2].about["langfuse.observation.status_message"] == "ZeroDivisionError: by 0"
    assert "langfuse.observation.output" not in tools[2].about
    assert not any("langfuse.observation.level" in span.about for span in [root, *calls, *tools[:2]])


def test_the_tenant_of_the_run_is_metadata_of_its_agent(make: Make, receiver: Receiver) -> None:
    sink = make()
    sink.trace({"type": "start_run", "run_id": str(RUN), "time": 1.0, "agent_key": "a", "tenant": "acme",
                "metadata": {"tenant": "the application's"}})  # fmt: skip
    sink.trace({"type": "end_run", "run_id": str(RUN), "time": 2.0, "outcome": "succeeded"})
    sink.flush()
    [root] = receiver.spans
    assert root.json("metadata.tenant") == "acme"


def test_through_a_tracer_it_is_the_same(make: Make, receiver: Receiver) -> None:
    tracer = Tracer([make()])
    runs = [uuid4() for _ in range(3)]
    for run in runs:
        three_turns(tracer, run)
    tracer.close(SOON)
    assert len(receiver.spans) == 21
    assert {span.trace for span in receiver.spans} == {trace_of(run) for run in runs}
    roots = {span.trace: span.id for span in of(receiver, "agent")}
    assert all(span.parent == roots[span.trace] for span in receiver.spans if span.kind != "agent")


def test_the_time_of_a_run_without_told_times_is_the_clocks(make: Make, receiver: Receiver) -> None:
    clock = VirtualClock()
    tracer = Tracer([make()], clock=clock)
    tracer.start_run(RUN, {"agent_key": "a"})
    clock.advance(5)
    tracer.end_run(RUN, "succeeded")
    tracer.close(SOON)
    [root] = receiver.spans
    assert (root.start, root.end) == (near(START), near(START + 5))
    assert "session.id" not in root.about


def test_a_resumed_run_goes_into_the_same_trace_and_tells_nothing_twice(make: Make, receiver: Receiver) -> None:
    first, later = make(), make()  # as two processes would have them
    first.begin(RUN, START_RUN)
    first.log(RUN, "llm.call", call(1, {}))
    first.finish(RUN, "parked", {"time": START + 12})
    later.begin(RUN, {**START_RUN, "attempt": 1, "time": START + 30, "trace": RunTrace(str(RUN), resumes=1)})
    later.log(RUN, "run.resumed", {"reason": "time came"})
    later.log(RUN, "llm.call", call(4, {}))
    later.finish(RUN, "succeeded", {"time": START + 50})
    first.flush()
    later.flush()
    assert {span.trace for span in receiver.spans} == {trace_of(RUN)}
    before, after = of(receiver, "agent")
    assert before.id != after.id
    assert before.parent == after.parent == ""
    assert before.json("metadata.outcome") == "parked"
    assert "langfuse.observation.level" not in before.about
    assert [span.parent for span in of(receiver, "generation")] == [before.id, after.id]
    [resumed] = of(receiver, "event")
    assert (resumed.name, resumed.parent) == ("run.resumed", after.id)
    assert len({span.id for span in receiver.spans}) == len(receiver.spans) == 5


def test_a_run_taken_up_again_before_it_was_let_go_leaves_no_agent_open(make: Make, receiver: Receiver) -> None:
    sink = make()
    sink.begin(RUN, START_RUN)
    sink.begin(RUN, {**START_RUN, "time": START + 9})
    sink.finish(RUN, "succeeded", {"time": START + 10})
    sink.finish(RUN, "succeeded", {"time": START + 11})
    sink.flush()
    before, after = of(receiver, "agent")
    assert (before.end, after.end) == (near(START + 9), near(START + 10))
    assert before.about["langfuse.observation.level"] == "WARNING"
    assert before.trace == after.trace


def test_runs_whose_end_never_comes_do_not_pile_up(
    make: Make, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core.tracing.spans.MAX_OPEN", 3)
    sink = make()
    runs = [uuid4() for _ in range(5)]
    for run in runs:
        sink.begin(run, START_RUN)
    sink.flush()
    assert {span.trace for span in receiver.spans} == {trace_of(run) for run in runs[:2]}


def test_what_comes_for_a_run_nobody_started_is_in_its_trace(make: Make, receiver: Receiver) -> None:
    sink = make()
    sink.log(RUN, "llm.call", call(1, {}))
    sink.flush()
    [span] = receiver.spans
    assert (span.kind, span.trace) == ("generation", trace_of(RUN))


@pytest.mark.parametrize(
    ("outcome", "error", "level", "message"),
    [
        ("succeeded", None, None, None),
        ("parked", None, None, None),
        ("cancelled", None, "WARNING", "cancelled"),
        ("failed", {"type": "ValueError", "message": "bad"}, "ERROR", "ValueError: bad"),
        ("failed", ErrorInfo("LimitExceeded", "10 turns"), "ERROR", "LimitExceeded: 10 turns"),
        ("timed_out", "too late", "ERROR", "too late"),
        ("dead", None, "ERROR", "dead"),
        ("pending", {"type": "RateLimited", "message": ""}, "WARNING", "RateLimited"),
    ],
)
def test_how_a_run_ended(
    make: Make, receiver: Receiver, outcome: str, error: Any, level: str | None, message: str | None
) -> None:
    sink = make()
    sink.begin(RUN, START_RUN)
    sink.finish(RUN, outcome, {"output": None, "usage": {}, "error": error})
    sink.flush()
    [root] = receiver.spans
    assert root.about.get("langfuse.observation.level") == level
    assert root.about.get("langfuse.observation.status_message") == message
    assert root.failed is (level == "ERROR")
    assert root.json("metadata.outcome") == outcome


def test_a_failed_model_call_is_an_error(make: Make, receiver: Receiver) -> None:
    sink = make()
    sink.begin(RUN, START_RUN)
    failed = {"output": None, "usage": None, "cost_usd": None, "error": "RateLimited: slow down"}
    sink.log(RUN, "llm.call", {**call(1, {}), **failed})
    sink.flush()
    [span] = receiver.spans
    assert span.failed
    assert span.about["langfuse.observation.level"] == "ERROR"
    assert span.about["langfuse.observation.status_message"] == "RateLimited: slow down"
    assert "langfuse.observation.usage_details" not in span.about


def test_events_with_nothing_else_to_show_them_are_events(make: Make, receiver: Receiver) -> None:
    sink = make()
    sink.begin(RUN, START_RUN)
    for quiet in ("run.started", "run.heartbeat", "assistant.delta", "state.checkpoint", "tool.call"):
        sink.log(RUN, quiet, {"n": 1})
    sink.log(RUN, "step.started", {"step_id": "s", "step_name": "pay", "attempt": 1})
    sink.log(
        RUN, "step.retrying", {"step_id": "s", "step_name": "pay", "attempt": 1, "error": "it broke", "retry_delay": 1}
    )
    sink.log(RUN, "order.shipped", {"order": 7})
    sink.finish(RUN, "succeeded")
    sink.flush()
    [root] = of(receiver, "agent")
    events = {span.name: span for span in of(receiver, "event")}
    assert set(events) == {"order.shipped"}
    assert {span.parent for span in events.values()} == {root.id}
    assert events["order.shipped"].json("input") == {"order": 7}
    [step] = of(receiver, "span")
    assert (step.name, step.parent) == ("pay", root.id)
    assert step.about["langfuse.observation.level"] == "WARNING"
    assert step.about["langfuse.observation.status_message"] == "it broke"


# -- what is left out


def test_without_content_nothing_that_was_said_leaves(make: Make, receiver: Receiver) -> None:
    sink = make(content=False)
    three_turns(sink)
    sink.log(RUN, "order.shipped", {"order": "parcel"})
    why = "Error: tool 'pay': card must be 'none', got '4111 1111'"
    sink.log(RUN, "tool.done", tool(4, "pay", output=why, error=why))
    sink.flush()
    assert len(receiver.spans) == 9
    assert [each.about.get("langfuse.observation.level") for each in of(receiver, "tool")][-2:] == ["ERROR", "ERROR"]
    assert len(of(receiver, "generation")) == 3
    sent = b"".join(receiver.bodies)
    for said in (
        b"prompt",
        b"it is 5",
        b"what is 2",
        b"result 1",
        b"parcel",
        b"4111 1111",
        b"by 0",
        b"observation.input",
        b"observation.output",
    ):
        assert said not in sent
    assert of(receiver, "generation")[0].json("usage_details")["input"] == 100


def test_a_file_is_sent_as_its_kind_and_a_long_text_is_cut(make: Make, receiver: Receiver) -> None:
    sink = make()
    image = "data:image/png;base64," + base64.b64encode(b"\x89PNG" * 1000).decode()
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]
    sink.begin(RUN, {**START_RUN, "input": messages})
    sink.log(RUN, "tool.done", tool(1, "read", output="ab" * 150_000))
    sink.finish(RUN, "succeeded")
    sink.flush()
    [root], [read] = of(receiver, "agent"), of(receiver, "tool")
    url = root.json("input")[0]["content"][0]["image_url"]["url"]
    assert url == "data:image/png (5336 characters left out)"
    output = read.about["langfuse.observation.output"]
    assert len(output) < 200_100
    assert output.endswith("abab… (100000 more characters)")


def test_values_that_json_or_utf8_cannot_hold_cost_no_trace(make: Make, receiver: Receiver) -> None:
    sink = make()
    odd = {"when": START_RUN, "lone": "\ud800", ("a", "key"): 1, "object": object(), "nan": float("nan")}
    metadata = {f"key {n}": n for n in range(500)} | {"run_id": "not the run's"}
    sink.begin(RUN, {**START_RUN, "agent_key": "a\udfff", "metadata": metadata, "input": odd})
    sink.log(RUN, "llm.call", call(1, {}, model="m\ud800", input="plain \ud800 text", usage={"prompt_tokens": "many"}))
    sink.finish(RUN, "failed", {"error": "\ud800"})
    sink.flush()
    [root], [span] = of(receiver, "agent"), of(receiver, "generation")
    assert root.name == root.about["langfuse.trace.name"] == span.about["langfuse.trace.name"] == "a?"
    assert span.about["langfuse.observation.model.name"] == "m?"
    assert '"lone": "?"' in root.about["langfuse.observation.input"]
    assert root.json("metadata.run_id") == str(RUN)
    assert root.json("metadata.outcome") == "failed"
    assert len(root.about) < 128
    assert span.about["langfuse.observation.input"] == "plain ? text"
    assert "langfuse.observation.usage_details" not in span.about


def test_the_secret_is_in_the_authorization_and_nowhere_else(
    make: Make, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sink = make(public_key="pk-lf-canary")
    tracer = Tracer([sink])
    three_turns(tracer)
    tracer.close(SOON)
    away = make(host=f"http://127.0.0.1:{_dead_port()}")
    gone = Tracer([away])
    three_turns(gone)
    gone.close(1.0)
    basic = base64.b64encode(f"pk-lf-canary:{CANARY}".encode()).decode()
    assert receiver.headers[0]["authorization"] == f"Basic {basic}"
    headers = [{name: text for name, text in each.items() if name != "authorization"} for each in receiver.headers]
    sent = b"".join(receiver.bodies)
    for secret in (CANARY, basic):
        assert secret not in caplog.text
        assert secret.encode() not in sent
        assert secret not in json.dumps(headers)
        for each in (sink, sink.client, away, tracer):
            assert secret not in repr(each)
        assert secret not in repr(vars(sink))


# -- where it goes


def test_keys_come_from_the_configuration_then_from_langfuses_own_variables(
    make: Make, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(
        langfuse_enabled=True,
        langfuse_public_key=f"pk-lf-{uuid4()}",
        langfuse_secret_key="sk-configured",
        langfuse_host=receiver.url,
    )
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-variable")
    configured = get_trace_sink()
    assert isinstance(configured, LangfuseTraceSink)
    given = make(environment="staging")
    configure()
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", f"pk-lf-{uuid4()}")
    monkeypatch.setenv("LANGFUSE_BASE_URL", receiver.url)
    monkeypatch.setenv("LANGFUSE_TRACING_ENVIRONMENT", "nightly")
    found = LangfuseTraceSink()
    for sink in (configured, given, found):
        sink.trace({**START_RUN, "type": "start_run", "run_id": str(RUN)})
        sink.trace({"type": "end_run", "run_id": str(RUN), "outcome": "succeeded", "time": START})
        sink.flush()
    keys = [base64.b64decode(each["authorization"].split()[1]).decode().split(":")[1] for each in receiver.headers]
    assert keys == ["sk-configured", CANARY, "sk-variable"]
    assert [span.about.get("langfuse.environment") for span in receiver.spans] == [None, "staging", "nightly"]


def test_a_second_sink_with_the_same_key_sends_too(make: Make, receiver: Receiver) -> None:
    one = make(public_key="pk-lf-twice")
    other = make(public_key="pk-lf-twice")
    runs = [uuid4(), uuid4()]
    for sink, run in zip((one, other), runs, strict=True):
        sink.begin(run, START_RUN)
        sink.finish(run, "succeeded")
    gc.collect()
    one.flush()
    other.flush()
    assert {span.trace for span in receiver.spans} == {trace_of(run) for run in runs}


def test_a_client_of_their_own_is_the_client(make: Make) -> None:
    client = object()
    assert make(client=client).client is client


def test_the_client_is_made_at_its_first_use_and_sends_no_spans(make: Make, receiver: Receiver) -> None:
    sink = make()
    client = sink.client
    assert isinstance(client, langfuse.Langfuse)
    assert sink.client is client
    with client.start_as_current_observation(name="own"):
        pass
    client.flush()
    assert receiver.spans == []
    client.shutdown()


def test_the_processs_own_tracing_is_left_alone(make: Make) -> None:
    current: Any = load("opentelemetry.trace:get_tracer_provider")
    before = current()
    sink = make()
    sink.begin(RUN, START_RUN)
    sink.finish(RUN, "succeeded")
    assert current() is before


@pytest.mark.parametrize(
    ("keys", "lacking", "not_lacking"),
    [
        ({"public_key": "", "secret_key": ""}, ["langfuse_public_key", "langfuse_secret_key"], []),
        ({"public_key": ""}, ["AGENT_RUNTIME_LANGFUSE_PUBLIC_KEY", "langfuse_public_key"], ["secret"]),
        ({"secret_key": ""}, ["AGENT_RUNTIME_LANGFUSE_SECRET_KEY", "langfuse_secret_key"], ["public"]),
    ],
)
def test_a_missing_key_is_named(make: Make, keys: dict[str, str], lacking: list[str], not_lacking: list[str]) -> None:
    with pytest.raises(NotConfigured) as caught:
        make(**keys)
    text = str(caught.value)
    assert all(name in text for name in lacking)
    assert not any(name in text for name in not_lacking)
    assert CANARY not in text


def test_without_the_package_the_way_out_is_said(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langfuse", None)
    with pytest.raises(MissingDependency, match=r"LangfuseTraceSink needs .*agent-runtime-core\[langfuse\]"):
        make()


# -- when it is away


def _dead_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def _nobody(kind: str) -> Iterator[str]:
    """The address of a server that is not there, or of one that takes connections and never answers."""
    if kind == "dead":
        yield f"http://127.0.0.1:{_dead_port()}"
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(100)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_by_itself_while_the_server_is_silent(tmp_path: Path, closes: bool) -> None:
    script = tmp_path / "script.py"
    command = [sys.executable, str(script)]
    with _nobody("silent") as url:
        script.write_text(f"""
import uuid
from agent_runtime_core.tracing import LangfuseTraceSink, Tracer

tracer = Tracer([LangfuseTraceSink("pk", "sk", {url!r})])
for _ in range(300):
    run = uuid.uuid4()
    tracer.start_run(run, {{"agent_key": "a", "input": ["x" * 100]}})
    tracer.event(run, "llm.call", {{"model": "m", "input": ["x" * 1000]}})
    tracer.end_run(run, "succeeded")
print("last line", flush=True)
if {closes}:
    tracer.close()
""")
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "last line\n"
    assert "sk" not in done.stderr.split()
