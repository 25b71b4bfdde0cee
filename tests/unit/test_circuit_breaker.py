"""The circuit breaker, on a clock moved by hand."""

from __future__ import annotations

import random
import threading

import pytest

from agent_runtime_core.errors import (
    AuthenticationFailed,
    CircuitOpen,
    ContextOverflow,
    ModelNotFound,
    NotConfigured,
    NotSupported,
    Postponed,
    ProviderError,
    ProviderTimeout,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
    StreamCut,
)
from agent_runtime_core.llm._retries import RECHECK, Breakers, CircuitPermit, Key
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.cases import for_each

KEY: Key = ("openai", "https://api.example/v1", "gpt-4o")


def _fail(breakers: Breakers, times: int = 1, key: Key = KEY) -> None:
    for _ in range(times):
        breakers.enter(key).failed(ProviderUnavailable("down", status=503))


def _refused(breakers: Breakers, key: Key = KEY) -> CircuitOpen:
    with pytest.raises(CircuitOpen) as refused:
        breakers.enter(key)
    return refused.value


@pytest.mark.sentence("001", "StepProcessor: circuit-break on repeated provider errors")
def test_it_opens_after_five_faults_in_a_row_and_says_so() -> None:
    breakers = Breakers(VirtualClock())
    _fail(breakers, 4)
    breakers.enter(KEY).answered()
    _fail(breakers, 4)
    assert breakers.refusal(KEY) is None
    _fail(breakers)
    error = _refused(breakers)
    assert isinstance(error, Postponed)
    assert (error.after, error.provider, error.model) == (30, "openai", "gpt-4o")
    assert str(error) == (
        "circuit breaker open for openai, model 'gpt-4o': 5 failures in a row (last: ProviderUnavailable 503). "
        "Retry in 30 s"
    )


@pytest.mark.parametrize("kind", [RateLimited, ProviderUnavailable, ProviderTimeout, StreamCut])
def test_what_is_worth_a_retry_is_a_fault(kind: type[ProviderError]) -> None:
    breakers = Breakers(VirtualClock())
    for _ in range(5):
        breakers.enter(KEY).failed(kind())
    assert kind.__name__ in str(_refused(breakers))


@pytest.mark.parametrize("kind", [AuthenticationFailed, ModelNotFound, ContextOverflow, RequestRefused])
def test_a_refusal_is_an_answer(kind: type[ProviderError]) -> None:
    breakers = Breakers(VirtualClock())
    for _ in range(9):
        breakers.enter(KEY).failed(kind())
    _fail(breakers, 4)
    breakers.enter(KEY).failed(kind())
    _fail(breakers, 4)
    assert breakers.refusal(KEY) is None


@pytest.mark.parametrize("error", [NotConfigured("no key"), NotSupported("no embed()"), ValueError("ours")])
def test_what_went_wrong_here_counts_neither_way(error: Exception) -> None:
    breakers = Breakers(VirtualClock())
    _fail(breakers, 4)
    for _ in range(9):
        breakers.enter(KEY).failed(error)
    assert breakers.refusal(KEY) is None
    _fail(breakers)
    assert breakers.refusal(KEY) is not None


def test_one_probe_at_a_time_closes_it_by_succeeding() -> None:
    clock = VirtualClock()
    breakers = Breakers(clock)
    _fail(breakers, 5)
    clock.advance(29.9)
    assert _refused(breakers).after == pytest.approx(0.1)
    clock.advance(0.1)
    probe = breakers.enter(KEY)
    waiting = [_refused(breakers) for _ in range(20)]
    assert {each.after for each in waiting} == {RECHECK}
    assert "One call is probing it now" in str(waiting[0])
    probe.answered()
    _fail(breakers, 4)
    assert breakers.refusal(KEY) is None


def test_a_failed_probe_doubles_the_window_up_to_five_minutes_and_success_resets_it() -> None:
    clock = VirtualClock()
    breakers = Breakers(clock)
    _fail(breakers, 5)
    windows = []
    for _ in range(6):
        windows.append(_refused(breakers).after)
        clock.advance(windows[-1])
        _fail(breakers)
    assert windows == [30, 60, 120, 240, 300, 300]
    clock.advance(300)
    breakers.enter(KEY).answered()
    _fail(breakers, 5)
    assert _refused(breakers).after == 30


def test_a_probe_that_is_refused_found_the_provider_well() -> None:
    clock = VirtualClock()
    breakers = Breakers(clock)
    _fail(breakers, 5)
    clock.advance(30)
    breakers.enter(KEY).failed(RequestRefused("bad tool", status=400))
    for _ in range(3):
        breakers.enter(KEY)


def test_a_dropped_probe_lets_the_next_one_through_at_once() -> None:
    clock = VirtualClock()
    breakers = Breakers(clock)
    _fail(breakers, 5)
    clock.advance(30)
    breakers.enter(KEY).dropped()
    second = breakers.enter(KEY)
    _refused(breakers)
    second.failed(ProviderUnavailable())
    assert _refused(breakers).after == 60


def test_a_probe_nobody_settles_is_not_waited_for_for_ever() -> None:
    clock = VirtualClock()
    breakers = Breakers(clock)
    _fail(breakers, 5)
    clock.advance(30)
    lost = breakers.enter(KEY)
    clock.advance(299)
    assert _refused(breakers).after == 1
    clock.advance(1)
    second = breakers.enter(KEY)
    lost.answered()
    _refused(breakers)
    second.answered()
    breakers.enter(KEY)


def test_calls_from_before_it_opened_have_no_say() -> None:
    clock = VirtualClock()
    breakers = Breakers(clock)
    early = [breakers.enter(KEY) for _ in range(3)]
    _fail(breakers, 5)
    clock.advance(10)
    early[0].answered()
    early[1].failed(ProviderUnavailable())
    early[2].dropped()
    assert _refused(breakers).after == 20


def test_only_the_first_outcome_of_a_permit_counts() -> None:
    breakers = Breakers(VirtualClock())
    permit = breakers.enter(KEY)
    for _ in range(9):
        permit.failed(ProviderUnavailable())
    assert breakers.refusal(KEY) is None


def test_each_provider_endpoint_and_model_has_its_own() -> None:
    breakers = Breakers(VirtualClock())
    _fail(breakers, 5)
    provider, endpoint, model = KEY
    for other in (("litellm", endpoint, model), (provider, "http://127.0.0.1/", model), (provider, endpoint, "o9")):
        breakers.enter(other)
    _refused(breakers)


def test_what_is_well_again_is_not_kept_in_the_table() -> None:
    breakers = Breakers(VirtualClock())
    for n in range(50):
        key = ("openai", "", str(n))
        _fail(breakers, 1, key)
        breakers.enter(key).answered()
    assert breakers._circuits == {}


@for_each("seed", range(50))
def test_an_outage_costs_one_probe_a_window(seed: int) -> None:
    """Up to 20 calls at a time come and go at random for two hours, and the provider is down for a part of them."""
    chance, clock = random.Random(seed), VirtualClock()
    breakers = Breakers(clock)
    up_again = 60 + chance.uniform(300, 3600)
    under_way: list[tuple[float, CircuitPermit]] = []
    probes: list[CircuitPermit] = []
    failed_at: list[float] = []
    while clock.boot() < 7200:
        clock.advance(chance.uniform(0, 3))
        for call in [each for each in under_way if each[0] <= clock.boot()]:
            under_way.remove(call)
            due, permit = call
            if chance.random() < 0.05:
                permit.dropped()
            elif 60 <= due < up_again:
                permit.failed(ProviderUnavailable())
                if permit in probes:
                    failed_at.append(clock.boot())
            else:
                permit.answered()
            if permit in probes:
                probes.remove(permit)
        was_open = KEY in breakers._circuits and breakers._circuits[KEY].window > 0
        if len(under_way) < 20 and breakers.refusal(KEY) is None:
            permit = breakers.enter(KEY)
            under_way.append((clock.boot() + chance.uniform(0, 20), permit))
            if was_open:
                assert probes == [], "a second probe beside the first"
                probes.append(permit)
    assert breakers.refusal(KEY) is None, "closed again long after the outage"
    assert failed_at
    windows = [60, 120, 240, *([300] * 99)]
    assert all(
        later - earlier >= window for earlier, later, window in zip(failed_at, failed_at[1:], windows, strict=False)
    )


def test_threads_share_one_probe() -> None:
    clock = VirtualClock()
    breakers = Breakers(clock)
    _fail(breakers, 5)
    clock.advance(30)
    through: list[CircuitPermit] = []
    gate = threading.Barrier(8)

    def call() -> None:
        gate.wait()
        for _ in range(200):
            try:
                through.append(breakers.enter(KEY))
            except CircuitOpen:
                continue

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(through) == 1
