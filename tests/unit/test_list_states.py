"""States of step lists in the journal: whole or as a difference, and read again by the next claim."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_runtime_core._execution.journal_view import ListStates, StateText
from agent_runtime_core._execution.step_journal import StepJournal
from agent_runtime_core.errors import StorageCorrupt, UnserialisableResult
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
        text = StateText(json.dumps(state))
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
    assert states.to_record(KEY, StateText(text)) == text


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


def test_texts_that_extend_the_same_text_are_separate() -> None:
    first = StateText('{"a":1}')
    second, other = first.extended('{"b":2}'), first.extended('{"c":3,"d":4}')
    third = second.extended('{"e":5}')
    texts = ['{"a":1}', '{"a":1,"b":2}', '{"a":1,"c":3,"d":4}', '{"a":1,"b":2,"e":5}']
    assert [str(each) for each in (first, second, other, third)] == texts
    assert [each.size for each in (first, second, other, third)] == [*map(len, texts)]


def test_a_difference_is_to_the_last_state_whichever_state_was_extended() -> None:
    writer = Writer()
    writer.step(growing(30)[-1])
    of_first, of_other = (
        StateText(json.dumps(growing(31)[-1])),
        StateText(json.dumps({**growing(31)[-1], "k30": "other"})),
    )
    for seq, (number, state, before) in enumerate(
        [("0", of_first, None), ("1", of_other, None), ("0", of_first.extended('{"b":1}'), of_first)], 1
    ):
        recorded = writer.states.to_record(KEY, state, before)
        assert recorded.startswith("~")
        writer.states.set(KEY, number, seq, recorded, state)
        writer.journal.append((number, seq, recorded))
    assert reading(writer.journal).of(KEY, "0") == f'{str(of_first)[:-1]},"b":1}}'


# -- what a step may do to its state


def _add(state: dict[str, Any]) -> None:
    state[f"k{len(state)}"] = f"{len(state)} {LONG}"


def _add_nested(state: dict[str, Any]) -> None:
    state.setdefault("nested", {"list": [LONG]})


def _change_nested(state: dict[str, Any]) -> None:
    state.setdefault("nested", {"list": []})["list"].append(len(state))


def _replace(state: dict[str, Any]) -> None:
    key = next(iter(state), "k0")
    state[key] = {"list": []} if key == "nested" else f"{len(state)}! {LONG}"


def _delete(state: dict[str, Any]) -> None:
    state.pop(next(iter(state), ""), None)


def _reorder(state: dict[str, Any]) -> None:
    for key in list(state)[:1]:
        state[key] = state.pop(key)


def _equal_but_other(state: dict[str, Any]) -> None:
    state["one"] = {int: 1.0, float: True}.get(type(state.get("one")), 1)


def _clear(state: dict[str, Any]) -> None:
    state.clear()


def _rename(state: dict[str, Any]) -> None:
    if state:
        key, value = state.popitem()
        state[f"{key}."] = value


def _add_tag(state: dict[str, Any]) -> None:
    state["$"] = len(state)


def _add_pair(state: dict[str, Any]) -> None:
    state["pair"] = "\ud83d\ude00"


def _add_date(state: dict[str, Any]) -> None:
    state["date"] = date(2026, 1, len(state) % 28 + 1)


def _nothing(state: dict[str, Any]) -> None:
    pass


Change = Callable[[dict[str, Any]], None]
CHANGES: list[Change] = [
    _add, _add, _add_nested, _change_nested, _replace, _delete, _reorder, _equal_but_other, _clear, _rename, _add_tag,
    _add_pair, _add_date, _nothing,
]  # fmt: skip


def _apart(state: dict[str, Any]) -> list[tuple[str, Any, type]]:
    """What equality does not tell apart: the order of keys, and types."""
    return [(key, deepcopy(value), type(value)) for key, value in state.items()]


@settings(deadline=None)
@example([_add, _add_tag, _nothing], 2)
@example([_add_tag, _add, _nothing], 2)
@example([_add, _equal_but_other, _equal_but_other, _equal_but_other, _nothing], 4)
@example([_add, _rename, _nothing], 2)
@example([_add, _add, _reorder, _add, _delete, _nothing], 5)
@example([_add, _add_nested, _change_nested, _add, _change_nested, _nothing], 5)
@example([_add, _add_pair, _add_date, _add, _nothing], 4)
@example([_add, _add, _clear, _nothing], 3)
@given(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=12), st.integers(0, 11))
def test_each_step_and_the_next_attempt_have_the_state_that_was_made(changes: list[Change], cut_at: int) -> None:
    """Whatever was encoded alone, the text of the state is that of the whole state."""
    state: dict[str, Any] = {}
    wanted: list[Any] = []
    for change in changes:
        wanted.append(_apart(state))
        state = deepcopy(state)
        change(state)
    cut_at = min(cut_at, len(changes) - 1)
    wanted[cut_at:cut_at] = [wanted[cut_at]]  # this step runs again
    seen: list[Any] = []

    def stepping(change: Change, position: int) -> Step:
        async def step(ctx: Any, state: Any) -> None:
            seen.append(_apart(state))
            change(state)
            if len(seen) == cut_at + 1:
                raise ValueError("the next attempt of the run goes on here")

        return Step(f"step-{position}", step)

    async def body(ctx: Any) -> None:
        await StepExecutor(ctx).run([stepping(change, n) for n, change in enumerate(changes)])

    async def play() -> None:
        async with Rig(max_retries=2) as rig:
            await rig.value(body)

    asyncio.run(play())
    assert seen == wanted


async def test_a_step_has_what_was_recorded_if_other_code_changes_the_state_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def adds(ctx: Any, state: Any) -> None:
        kept.append(state)
        seen.append(dict(state))
        state["n"] = len(kept)

    async def late(journal: Any, *args: Any, **options: Any) -> None:
        kept[-1]["late"] = True
        await write(journal, *args, **options)

    async def body(ctx: Any) -> None:
        await StepExecutor(ctx).run([Step("one", adds), Step("two", adds), Step("three", adds)])

    kept, seen = list[Any](), list[dict[str, Any]]()
    write = StepJournal.write
    monkeypatch.setattr(StepJournal, "write", late)
    async with Rig() as rig:
        await rig.value(body)
    assert seen == [{}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("earlier", [{}, {"text": LONG}])
async def test_what_cannot_be_stored_is_named_by_its_path_in_the_state(earlier: dict[str, Any]) -> None:
    async def first(ctx: Any, state: Any) -> None:
        state.update(earlier)

    async def second(ctx: Any, state: Any) -> None:
        state["bad"] = float("nan")

    async def body(ctx: Any) -> None:
        with pytest.raises(UnserialisableResult, match=r"state\.bad"):
            await StepExecutor(ctx).run([Step("first", first), Step("second", second)])

    async with Rig() as rig:
        await rig.value(body)


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
