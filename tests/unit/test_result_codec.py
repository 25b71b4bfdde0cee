"""How a run ended, as values and back."""

from __future__ import annotations

from uuid import UUID

import pytest

from agent_runtime_core._core.codec.json import encode
from agent_runtime_core._execution.result_codec import (
    decode_result,
    encode_result,
    error_in,
    error_payload,
    result_from_payload,
    result_payload,
)
from agent_runtime_core.errors import UnserialisableResult
from agent_runtime_core.interfaces import ErrorInfo, RunResult
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus

FULL = RunResult(
    {"a": (1, b"2")}, [{"role": "user"}], {"tokens": 3}, {"f": {4}},
    ErrorInfo("E", "m", "stack", False, {"d": 1}), RunStatus.FAILED, UUID(int=7),
)  # fmt: skip


@pytest.mark.parametrize("result", [FULL, RunResult(), RunResult({"x": 1}, status=RunStatus.SUCCEEDED)])
def test_a_result_comes_back_as_it_was(result: RunResult) -> None:
    assert decode_result(encode_result(result)) == result
    assert result_from_payload(result_payload(result)) == result


def test_an_error_is_told_whole() -> None:
    assert error_payload(None) is None
    assert error_payload(FULL.error) == {
        "type": "E", "message": "m", "stack": "stack", "retriable": False, "details": {"d": 1},
    }  # fmt: skip


def test_what_is_missing_takes_its_default() -> None:
    assert result_from_payload({}) == RunResult()


def test_a_value_without_a_json_form_is_named() -> None:
    with pytest.raises(UnserialisableResult, match=r"\$\.final_output\.bad"):
        encode_result(RunResult({"bad": object()}))


@pytest.mark.parametrize(
    ("told", "error"),
    [
        (None, None),
        ("no", ErrorInfo("Error", "no")),
        ({"message": "boom", "code": 7}, ErrorInfo("Error", "boom", details={"code": 7})),
        ({"code": 7, "details": {"a": 1}}, ErrorInfo("Error", "", details={"a": 1, "code": 7})),
        ({"a": 7, "details": {"a": 1}}, ErrorInfo("Error", "", details={"a": 7, "details": {"a": 1}})),
        (
            {"type": 5, "retriable": "no", "details": [1]},
            ErrorInfo("Error", "", details={"type": 5, "retriable": "no", "details": [1]}),
        ),
        (error_payload(FULL.error), FULL.error),
    ],
)
async def test_whatever_a_queue_is_told_of_an_error_can_be_read(told: object, error: ErrorInfo | None) -> None:
    assert error_in(encode(told)) == error
    async with AgentRunner.open("memory://") as runner:
        run_id = await runner.submit("agent", {})
        await runner.queue.claim("w")
        await runner.queue.release(run_id, "w", False, error=told)
        result = await runner.wait(run_id, 1)
        assert (result.error, result.status) == (error, "failed")
