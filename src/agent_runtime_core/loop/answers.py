"""Decide what an answer of a model is: complete, truncated, refused or blocked. Pure functions on plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from .._core.settings import SettingType, choice
from ..errors import AnswerRefused, OutputMismatch
from ..llm._finish_reasons import COMPLETE, FILTERED, LENGTH, MALFORMED, REFUSAL, normal_reason
from ..llm._openai_format import text_of_answer
from ..tools.arguments import BadArguments, read_arguments

#: What a loop does with a text that was cut at its length: fail, or return it as the answer.
ON_TRUNCATED: Final[SettingType] = choice("fail", "accept")


class Flaw(NamedTuple):
    """Why an answer is not complete.

    `reason` is a finish reason, `message` the text of the error, and `text` what the model wrote before that.
    """

    reason: str
    message: str
    text: str

    def error(self) -> OutputMismatch:
        """Return the error to raise."""
        kind = AnswerRefused if self.reason in (REFUSAL, FILTERED) else OutputMismatch
        return kind(self.message, self.text, finish_reason=self.reason)


def flaw_of(message: Mapping[str, Any], finish_reason: Any, *, accept_truncated: bool = False) -> Flaw | None:
    """Return why an answer must not be used, or None if it may be: then its tool calls run, or its text is the answer.

    A refused or blocked answer is never used, and no answer with an incomplete tool call. A text that was truncated is
    used only if `accept_truncated`. An answer that was truncated after complete tool calls is used: the model
    continues after their results.
    """
    finish = normal_reason(finish_reason)
    if finish in COMPLETE and not message.get("refusal") and not message.get("metadata"):  # most answers
        return None
    text = text_of_answer(message.get("content"))
    calls = message.get("tool_calls") or []
    if refused := text_of_answer(message.get("refusal")):
        return Flaw(REFUSAL, f"the model refused to answer: {refused}", refused)
    if finish == REFUSAL:
        return Flaw(REFUSAL, f"the model refused to answer (finish_reason 'refusal'){text and f': {text}'}", text)
    if finish == FILTERED:
        blocked = "the provider blocked the answer (finish_reason 'content_filter'). Rephrase the request"
        return Flaw(FILTERED, blocked, text)
    if finish == MALFORMED:
        return Flaw(MALFORMED, f"the model wrote a tool call that the provider cannot read ({finish_reason})", text)
    cut_call = _drops_call(message) or (finish == LENGTH and calls and _is_cut(calls[-1]))
    if cut_call:
        return Flaw(LENGTH, _truncated("in the middle of a tool call, which was not run"), text)
    if finish != LENGTH or calls or (accept_truncated and text):
        return None
    return Flaw(LENGTH, _truncated("before it was complete" if text else "before it had any text"), text)


def _truncated(where: str) -> str:
    return (
        f"the model's answer was truncated (finish_reason 'length') {where}. "
        "Increase max_tokens, or request less at once"
    )


def _drops_call(message: Mapping[str, Any]) -> bool:
    """Return whether the client dropped an incomplete tool call."""
    metadata = message.get("metadata")
    return isinstance(metadata, Mapping) and metadata.get("truncated_tool_call") is True


def _is_cut(call: Any) -> bool:
    """Return whether the last call of a truncated answer is incomplete; a custom client may have kept it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = (function if isinstance(function, Mapping) else call).get("arguments")
    if isinstance(arguments, str) and not arguments.strip():
        return True
    try:
        read_arguments(arguments)
    except BadArguments:
        return True
    return False
