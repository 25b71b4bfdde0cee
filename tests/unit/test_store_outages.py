"""When a store counts as away, and what is logged of it."""

from __future__ import annotations

import logging

import pytest

from agent_runtime_core._engines.outages import StoreOutage
from agent_runtime_core.errors import StorageBusy, StorageFull
from agent_runtime_core.testing import VirtualClock

BUSY, FULL = StorageBusy("no answer", 1), StorageFull("no space")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def outage(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> StoreOutage:
    caplog.set_level(logging.INFO)
    return StoreOutage("here", clock)


def test_a_store_that_is_away_is_back_with_its_first_answer(outage: StoreOutage) -> None:
    outage.noticed(BUSY)
    outage.answered(wrote=False)
    assert outage.since is None


@pytest.mark.parametrize("errors", [(FULL,), (FULL, BUSY), (BUSY, FULL)])
def test_a_full_store_is_back_when_it_has_written(outage: StoreOutage, errors: tuple[Exception, ...]) -> None:
    for error in errors:
        outage.noticed(error)
    outage.answered(wrote=False)
    assert outage.since is not None
    outage.answered()
    assert outage.since is None
    outage.noticed(BUSY)
    outage.answered(wrote=False)
    assert outage.since is None, "the last outage was none of a full store"


def test_what_was_asked_before_the_failure_ends_no_outage(outage: StoreOutage, clock: VirtualClock) -> None:
    began = clock.monotonic()
    clock.advance(0.001)
    outage.noticed(FULL)
    outage.answered(began=began)
    assert outage.since is not None
    outage.answered(began=clock.monotonic())
    assert outage.since is None


def test_an_outage_that_comes_again_soon_has_no_second_traceback(
    outage: StoreOutage, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    for seconds in (0, 1, 59, 61):
        clock.advance(seconds)
        outage.noticed(FULL)
        outage.answered()
    told = [(each.getMessage(), each.exc_info is not None) for each in caplog.records if each.levelname == "ERROR"]
    first = "store here is not available, and its runs wait for it: no space"
    again = "store here is not available again, and its runs wait for it: no space"
    assert told == [(first, True), (again, False), (again, False), (first, True)]
