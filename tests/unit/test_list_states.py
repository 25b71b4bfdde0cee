"""States of step lists in the journal: whole or as a difference, and read again by the next claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime_core._execution.journal_view import ListStates
from agent_runtime_core.errors import StorageCorrupt
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import crash_everywhere
from tests.support.runs import Rig

KEY = "x::0"
LONG = "a long text " * 40

Entry = tuple[str, int, str]  # number of the list, of the record, and the state as recorded


class Writer:
    """Records states as a claim does, into a journal that the test can read and change."""

    def __init__(self, journal: list[Entry] | None = None) -> None:
        self.journal: list[Entry] = [] if journal is None else journal
        self.states = reading(self.journal)

    def step(self, state: dict[str, Any], number: str = "0") -> str:
        text = json.dumps(state)
        recorded = self.states.to_record(KEY, text)
        seq = len(self.journal)
        self.journal.append((number, seq, recorded))
        self.states.set(KEY, number, seq, recorded, text)
        return recorded


def reading(journal: list[Entry]) -> ListStates:
    states = ListStates("r")
    for number, seq, recorded in journal:
        states.read(KEY, number, seq, recorded)
    return states


def growing(count: int) -> list[dict[str, Any]]:
    return [{f"k{n}": f"{n} {LONG}" for n in range(length)} for length in range(1, count + 1)]


def test_a_step_that_adds_to_a_large_state_records_what_it_adds() -> None:
    writer = Writer()
    recorded = [writer.step(state) for state in growing(200)]
    whole = [len(each) for each in recorded if each.startswith("{")]
    assert sum(map(len, recorded)) < 4 * len(json.dumps(growing(200)[-1])), "linear, not quadratic"
    assert len(whole) < 12, "each whole state is about twice as large as the one before"
    assert reading(writer.journal).of(KEY, "0") == json.dumps(growing(200)[-1])


def test_small_changes_of_a_large_state_are_whole_from_time_to_time() -> None:
    writer = Writer()
    base = {"text": "x" * 400_000}
    recorded = [writer.step({**base, "n": n}) for n in range(600)]
    whole = [n for n, each in enumerate(recorded) if each.startswith("{")]
    assert whole == [0, 257, 514], "reading a state copies its text for each difference"
    assert reading(writer.journal).of(KEY, "0") == json.dumps({**base, "n": 599})


def test_small_states_are_whole() -> None:
    writer = Writer()
    assert [writer.step({"n": n})[0] for n in range(20)] == ["{"] * 20


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=60) | st.just(LONG), lambda inner: st.lists(inner, max_size=3)
)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["0", "1", "~2.0"]), st.dictionaries(st.text(max_size=9), values))),
    claims=st.sets(st.integers(0, 30)),
)
def test_every_claim_reads_the_states_as_they_were(steps: list[tuple[str, dict[str, Any]]], claims: set[int]) -> None:
    writer = Writer()
    last: dict[str, str] = {}
    for index, (number, state) in enumerate(steps):
        if index in claims:  # another claim goes on from the journal
            writer = Writer(writer.journal)
        writer.step(state, number)
        last[number] = json.dumps(state)
        assert writer.states.before(KEY) == json.dumps(state)
        assert {each: writer.states.of(KEY, each) for each in last} == last
    again = reading(writer.journal)
    assert {each: again.of(KEY, each) for each in last} == last


def test_a_fork_that_renumbers_records_reads_the_states() -> None:
    writer = Writer()
    states = growing(30)
    for state in states:
        writer.step(state)
    copies = [(number, seq * 7 + 1, recorded) for number, seq, recorded in writer.journal[:20]]
    fork = Writer(copies)
    assert fork.states.of(KEY, "0") == json.dumps(states[19])
    fork.step(states[25])
    assert reading(fork.journal).of(KEY, "0") == json.dumps(states[25])


def test_a_write_that_is_applied_late_does_not_change_a_later_state() -> None:
    """Both attempts of the step began with the state of the step before."""
    states = growing(12)
    for size in range(1, 11):
        writer, second = Writer(), Writer()
        for state in states[:size]:
            writer.step(state)
            second.step(state)
        late, state = states[size], {**states[size], "attempt": 2}
        writer.step(late)
        recorded = second.step(state)
        states_ = reading([*writer.journal, ("0", size + 1, recorded)])
        assert states_.of(KEY, "0") == json.dumps(state)


def test_files_of_earlier_releases_have_only_whole_states() -> None:
    states = growing(50)
    journal = [("0", seq, json.dumps(state)) for seq, state in enumerate(states[:49])]
    writer = Writer(journal)
    assert writer.states.of(KEY, "0") == json.dumps(states[48])
    assert writer.step(states[49]).startswith("~")
    assert reading(journal).of(KEY, "0") == json.dumps(states[49])


def test_a_difference_does_not_refer_to_the_state_of_a_start() -> None:
    """Forks copy the ends of steps, not their starts."""
    states = ListStates("r")
    text = json.dumps({"text": LONG})
    states.read(KEY, "0", 1, text, at_start=True)
    assert states.of(KEY, "0") == text
    assert not states.is_recorded(KEY, "0")
    assert states.to_record(KEY, text) == text


@pytest.mark.parametrize("damage", ["~", "~x", "~0123456789abcdef:1:1:x", "~0123456789abcdef:a:1:x"])
def test_a_difference_without_its_base_is_damage(damage: str) -> None:
    with pytest.raises(StorageCorrupt, match=r"run r: a state of its step list .*, and is not\. Restore a backup"):
        reading([("0", 0, damage)]).of(KEY, "0")
    assert reading([("0", 0, damage), ("0", 1, "{}")]).of(KEY, "0") == "{}"


def added(name: str) -> Step:
    async def step(ctx: Any, state: Any) -> list[str]:
        state[name] = f"{name} {LONG}"
        state.setdefault("names", []).append(name)
        return list(state)

    return Step(name, step)


NAMES = [f"s{n}" for n in range(5)]


async def test_a_run_that_is_killed_anywhere_has_the_same_state() -> None:
    class Agent(AgentRuntime):
        key = "agent"

        async def run(self, ctx: RunContext) -> RunResult:
            executor = StepExecutor(ctx)
            await executor.run([added(name) for name in NAMES])
            results = await executor.run([added("more"), added("last")])
            return RunResult({"value": results["last"], "state": dict(executor.state.custom_state)})

    report = await crash_everywhere(Agent)
    assert report.outcome.final_output["value"] == ["s0", "names", "s1", "s2", "s3", "s4", "more", "last"]
    assert report.outcome.final_output["state"]["names"] == [*NAMES, "more", "last"]


@pytest.mark.parametrize("after", NAMES[1:])
async def test_forks_of_each_step_have_its_state(after: str, place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        executor = StepExecutor(ctx)
        await executor.run([added(name) for name in NAMES])
        return dict(executor.state.custom_state)

    async with Rig(place) as rig:
        state = await rig.value(body)
        assert [(each.state or "")[:1] for each in await rig.records()].count("~") == 3
        rig.register(body)
        fork = await rig.runner.fork("r", after)
        assert (await rig.runner.execute("script", run_id=fork)).final_output["value"] == state
