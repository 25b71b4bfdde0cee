"""The messages of agent loops, as stored in the journal of their run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from .._core.codec.json import arguments_digest, encode
from .._journal.record import DONE, STARTED, Record
from ..tools.confirmation import decision_of
from .step import Identity

#: What a model gets for a call without a result.
NOT_RUN: Final = "Error: not run"
INTERRUPTED: Final = "Error: the call was interrupted before it had a result. It may have taken effect"
#: Fields and types of blocks that a provider signed. It rejects an answer with such a block if a call is changed.
_SIGNED: Final = frozenset({"signature", "thought_signature", "thoughtSignature", "encrypted_content"})
_SIGNED_TYPES: Final = frozenset({"thinking", "redacted_thinking", "reasoning.encrypted"})


class LoopTurn(NamedTuple):
    """A model call of an agent loop, with the results of the tool calls that it requested.

    Attributes:
        key: The key of the model call.
        said: What the loop added to its conversation before the call. Before its first call, that is the whole
            conversation, unless it `continues` the messages that the run began with.
        continues: The conversation of the loop begins with those messages, after its prompts.
        received: The messages that were sent to the run and taken for this call.
        answer: The message of the model, with the arguments of calls that a person edited.
        calls: The calls that it requests.
        results: The known results of those calls, by the index of the call. The result of an edited call says what ran
            if the answer itself stays as it is.
        begun: The indexes of the calls that the loop began: it asked a person, called a hook or the tool.
        started: The indexes of the calls whose tool was called.
        owned: The agent stores the conversation itself.
    """

    key: str
    said: list[Any]
    continues: bool
    received: list[Any]
    answer: dict[str, Any]
    calls: list[dict[str, Any]]
    results: dict[int, dict[str, Any]]
    begun: set[int]
    started: set[int]
    owned: bool

    @property
    def loop(self) -> str:
        """The key of the loop."""
        return self.key.rpartition(":")[0]

    @property
    def is_first(self) -> bool:
        """Whether this is the first call of its loop."""
        return self.key.endswith(":0")

    def closed_results(self) -> list[tuple[dict[str, Any], bool]]:
        """Return a result for each call, and whether it only closes a call without a result."""
        return [
            (self.results[index], False)
            if index in self.results
            else (unanswered(call.get("id"), INTERRUPTED if index in self.started else NOT_RUN), True)
            for index, call in enumerate(self.calls)
        ]


def unanswered(call_id: Any, content: str = NOT_RUN) -> dict[str, Any]:
    """Return the message for a tool call without an answer; by default because it was not run."""
    return {"role": "tool", "tool_call_id": call_id, "content": content, "metadata": {"is_error": True}}


def loop_turns(records: Iterable[Record], read: Callable[[str | None], Any]) -> Iterator[LoopTurn]:
    """Yield the turns of all agent loops in a journal, in the order of their answers.

    A loop inside a step, such as the loop of a tool, keeps a separate conversation and is left out.

    Args:
        records: The journal.
        read: Decodes a recorded value.
    """
    done: dict[Identity, Record] = {}
    begun: set[str] = set()  # keys of what was begun, with the keys of all calls that it is part of
    started: set[str] = set()
    for each in records:
        if each.kind == DONE:
            done[each.name, each.key] = each
        begun |= {each.key, each.key.rpartition(":")[0]}
        if each.kind == STARTED and (each.name == "tool" or each.name.startswith("call:")):
            started.add(each.key.removesuffix(":child"))
    for (name, key), record in done.items():
        if name == "model" and "@" not in key and isinstance(answer := read(record.result), dict):
            asked, message = answer.get("asked") or {}, answer.get("message")
            if isinstance(message, dict) and isinstance(asked, dict):  # a user's step may be named "model"
                yield _turn(key, asked, message, done, read, begun, started)


def _turn(
    key: str, asked: Mapping[str, Any], message: dict[str, Any], done: Mapping[Identity, Record],
    read: Callable[[str | None], Any], begun: set[str], started: set[str],
) -> LoopTurn:  # fmt: skip
    calls = calls_of(message)
    keys = [f"{key}:{index}" for index in range(len(calls))]
    edits = {index: edited for index, call in enumerate(calls) if (edited := _edit(keys[index], call, done, read))}
    answer, notes = with_edits(message, edits)
    results = tool_results(key, calls, done, read)
    for index in results.keys() & notes.keys():
        results[index]["content"] = with_note(results[index]["content"], notes[index])
    return LoopTurn(
        key=key, said=_list(asked.get("said")), continues="input" in asked, received=_list(asked.get("received")),
        answer=answer, calls=calls, results=results,
        begun={index for index, each in enumerate(keys) if each in begun},
        started={index for index, each in enumerate(keys) if each in started}, owned=asked.get("owned") is True,
    )  # fmt: skip


def tool_results(
    key: str, calls: Iterable[Mapping[str, Any]], done: Mapping[Identity, Record], read: Callable[[str | None], Any]
) -> dict[int, dict[str, Any]]:
    """Return the recorded results of the calls of the model call `key` as messages, by the index of the call."""
    found: dict[int, dict[str, Any]] = {}
    for index, call in enumerate(calls):
        if (record := done.get(("tool", f"{key}:{index}"))) is not None:
            found[index] = _result(call.get("id"), read(record.result))
    return found


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of an answer."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) and all(isinstance(each, dict) for each in calls) else []


def _result(call_id: Any, value: Any) -> dict[str, Any]:
    """Return the message with the recorded answer to a call."""
    content = value.get("content") if isinstance(value, dict) else value
    message: dict[str, Any] = {"role": "tool", "tool_call_id": call_id, "content": content}
    if isinstance(value, dict) and value.get("ok") is False:
        message["metadata"] = {"is_error": True}
    return message


def _edit(
    key: str, call: Mapping[str, Any], done: Mapping[Identity, Record], read: Callable[[str | None], Any]
) -> str | None:
    """Return the arguments of a call as a person edited them, or None."""
    function = call.get("function")
    name = (function if isinstance(function, dict) else call).get("name")
    if (record := done.get((f"signal:tool:{name}", key))) is None:
        return None
    edited, condition = decision_of(read(record.result)).arguments, done.get(("condition", key))
    if edited is None:
        return None
    shown = question_details(name, edited, call.get("id"), None if condition is None else read(condition.result))
    info = read(record.info)  # with the digest of what the question showed
    return None if isinstance(info, dict) and info.get("approval") == arguments_digest(shown) else encode(edited)


def question_details(name: Any, arguments: dict[str, Any], call_id: Any, text: Any = None) -> dict[str, Any]:
    """Return what the question about a call shows; `text` is the outcome of the condition of its tool."""
    details = {"tool_name": name, "tool_args": arguments, "tool_call_id": call_id}
    return {**details, "question": text} if isinstance(text, str) and text else details


def with_edits(message: dict[str, Any], edits: Mapping[int, str]) -> tuple[dict[str, Any], dict[int, str]]:
    """Show a model the arguments that a person edited.

    Args:
        message: An answer of the model.
        edits: The edited arguments, by the index of the call.

    Returns:
        The answer with these arguments, and what the results of the calls must say if its provider signed it: the
        answer then stays as it is.
    """
    if edits and _is_signed(message):
        note = "Note: a person changed the arguments of this call before it ran, to "
        return message, {index: f"{note}{text}" for index, text in edits.items()}
    if not edits:
        return message, {}
    calls = [
        _with_arguments(call, edits[index]) if index in edits else call for index, call in enumerate(calls_of(message))
    ]
    return {**message, "tool_calls": calls}, {}


def with_note(content: Any, note: str) -> Any:
    """Return the content of a result with a note for the model."""
    return [*content, {"type": "text", "text": note}] if isinstance(content, list) else f"{content}\n\n{note}"


def _with_arguments(call: dict[str, Any], text: str) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": {**function, "arguments": text}}
    return {**call, "arguments": text}


def _is_signed(value: Any) -> bool:
    """Whether an answer of a model contains a part that its provider signed together with the calls."""
    if isinstance(value, dict):
        kind = value.get("type")
        if any(value.get(name) for name in _SIGNED) or (isinstance(kind, str) and kind in _SIGNED_TYPES):
            return True
        return any(_is_signed(each) for name, each in value.items() if name != "arguments" and name != "input")
    return isinstance(value, list) and any(map(_is_signed, value))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
