"""Answers to the review of a step in doubt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from .._core.validation import must

#: What an answer looks like, as JSON Schema. The plain strings "retry" and "failed" are accepted too.
ANSWER_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"outcome": {"enum": ["done", "retry", "failed"]}, "result": {}},
    "required": ["outcome"],
}


def reviewed(answer: Any, read: Callable[[Any], Any] = lambda result: result) -> tuple[str, Any]:
    """Return the outcome of a step in doubt by the answer of a reviewer, and its result if it was done.

    Raises:
        InvalidArgument: The answer has no known outcome.
    """
    outcome = answer.get("outcome") if isinstance(answer, dict) else answer
    if outcome == "done" and isinstance(answer, dict):
        return outcome, read(answer.get("result"))
    if outcome in ("retry", "failed"):
        return outcome, None
    outcomes = '{"outcome": "done", "result": …}, {"outcome": "retry"} or {"outcome": "failed"}'
    raise must("the answer", f"be {outcomes}", answer)
