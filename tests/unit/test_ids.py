from __future__ import annotations

import copy
import itertools
import re
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime_core._core import ids
from agent_runtime_core._core.clock import Clock
from agent_runtime_core.errors import InvalidArgument

ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")


class SetClock(Clock):
    def __init__(self, seconds: float) -> None:
        super().__init__(seed=7)
        self.seconds = seconds

    def wall(self) -> float:
        return self.seconds


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**128 - 1), st.integers(0, 2**128 - 1))
def test_ulid_text_sorts_as_the_numbers_do_and_parses_back(one: int, other: int) -> None:
    texts = ids.ulid_text(one), ids.ulid_text(other)
    assert (texts[0] < texts[1]) == (one < other)
    assert ULID.fullmatch(texts[0])
    assert ids.parse_ulid(texts[0]) == one
    assert ids.parse_ulid(texts[0].lower()) == one


def test_ulid_text_is_the_published_example() -> None:
    # From the ULID specification: the time part of 01ARZ3NDEKTSV4RRFFQ69G5FAV is this millisecond.
    assert ids.parse_ulid("01ARZ3NDEKTSV4RRFFQ69G5FAV") >> 80 == 1469922850259
    assert ids.ulid_text(2**128 - 1) == "7" + "Z" * 25
    assert ids.ulid_text(0) == "0" * 26


@pytest.mark.parametrize("bits", [-1, 2**128])
def test_a_number_that_no_ulid_holds_is_refused(bits: int) -> None:
    with pytest.raises(InvalidArgument, match=r"the number of a ULID must be from 0 to 2\*\*128 - 1"):
        ids.ulid_text(bits)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0" * 25,
        "0" * 27,
        "8" + "0" * 25,
        "0" * 25 + "U",
        "0" * 25 + "\u017f",
        " " + "0" * 25,
        "0_" * 13,
        "0" * 26 + "\n",
    ],
)
def test_text_that_is_no_ulid_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="a ULID must have"):
        ids.parse_ulid(text)


def test_a_new_ulid_carries_the_time_and_80_bits_of_chance() -> None:
    clock = SetClock(1_700_000_000.123)
    made = [ids.parse_ulid(ids.new_ulid(clock)) for _ in range(200)]
    assert {bits >> 80 for bits in made} == {1_700_000_000_123}
    assert len({bits & (1 << 80) - 1 for bits in made}) == 200
    assert ids.new_ulid(SetClock(5.0)) == ids.new_ulid(SetClock(5.0))


def test_a_new_ulid_is_above_the_last_one_when_the_clock_went_back() -> None:
    clock = SetClock(1_700_000_000.0)
    last = ids.new_ulid(clock)
    clock.seconds -= 3600
    tails = set()
    for _ in range(100):
        following = ids.above(ids.new_ulid(clock), last)
        assert following > last
        last = following
        tails.add(last[10:])
    # Chance, not the next number: a store rolled back must not hand out one token twice.
    assert len(tails) == 100


def test_a_ulid_that_is_above_the_last_one_is_taken_as_it_is() -> None:
    assert ids.parse_ulid(ids.above(ids.new_ulid(SetClock(9.0)), ids.ulid_text(0))) >> 80 == 9000


@pytest.mark.parametrize(("seconds", "ms"), [(-5.0, 0), (1e15, 2**48 - 1)])
def test_a_wall_time_that_no_ulid_holds_is_cut(seconds: float, ms: int) -> None:
    assert ids.parse_ulid(ids.new_ulid(SetClock(seconds))) >> 80 == ms


def test_ids_made_one_after_the_other_are_ulids_and_all_differ() -> None:
    clock = Clock(seed=1)
    made = [ids.next_id(clock, 5.0) for _ in range(3000)]
    assert len(set(made)) == 3000
    assert len({ids.parse_ulid(each) >> 10 for each in made}) == 3


def test_ids_of_claims_and_events_have_the_time_at_which_they_were_made() -> None:
    clock = SetClock(0.0)
    for n in range(1, 4000):
        clock.seconds = n / 3333
        assert ids.parse_ulid(ids.next_id(clock, clock.seconds)) >> 80 == int(clock.seconds * 1000)
    clock.seconds = 0.5  # it went back
    assert ids.parse_ulid(ids.next_id(clock, 0.5)) >> 80 == 500


def test_a_forked_process_makes_none_of_the_ids_of_its_parent() -> None:
    clock = Clock(seed=1)
    ids.next_id(clock, 5.0)
    ahead = copy.copy(clock)
    clock.ids, ahead.ids = itertools.tee(clock.ids)
    ahead.forked()
    assert not {ids.next_id(clock, 5.0) for _ in range(1023)} & {ids.next_id(ahead, 5.0) for _ in range(1023)}


def test_nothing_is_above_the_last_ulid_of_all() -> None:
    with pytest.raises(InvalidArgument, match=r"the number of a ULID must be from 0 to 2\*\*128 - 1"):
        ids.above(ids.new_ulid(SetClock(1.0)), "7" + "Z" * 25)


def test_step_ids_are_stable_and_told_apart() -> None:
    # A stored journal depends on this very text.
    assert ids.step_id("run", "fetch", "0") == ids.step_id("run", "fetch", "0") == "0QSS2XTRQJCP8GFCT43ZGJQTME"
    parts = [("a", "b", "c"), ("ab", "", "c"), ("", "ab", "c"), ("a", "bc", ""), ("a", "", "bc"), ("1:1", "a", "b")]
    assert len({ids.step_id(*three) for three in parts}) == len(parts)
    assert ULID.fullmatch(ids.step_id("r", "\ud800", "\0"))


@settings(max_examples=300, deadline=None)
@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_step_ids_are_equal_only_for_equal_parts(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (ids.step_id(*one) == ids.step_id(*other)) == (one == other)


def test_a_run_id_that_is_a_uuid_stays_one() -> None:
    run_id = UUID("0F8FAD5B-d9cb-469f-a165-70867728950e")
    assert ids.run_uuid(run_id, Clock(1)) == (run_id, None)
    assert ids.run_uuid(str(run_id), Clock(1)) == (run_id, None)
    assert ids.run_uuid(str(run_id).upper(), Clock(1)) == (run_id, None)


def test_another_string_always_maps_to_the_same_uuid() -> None:
    # Part of every store: it may never change.
    assert ids.run_uuid("run-123", Clock(1)) == (UUID("5a3120bf-3353-54b5-a92c-269a638dfbd3"), "run-123")
    key = "é" * 512
    run_id, run_key = ids.run_uuid(key, Clock(2))
    assert (run_id.version, run_key) == (5, key)
    assert ids.run_uuid("run-124", Clock(1))[0] != ids.run_uuid("run-123", Clock(1))[0]
    # Only the canonical text is a UUID; this is a string like another.
    assert ids.run_uuid("0f8fad5bd9cb469fa16570867728950e", Clock(1))[1] is not None


def test_a_fresh_run_id_comes_from_the_clock() -> None:
    class At(Clock):
        def wall(self) -> float:
            return 1_700_000_000.5

    one, key = ids.run_uuid(None, At(3))
    assert ((one.int >> 76) & 0xF, one.variant, key) == (7, "specified in RFC 4122", None)
    assert one.int >> 80 == 1_700_000_000_500
    assert one == ids.run_uuid(None, At(3))[0]
    assert one != ids.run_uuid(None, At(4))[0]
    clock = At(5)
    made = [ids.run_uuid(None, clock)[0] for _ in range(1000)]
    assert made == sorted(set(made))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", r"run_id must not be empty, got ''\. Pass None for a new run id"),
        ("x" * 513, r"run_id must have at most 512 characters, got 513\. Pass a hash of the string"),
        ("a\0b", r"'\\x00' at position 1 of"),
        ("a\n", r"control characters"),
        ("\x85", r"control characters"),
        ("\ud800", r"lone surrogates"),
        (7, r"run_id must be a UUID or a string, got 7\. Pass str\(run_id\)"),
    ],
)
def test_a_run_id_that_cannot_be_kept_is_refused(value: object, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told) as caught:
        ids.run_uuid(value, Clock(1))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300


def test_a_child_run_has_one_id_that_no_run_key_has() -> None:
    step = ids.step_id("run", "call", "0")
    assert ids.child_run_id(step) == ids.child_run_id(step)
    assert ids.child_run_id(step).version == 5
    assert ids.child_run_id(step) != ids.child_run_id(ids.step_id("run", "call", "1"))
    assert ids.child_run_id(step) != ids.run_uuid(step, Clock(1))[0]


def test_a_trace_id_is_the_run_id_in_32_hex_digits() -> None:
    assert ids.trace_id(UUID("0f8fad5b-d9cb-469f-a165-70867728950e")) == "0f8fad5bd9cb469fa16570867728950e"


def test_a_ticket_that_is_not_above_the_last_one_moves_above_it_and_keeps_its_chance() -> None:
    low, high = ids.ulid_text(5 << 80 | 77), ids.ulid_text(9 << 80 | 3)
    assert ids.above(high, low) == high
    assert ids.above(low, high) == ids.ulid_text(10 << 80 | 77) > high
    assert ids.above(high, high) == ids.ulid_text(10 << 80 | 3)


def test_a_run_is_stored_under_one_text_however_it_is_named() -> None:
    run_id, _ = ids.run_uuid("run-123", Clock(seed=7))
    assert {ids.stored_id(each) for each in ("run-123", run_id, str(run_id), str(run_id).upper())} == {str(run_id)}
    for wrong in (None, "", 3):
        with pytest.raises(InvalidArgument):
            ids.stored_id(wrong)  # type: ignore[arg-type]
