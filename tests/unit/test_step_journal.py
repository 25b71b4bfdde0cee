"""What a claim knows of its run's journal."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._core.ids import step_id
from agent_runtime_core._execution.claim_writer import ClaimWriter
from agent_runtime_core._execution.step import StepScope
from agent_runtime_core._execution.step_journal import StepJournal
from agent_runtime_core._journal.record import Record, derived_events
from agent_runtime_core.errors import JournalMismatch, StepExecutionError
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.testing import VirtualClock

RUN = str(UUID(int=1))


def journal(*records: Record) -> StepJournal[ClaimWriter]:
    queue = InMemoryQueue(clock=VirtualClock())
    bus, state = InMemoryEventBus(engine=queue.engine), InMemoryStateStore(engine=queue.engine)
    writer = ClaimWriter(RunRow(RUN, "agent", claim_id="0" * 26), queue, bus, state, queue.clock)
    return StepJournal(writer, [record._replace(seq=seq) for seq, record in enumerate(records)])


def done(name: str, key: str = "s:0", pos: int = 1, **more: Any) -> Record:
    return Record(0, "done", name, key, 1, pos=pos, result="1", **more)


def test_an_empty_journal_knows_nothing() -> None:
    empty = journal()
    assert (empty.view.length, empty.is_replaying, empty.view.completed, empty.view.started, empty.view.end_record) == (
        0,
        False,
        {},
        {},
        None,
    )
    empty.check_order("anything", "s:0", None)


def test_steps_are_done_in_doubt_or_over() -> None:
    known = journal(
        Record(0, "started", "a", "s:0"), done("a"),
        Record(0, "started", "b", "s:0"), Record(0, "retrying", "b", "s:0"),
        Record(0, "started", "c", "s:0"), Record(0, "failed", "c", "s:0"),
        Record(6, "started", "d", "s:0", 2),
    )  # fmt: skip
    assert set(known.view.completed) == {("a", "s:0")}
    assert known.view.started == {("d", "s:0"): 6}
    assert known.view.length == 7


def test_a_record_may_carry_the_next_steps_start() -> None:
    carried = done("a", "x::0", next='{"name":"b","key":"x::0","pos":1,"tries":1}', state='{"n":1}', digest="0")
    known = journal(carried)
    assert known.view.started == {("b", "x::0"): carried.seq}
    assert known.view.states.before("x::0") is None, "it has not come to it"
    assert known.view.states.of("x::0", "0") == '{"n":1}'
    assert known.view.states.before("x::0") == '{"n":1}'


def test_the_rest_of_a_journal_is_read_too() -> None:
    known = journal(
        Record(0, "reset", key="x:"),
        Record(0, "reset", key="x:"),
        Record(0, "ended", "failed"),
        Record(0, "started", "sleep", "w:0", info='{"until":7.5}'),
    )
    assert known.view.resets == {"x:": 2}
    assert known.view.end_record is not None
    assert known.view.wait_deadlines == {("sleep", "w:0"): (7.5, 0.0)}


def test_an_unkeyed_step_is_known_by_how_often_its_name_was_used() -> None:
    known = journal()
    assert [known.keys.next_key("s", "a"), known.keys.next_key("s", "a"), known.keys.next_key("w", "a")] == [
        "s:0",
        "s:1",
        "w:0",
    ]
    assert known.keys.next_key("s", "b") == "s:0"


def test_a_former_name_finds_the_record_and_keeps_the_id() -> None:
    known = journal(done("old"), Record(0, "started", "began", "s:0"))
    known.view.former_names_by_name = {"new": ["old"], "begun": ["began"]}
    assert known.lookup("new", "s:0") is known.view.completed["old", "s:0"]
    assert (known.view.journal_name("new", "s:0"), known.view.journal_name("begun", "s:0")) == ("old", "began")
    assert (known.view.journal_name("new", "s:1"), known.view.journal_name("other", "s:0")) == ("new", "other")
    assert known.lookup("new", "s:1") is None


def test_a_name_may_have_had_several_and_they_others() -> None:
    known = journal(Record(0, "failed", "a", "s:2", info='{"error":"no","own":true}'), done("a"), done("b", key="s:1"))
    known.view.former_names_by_name = {"c": ["b"], "b": ["a", "c"], "d": ["x", "a"]}
    assert known.view.former_names("c") == ["b", "a"]
    assert [known.lookup("c", "s:0"), known.lookup("d", "s:0")] == [known.view.completed["a", "s:0"]] * 2
    assert (
        known.view.journal_name("c", "s:0"),
        known.view.journal_name("c", "s:1"),
        known.view.journal_name("c", "s:3"),
    ) == ("a", "b", "c")
    with pytest.raises(StepExecutionError, match="'c'"):
        known.view.raise_recorded_failure("c", "s:2")


def test_order_is_matched_step_by_step() -> None:
    known = journal(done("b", pos=2), done("a", pos=1))
    known.check_order("a", "s:0", known.view.completed["a", "s:0"])
    with pytest.raises(JournalMismatch, match=r"renamed\('b', 'x'\)") as caught:
        known.check_order("x", "s:0", None)
    assert (caught.value.recorded, caught.value.found) == ("b", "x")
    known.check_order("b", "s:0", known.view.completed["b", "s:0"])
    known.check_order("x", "s:0", None)


def test_a_step_whose_end_landed_twice_has_one_place() -> None:
    known = journal(done("a", pos=1), done("a", pos=2), done("b", pos=3))
    known.check_order("a", "s:0", known.view.completed["a", "s:0"])
    known.check_order("b", "s:0", known.view.completed["b", "s:0"])


def test_steps_that_ran_side_by_side_have_no_place() -> None:
    known = journal(done("a", pos=1), done("b", pos=2, info='{"beside":true}'), done("c", pos=3))
    known.check_order("b", "s:0", known.view.completed["b", "s:0"])
    known.check_order("a", "s:0", known.view.completed["a", "s:0"])
    known.check_order("c", "s:0", known.view.completed["c", "s:0"])
    inner = journal(done("b", pos=2, info='{"beside":true}'))
    inner.check_order("x", "s:0", None)
    busy = journal(done("a"))
    busy.running_steps = 1
    busy.check_order("x", "s:0", None)


def test_records_are_ahead_until_the_last_was_come_to() -> None:
    known = journal(done("inner"), done("outer"))
    assert known.is_replaying
    known.advance(known.view.completed["outer", "s:0"])
    assert not known.is_replaying
    known = journal(done("a"), done("b"))
    known.advance(known.view.completed["a", "s:0"])
    assert known.is_replaying
    known.advance()
    assert not known.is_replaying
    assert known.boundary == 2


def test_a_failure_counts_only_where_the_code_went_on_in_the_same_life() -> None:
    failed = Record(0, "failed", "a", "s:0", 3, info='{"error":"no","type":"E","alone":true}')
    on = journal(failed, Record(0, "looked"), Record(0, "started", "b", "s:0"))
    with pytest.raises(StepExecutionError, match="no") as caught:
        on.view.raise_recorded_failure("a", "s:0")
    assert caught.value.attempts == 3
    on.view.raise_recorded_failure("a", "s:0")  # the code repeats the step, so it runs again
    renamed = journal(failed, Record(0, "started", "b", "s:0"))
    renamed.view.former_names_by_name = {"new": ["a"]}
    with pytest.raises(StepExecutionError):
        renamed.view.raise_recorded_failure("new", "s:0")
    own, aside = failed._replace(info='{"error":"no","type":"E","own":true}'), '{"beside":true}'
    later = [Record(0, "started", "c", "s:0", info=aside), done("c", info=aside), Record(0, "started", "b", "s:0")]
    with pytest.raises(StepExecutionError, match="no"):
        journal(own, *later).view.raise_recorded_failure("a", "s:0")
    attempt = Record(0, "attempt", "agent", claim_id="another")
    with pytest.raises(StepExecutionError, match="no"):  # that of its own claim was written late
        journal(failed, attempt._replace(claim_id=""), Record(0, "started", "b", "s:0")).view.raise_recorded_failure(
            "a", "s:0"
        )
    for records in (
        [failed],
        [failed, *later],
        [own, *later[:2]],
        [own, later[0], attempt, *later],
        [failed, Record(0, "ended", "failed"), Record(0, "started", "b", "s:0")],
        [failed, attempt, Record(0, "started", "b", "s:0")],
        [failed._replace(info='{"error":"no"}'), Record(0, "started", "b", "s:0")],
    ):
        journal(*records).view.raise_recorded_failure("a", "s:0")


def test_what_is_written_behind_what_was_to_come_after_it_shows_nothing_of_the_order() -> None:
    known = journal(done("before"))
    start = Record(0, "started", "a", "s:0", 1, info='{"description":"d"}')
    records = [Record(0, "attempt", "agent"), start, done("b"), done("c", info='{"beside":true}')]
    late = known.unconfirmed.renumbered([*records, start._replace(name="before")])
    assert [each.seq for each in late] == [*range(late[0].seq, late[0].seq + 4)]
    assert [each.info for each in late] == [None, '{"description":"d","beside":true}', *['{"beside":true}'] * 2]
    assert [each._replace(seq=0, info=None) for each in late] == [each._replace(info=None) for each in records]


def test_a_failure_says_whether_it_was_the_runs_own() -> None:
    known, other = journal(), journal()
    for outer in (
        None,
        StepScope(other.token, "a", "s:0", 1),
    ):  # that of a run which waits for this one is none around it
        assert known.about_failure(outer, 1) == {"own": True}
    inside = StepScope(known.token, "a", "s:0", 1)
    assert (known.about_failure(inside, 0), known.about_failure(inside, 1)) == ({"alone": True}, {})


def test_records_stand_for_the_events_they_count() -> None:
    writing = journal()
    for record in (
        writing.records.started("a", "s:0", total=4, info={"description": "d"}),
        writing.records.started("a", "s:0"),
        writing.records.failed(
            "retrying", "a", "s:0", attempt=1, pos=0, total=4, tries=2, info={"error": "e", "retry_delay": 1}
        ),
        writing.records.failed("failed", "a", "s:0", attempt=2, pos=0, total=4, tries=2, info={"error": "e"}),
        writing.records.boundary("attempt", "agent", attempt=1, nev=1),
        writing.records.boundary("resumed", "agent", attempt=1, nev=1, info={"reason": "sleep"}),
        writing.records.boundary("skipped", nev=2, total=3, info={"steps": [["a", "x", 0], ["b", "x", 1, {"m": 1}]]}),
        writing.records.boundary("ended", "dead", nev=1, info={"message": "m"}),
        writing.value_record("now", "v:0", "1"),
        writing.records.started("a", "s:0", quiet=True),
    ):
        assert len(derived_events(RUN, record)) == record.nev
    assert writing.writer.next_seq() == 10


def test_a_frame_knows_its_step() -> None:
    frame = StepScope(journal().token, "a", "s:0", 2)
    assert frame.step_id == step_id(RUN, "a", "s:0")
    assert (frame.attempt, frame.emitted) == (2, 0)


def test_a_step_of_ones_own_that_is_called_model_used_nothing() -> None:
    theirs = done("model", "s:0")._replace(result='"an answer"')
    ours = done("model", "k:1")._replace(result='{"usage":{"total_tokens":3},"cost_usd":0.5}')
    assert journal(theirs, ours).view.usage() == {"total_tokens": 3, "cost_usd": 0.5, "turns": 1}


async def test_without_a_context_nobody_is_asked_about_doubt() -> None:
    with pytest.raises(JournalMismatch, match="'pay' is in doubt"):
        await journal().control.review("pay", "s:0", 1, str)
