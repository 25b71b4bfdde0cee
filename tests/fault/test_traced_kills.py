"""Processes are killed inside the steps of a traced run: each span arrives once, under the right parent."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core._core.ids import run_uuid
from tests.support.otlp_receiver import Receiver, Seen, receiving
from tests.support.processes import Command

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

STEPS = 4


class Program(Command):
    package = "tests.fault."
    imports = (
        *Command.imports,
        "agent_runtime_core.tracing",
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "opentelemetry.sdk.trace.export",
    )


def executed(name: str, *arguments: object) -> int:
    """Run a program to its end and return its exit code."""
    with Program(name, *arguments) as program:
        return program.process.wait(120)


def execute(store: Path, receiver: Receiver, kill_at: int) -> int:
    """Run the program once and return its exit code."""
    arrived = store.with_suffix(".sent")
    arrived.touch()
    attempts = store.with_suffix(".attempts")
    attempts.touch()

    def count(spans: list[Seen]) -> None:
        with arrived.open("a") as file:
            file.writelines("sent\n" for span in spans if span.name.startswith("step-"))

    receiver.on_arrival = count
    return executed("traced_program", store, receiver.url, attempts, arrived, kill_at)


def check(spans: list[Seen], crashes: int) -> None:
    """Check that each span arrived once, and that it has its parent."""
    names = Counter(span.name for span in spans)
    expected = {f"step-{number}": 1 for number in range(STEPS)}
    assert {name: names[name] for name in expected} == expected
    assert names["invoke_agent traced"] == crashes + 1
    # A span of the user inside a step that was killed was sent, and is sent again by the attempt that repeats the step.
    assert sum(names[f"own-{number}"] for number in range(STEPS)) == STEPS + crashes
    assert len({span.id for span in spans}) == len(spans)
    known = {span.id: span.name for span in spans}
    for span in spans:
        if span.name.startswith("own-"):
            assert known[span.parent] == span.name.replace("own", "step")
        elif span.name.startswith("step-"):
            assert known[span.parent] == "invoke_agent traced"
        else:
            assert span.parent == ""
    assert {span.trace for span in spans} == {run_uuid("traced-1", SYSTEM)[0].hex}


@pytest.mark.parametrize("kill_at", range(1, STEPS + 1))
def test_a_run_that_was_killed_once_has_each_span_once(kill_at: int, tmp_path: Path) -> None:
    store = tmp_path / "agents.db"
    with receiving() as receiver:
        assert execute(store, receiver, kill_at) == -signal.SIGKILL
        assert execute(store, receiver, 0) == 0
    check(receiver.spans, 1)


def test_a_run_that_was_killed_at_every_step_has_each_span_once(tmp_path: Path) -> None:
    store = tmp_path / "agents.db"
    with receiving() as receiver:
        for kill_at in (1, 3, 5, 7):  # each kill is at the next step, since the attempt before repeats one
            assert execute(store, receiver, kill_at) == -signal.SIGKILL
        assert execute(store, receiver, 0) == 0
    check(receiver.spans, 4)


def test_a_hundred_runs_that_crash_and_are_resumed_have_each_span_once(tmp_path: Path) -> None:
    sent, runs = tmp_path / "sent", 100
    sent.touch()

    def count(spans: list[Seen]) -> None:
        with sent.open("a") as file:
            file.writelines("sent\n" for _ in spans)

    with receiving() as receiver:
        receiver.on_arrival = count
        for mode, code in (("kill", -signal.SIGKILL), ("resume", 0)):
            place = tmp_path / "agents.db"
            assert executed("traced_crowd_program", place, receiver.url, sent, runs, mode) == code
    spans = receiver.spans
    assert len({span.id for span in spans}) == len(spans)
    known = {span.id: span for span in spans}
    found = Counter((span.trace, span.name) for span in spans)
    for number in range(runs):
        trace = run_uuid(f"run-{number}", SYSTEM)[0].hex
        expected = {f"step-{step}": 1 for step in range(STEPS)} | {"invoke_agent traced": 2}
        assert {name: count for (each, name), count in found.items() if each == trace} == expected
    for span in spans:
        parent = known[span.parent] if span.name.startswith("step-") else None
        assert parent is None or (parent.trace, parent.name) == (span.trace, "invoke_agent traced")
