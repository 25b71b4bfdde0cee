"""The tracer: every sink is told everything, and no run ever waits for one."""

from __future__ import annotations

import asyncio
import importlib
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import FrameType
from typing import Any
from uuid import UUID, uuid4

import pytest

import agent_runtime_core.tracing as tracing
from agent_runtime_core import TraceSink
from agent_runtime_core.config import configure
from agent_runtime_core.errors import InvalidArgument, NotConfigured
from agent_runtime_core.testing.clock import START, VirtualClock
from agent_runtime_core.tracing import NoopTraceSink, Tracer, get_trace_sink

tracer_module = importlib.import_module("agent_runtime_core.tracing.tracer")

RUN = UUID("00000000-0000-4000-8000-00000000000a")
SOON = 20.0  # seconds after which a test gives up


class MyTraceSink(TraceSink):
    """The README's: a single coroutine."""

    def __init__(self) -> None:
        self.events: Queue[dict[str, Any]] = Queue()

    async def trace(self, event: dict[str, Any]) -> None:
        self.events.put(event)

    def next(self) -> dict[str, Any]:
        return self.events.get(timeout=SOON)


class Methods(TraceSink):
    """The other way to write one: three methods and a flush."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start_run(self, run_id: UUID, metadata: dict[str, Any]) -> None:
        self.calls.append(("start_run", run_id, metadata))

    def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
        self.calls.append(("log_event", run_id, event_type, payload))

    def end_run(self, run_id: UUID, outcome: str, metadata: dict[str, Any] | None = None) -> None:
        self.calls.append(("end_run", run_id, outcome, metadata))

    def flush(self) -> None:
        self.calls.append(("flush",))


class Stuck(TraceSink):
    """Does not return until it is let go."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
        self.entered.set()
        self.released.wait(SOON)


class Failing(TraceSink):
    def __init__(self, error: BaseException | None = None) -> None:
        self.asked = 0
        self.error = error if error is not None else ConnectionError("nobody is there")

    async def trace(self, event: dict[str, Any]) -> None:
        self.asked += 1
        raise self.error


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def mine() -> MyTraceSink:
    return MyTraceSink()


#: Threads that other modules left waiting for a server. They may wait longer than any test here.
OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _every_thread_ends() -> Iterator[None]:
    OTHERS.clear()
    OTHERS.update(_trace_threads())
    yield
    _every_trace_thread_ends()


def _trace_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "agent-runtime-traces" and each not in OTHERS]


def _every_trace_thread_ends() -> None:
    for thread in _trace_threads():
        thread.join(SOON)
        assert not thread.is_alive()


def _threads() -> list[str]:
    return [thread.name for thread in _trace_threads()]


# -- what sinks are told


def test_events_are_made_in_the_thread_of_the_sinks_in_order(mine: MyTraceSink, clock: VirtualClock) -> None:
    tracer, threads = Tracer([mine], clock=clock), list[str]()

    def make() -> Iterator[tuple[str, dict[str, Any]]]:
        threads.append(threading.current_thread().name)
        yield "step.started", {"step_id": "1"}
        yield "step.completed", {"step_id": "1"}

    tracer.event(RUN, "before", {})
    tracer.events(RUN, make)
    clock.advance(5)
    tracer.event(RUN, "after", {})
    tracer.close(SOON)
    found = [(each["type"], each["time"]) for each in (mine.next() for _ in range(4))]
    assert found == [("before", START), ("step.started", START), ("step.completed", START), ("after", START + 5)]
    assert threads == ["agent-runtime-traces"]


def test_events_that_cannot_be_made_are_left_out_with_a_warning(
    mine: MyTraceSink, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Iterator[tuple[str, dict[str, Any]]]:
        raise ValueError("an unknown type")

    tracer = Tracer([mine], clock=clock)
    tracer.events(RUN, make)
    tracer.event(RUN, "after", {})
    tracer.close(SOON)
    assert mine.next()["type"] == "after"
    assert f"the traces of some events of run {RUN} are missing" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sink_that_ends_the_thread_does_not_end_the_traces(mine: MyTraceSink, clock: VirtualClock) -> None:
    class Ends(TraceSink):
        def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
            if event_type == "ends":
                raise GeneratorExit

    tracer = Tracer([Ends(), mine], clock=clock)
    tracer.event(RUN, "ends", {})
    _every_trace_thread_ends()
    tracer.event(RUN, "after", {})
    assert mine.next()["type"] == "after"
    tracer.close(SOON)


def test_a_sink_with_trace_alone_gets_everything_as_one_dict_each(mine: MyTraceSink, clock: VirtualClock) -> None:
    tracer = Tracer([mine], clock=clock)
    tracer.start_run(RUN, {"agent_key": "a", "attempt": 1})
    clock.advance(2)
    tracer.event(RUN, "tool.call", {"tool_name": "add", "tool_args": {"a": 1}})
    tracer.end_run(RUN, "succeeded", {"output": {"x": 1}})
    tracer.end_run(RUN, "cancelled")
    tracer.close(SOON)
    assert [mine.next() for _ in range(4)] == [
        {"type": "start_run", "run_id": str(RUN), "time": START, "agent_key": "a", "attempt": 1},
        {"type": "tool.call", "run_id": str(RUN), "time": START + 2, "tool_name": "add", "tool_args": {"a": 1}},
        {"type": "end_run", "run_id": str(RUN), "time": START + 2, "outcome": "succeeded", "output": {"x": 1}},
        {"type": "end_run", "run_id": str(RUN), "time": START + 2, "outcome": "cancelled"},
    ]
    assert mine.events.empty()


def test_a_sink_with_methods_gets_the_same_and_is_flushed_on_close(clock: VirtualClock) -> None:
    sink = Methods()
    tracer = Tracer([sink], clock=clock)
    tracer.start_run(RUN, {"agent_key": "a"})
    clock.advance(1)
    tracer.event(RUN, "own", {"n": 1})
    tracer.end_run(RUN, "failed", {"error": "no"})
    tracer.end_run(RUN, "parked")
    tracer.close(SOON)
    assert sink.calls == [
        ("start_run", RUN, {"time": START, "agent_key": "a"}),
        ("log_event", RUN, "own", {"n": 1}),
        ("end_run", RUN, "failed", {"time": START + 1, "error": "no"}),
        ("end_run", RUN, "parked", {"time": START + 1}),
        ("flush",),
    ]


def test_a_payload_with_a_name_of_ours_is_there_as_a_whole_too(mine: MyTraceSink, clock: VirtualClock) -> None:
    tracer = Tracer([mine], clock=clock)
    payload = {"type": "ValueError", "message": "no", "run_id": "other", "time": 0}
    tracer.event(RUN, "run.failed", payload)
    tracer.close(SOON)
    event = mine.next()
    assert event == {"type": "run.failed", "run_id": str(RUN), "time": START, "message": "no", "payload": payload}


def test_what_is_told_stays_as_it_was(mine: MyTraceSink) -> None:
    blocked = Stuck()
    tracer = Tracer([blocked, mine])
    tracer.event(RUN, "first", {})
    assert blocked.entered.wait(SOON)
    messages: list[Any] = [{"role": "user"}]
    payload = {"input": messages, "usage": {"n": 1}}
    tracer.event(RUN, "llm.call", payload)
    messages.append({"role": "assistant"})
    payload["usage"] = {}
    payload["more"] = {}
    blocked.released.set()
    tracer.close(SOON)
    mine.next()
    event = mine.next()
    assert event["input"] == [{"role": "user"}]
    assert event["usage"] == {"n": 1}
    assert "more" not in event


def test_what_one_sink_does_to_its_dict_no_other_sees(mine: MyTraceSink) -> None:
    class Clearing(TraceSink):
        def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
            payload.clear()

        async def trace(self, event: dict[str, Any]) -> None:
            event.clear()

    tracer = Tracer([Clearing(), mine])
    tracer.event(RUN, "own", {"n": 1})
    tracer.close(SOON)
    assert mine.next()["n"] == 1


def test_plain_and_coroutine_functions_are_taken_where_the_other_is_declared(mine: MyTraceSink) -> None:
    told: list[str] = []

    class Mixed:  # not even a TraceSink
        def trace(self, event: dict[str, Any]) -> None:
            told.append(f"trace {event['type']}")

        async def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
            await asyncio.sleep(0)
            told.append(f"log_event {event_type}")

    sink: Any = Mixed()
    tracer = Tracer([sink, mine])
    tracer.event(RUN, "own", {})
    tracer.close(SOON)
    assert told == ["log_event own", "trace own"]
    assert mine.next()["type"] == "own"


def test_a_sink_may_leave_tasks_on_the_loop(mine: MyTraceSink) -> None:
    done = threading.Event()

    class Background(TraceSink):
        tasks: list[asyncio.Task[None]] = []  # noqa: RUF012 - one instance

        async def trace(self, event: dict[str, Any]) -> None:
            async def later() -> None:
                await asyncio.sleep(0)
                done.set()

            self.tasks.append(asyncio.get_running_loop().create_task(later()))

    tracer = Tracer([Background(), mine])
    tracer.event(RUN, "own", {})
    assert done.wait(SOON)
    tracer.close(SOON)


def test_every_happening_arrives_in_order_from_many_threads_and_after_many_rests(mine: MyTraceSink) -> None:
    tracer = Tracer([mine])
    for n in range(300):  # each time the thread has gone to sleep, or is about to
        tracer.event(RUN, "alone", {"n": n})
        assert mine.next()["n"] == n

    def many(run_id: UUID) -> None:
        for n in range(500):
            tracer.event(run_id, "beside", {"n": n})

    runs = [uuid4() for _ in range(6)]
    threads = [threading.Thread(target=many, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close(SOON)
    seen: dict[str, list[int]] = {}
    while not mine.events.empty():
        event = mine.next()
        seen.setdefault(event["run_id"], []).append(event["n"])
    assert seen == {str(run): list(range(500)) for run in runs}


# -- sinks that fail or are slow


def test_a_failing_sink_is_said_once_and_still_called_and_costs_the_others_nothing(
    mine: MyTraceSink, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    tracer = Tracer([failing, mine])
    for n in range(5):
        tracer.event(RUN, "own", {"n": n})
    failing.error = ValueError("something else")
    for n in range(5, 10):
        tracer.event(RUN, "own", {"n": n})
    tracer.close(SOON)
    assert [mine.next()["n"] for _ in range(10)] == list(range(10))
    assert failing.asked == 10
    said = [record.getMessage() for record in caplog.records]
    assert 1 <= len(said) <= 2
    assert set(said) == {"trace sink Failing failed in trace(); further failures of this kind are not logged"}


def test_a_sink_that_keeps_failing_is_left_out_for_a_minute(
    mine: MyTraceSink, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    tracer = Tracer([failing, mine], clock=clock)

    def tell(times: int) -> int:
        before = failing.asked
        for _ in range(times):
            tracer.event(RUN, "own", {})
            mine.next()  # the last sink has it: the failing one was done before
        return failing.asked - before

    assert tell(19) == 19
    assert tell(30) == 1
    clock.advance(59)
    assert tell(3) == 0
    clock.advance(1)
    assert tell(3) == 1  # one try, and out again
    clock.advance(60)
    assert tell(3) == 1
    tracer.close(SOON)
    left_out = [record.getMessage() for record in caplog.records if "paused" in record.getMessage()]
    assert left_out == ["trace sink Failing failed 20 times in a row: paused for 60 s"]


def test_a_sink_that_works_again_starts_from_zero(mine: MyTraceSink, clock: VirtualClock) -> None:
    asked: list[bool] = []

    class Sometimes(TraceSink):
        async def trace(self, event: dict[str, Any]) -> None:
            asked.append(event["fail"])
            if event["fail"]:
                raise ConnectionError

    tracer = Tracer([Sometimes(), mine], clock=clock)
    for n in range(60):
        tracer.event(RUN, "own", {"fail": n % 20 != 19})
    tracer.close(SOON)
    assert len(asked) == 60


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)])
def test_what_would_end_the_thread_is_a_failure_of_the_sink(
    mine: MyTraceSink, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    failing = Failing(error)
    tracer = Tracer([failing, mine])
    for _ in range(3):
        tracer.event(RUN, "own", {})
        mine.next()
    tracer.close(SOON)
    assert failing.asked == 3
    assert len(caplog.records) == 1


def test_a_coroutine_that_hangs_is_given_up(mine: MyTraceSink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer_module, "CALL_TIMEOUT", 0.01)
    ends: list[str] = []

    class Hanging(TraceSink):
        async def trace(self, event: dict[str, Any]) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(event["type"])

    tracer = Tracer([Hanging(), mine])
    tracer.event(RUN, "first", {})
    tracer.event(RUN, "second", {})
    assert [mine.next()["type"], mine.next()["type"]] == ["first", "second"]
    tracer.close(SOON)
    assert ends == ["first", "second"]


def test_a_slow_sink_makes_no_run_wait_and_what_finds_no_room_is_counted(
    mine: MyTraceSink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer_module, "MAX_WAITING", 50)
    stuck = Stuck()
    tracer = Tracer([stuck, mine])
    tracer.event(RUN, "own", {"n": 0})
    assert stuck.entered.wait(SOON)
    for n in range(1, 71):
        tracer.event(RUN, "own", {"n": n})
    assert tracer.dropped == 20
    assert [record.getMessage() for record in caplog.records] == [
        "trace sinks are too slow: 50 traces are waiting; later traces are dropped"
    ]
    stuck.released.set()
    tracer.close(SOON)
    assert [mine.next()["n"] for _ in range(51)] == list(range(51))
    assert mine.events.empty()
    assert caplog.records[-1].getMessage() == "dropped traces: 20; the trace sinks are too slow"


def test_close_waits_no_longer_than_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    stuck, mine = Stuck(), MyTraceSink()
    tracer = Tracer([stuck, mine])
    tracer.event(RUN, "own", {})
    assert stuck.entered.wait(SOON)
    tracer.event(RUN, "own", {})
    tracer.close(0.05)
    assert caplog.records[-1].getMessage() == "trace sinks did not finish within 0.05 s; traces not sent: 1"
    tracer.event(RUN, "late", {})
    stuck.released.set()
    assert [mine.next()["type"], mine.next()["type"]] == ["own", "own"]
    _every_trace_thread_ends()
    assert mine.events.empty()


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(3)])
def test_a_flush_that_fails_keeps_no_other_sink_from_its_own(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    class Unflushable(MyTraceSink):
        def flush(self) -> None:
            raise error

    other = Methods()
    tracer = Tracer([Unflushable(), other])
    tracer.event(RUN, "own", {})
    tracer.close(SOON)
    assert other.calls[-1] == ("flush",)
    assert (
        caplog.records[-1].getMessage()
        == "trace sink Unflushable failed in flush(); further failures of this kind are not logged"
    )


# -- its life


def test_the_thread_starts_with_the_first_happening_and_ends_with_close(mine: MyTraceSink) -> None:
    tracer = Tracer([mine])
    assert _threads() == []
    tracer.event(RUN, "own", {})
    assert len(_threads()) == 1
    tracer.close(SOON)
    assert _threads() == []
    tracer.event(RUN, "late", {})
    tracer.close(SOON)
    assert _threads() == []
    assert [mine.next()["type"]] == ["own"]
    assert mine.events.empty()
    Tracer([mine]).close()


@pytest.mark.parametrize("sinks", [[], [NoopTraceSink()], [TraceSink()]])
def test_without_a_sink_that_listens_nothing_is_done(sinks: list[TraceSink]) -> None:
    tracer = Tracer(sinks)
    called: list[str] = []

    def calls(frame: FrameType, event: str, arg: object) -> None:
        caller = frame.f_back if event == "call" else frame
        of_tracer = Tracer.event.__code__.co_filename in (
            frame.f_code.co_filename,
            caller and caller.f_code.co_filename,
        )
        if event in ("call", "c_call") and of_tracer:
            called.append(frame.f_code.co_name if event == "call" else str(arg))

    sys.setprofile(calls)
    try:
        tracer.start_run(RUN, {})
        tracer.event(RUN, "own", {"n": 1})
        tracer.end_run(RUN, "succeeded")
    finally:
        sys.setprofile(None)
    assert called == ["start_run", "event", "end_run"]
    assert _threads() == []
    tracer.close(SOON)


def _python(code: str, path: Path) -> list[str]:
    script = path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=SOON)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_process_that_ends_without_close_loses_nothing(tmp_path: Path) -> None:
    said = _python(
        """
import uuid
from agent_runtime_core import TraceSink
from agent_runtime_core.tracing import Tracer

class Printing(TraceSink):
    async def trace(self, event):
        print(event["n"])

    def flush(self):
        print("flushed", flush=True)

tracer = Tracer([Printing()])
for n in range(200):
    tracer.event(uuid.uuid4(), "own", {"n": n})
""",
        tmp_path,
    )
    assert said == [*map(str, range(200)), "flushed"]


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork here")
def test_a_forked_child_tells_its_own_and_not_its_parents(tmp_path: Path) -> None:
    said = _python(
        """
import os, threading, uuid, warnings
from agent_runtime_core import TraceSink
from agent_runtime_core.tracing import Tracer

warnings.simplefilter("ignore")
go = threading.Event()

class Printing(TraceSink):
    def log_event(self, run_id, event_type, payload):
        os.write(1, f"{os.getpid() == parent}:{event_type}\\n".encode())
        if os.getpid() == parent:
            go.wait(20)

parent = os.getpid()
tracer = Tracer([Printing()])
run = uuid.uuid4()
for name in ("a", "b", "c"):
    tracer.event(run, name, {})
child = os.fork()
if child == 0:
    tracer.event(run, "d", {})
    tracer.event(run, "e", {})
    tracer.close(20)
    os._exit(0)
os.waitpid(child, 0)
go.set()
tracer.close(20)
""",
        tmp_path,
    )
    assert sorted(said) == ["False:d", "False:e", "True:a", "True:b", "True:c"]


# -- sinks by name


def test_the_configured_sink() -> None:
    assert type(get_trace_sink()) is NoopTraceSink
    assert type(get_trace_sink("noop")) is NoopTraceSink
    assert type(get_trace_sink(backend="noop")) is NoopTraceSink
    configure(langfuse_enabled=True)
    with pytest.raises(NotConfigured, match="langfuse_public_key"):
        get_trace_sink()
    assert type(get_trace_sink("noop")) is NoopTraceSink


def test_a_sink_of_their_own_by_its_name() -> None:
    sink = get_trace_sink("agent_runtime_core.tracing.tracer:NoopTraceSink")
    assert type(sink) is NoopTraceSink
    with pytest.raises(
        InvalidArgument,
        match=r"unknown trace sink 'langfus'\. Did you mean 'langfuse'\? Write 'package\.module:Class' for a custo",
    ):
        get_trace_sink("langfus")
    with pytest.raises(InvalidArgument, match="must be the class of a trace sink, got"):
        get_trace_sink("agent_runtime_core.tracing.tracer:MAX_WAITING")


def test_noop_does_nothing_with_anything() -> None:
    sink = NoopTraceSink()
    sink.start_run(RUN, {})
    sink.log_event(RUN, "own", {})
    sink.end_run(RUN, "succeeded")
    sink.flush()
    asyncio.run(sink.trace({}))
    assert vars(sink) == {}


def test_every_public_name_is_there() -> None:
    assert dir(tracing) == sorted(vars(tracing)["__all__"])
    for name in vars(tracing)["__all__"]:
        assert getattr(tracing, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = tracing.Nothing  # type: ignore[attr-defined]


def test_nothing_of_it_is_logged_when_all_goes_well(mine: MyTraceSink, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tracer = Tracer([mine])
    tracer.event(RUN, "own", {"secret": "sk-canary"})
    tracer.close(SOON)
    assert [record for record in caplog.records if record.name == "agent_runtime_core"] == []
    assert "sk-canary" not in caplog.text
