"""The messages of agent loops, as the journal of their run has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from .._core.codec.json import encode
from .._journal.record import DONE, STARTED, Record
from ..tools.arguments import BadArguments, read_arguments
from ..tools.confirmation import decision_of
from .step_scope import Identity

#: What a model gets for a call without a result.
NOT_RUN: Final = "Error: not run"
INTERRUPTED: Final = "Error: the call was interrupted before it had a result. It may have taken effect"


class LoopTurn(NamedTuple):
    """A model call of an agent loop, with the results of the tool calls that it requested.

    Attributes:
        key: The key of the model call.
        said: What the loop has added to its conversation before the call. Before its first call, that is the whole
            conversation, unless it `continues` the messages that the run began with.
        continues: The conversation of the loop begins with those messages, after its prompts.
        received: The messages that were sent to the run and taken for this call.
        answer: The message of the model, with the arguments of calls that a person has edited.
        calls: The calls that it requests.
        results: The results of those calls that have one, by the index of the call.
        begun: The indexes of the calls that the loop has begun: it has asked a person, called a hook or the tool.
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
        """Return a result for each call, and whether it only closes a call that has none."""
        return [
            (self.results[index], False)
            if index in self.results
            else (unanswered(call.get("id"), INTERRUPTED if index in self.started else NOT_RUN), True)
            for index, call in enumerate(self.calls)
        ]


def unanswered(call_id: Any, content: str = NOT_RUN) -> dict[str, Any]:
    """Return the message for a tool call that has no answer; by default because it was not run."""
    return {"role": "tool", "tool_call_id": call_id, "content": content, "metadata": {"is_error": True}}


def loop_turns(records: Iterable[Record], read: Callable[[str | None], Any]) -> Iterator[LoopTurn]:
    """Yield the turns of all agent loops in a journal, in the order of their answers.

    A loop inside a step, such as that of a tool, has a separate conversation and is left out.

    Args:
        records: The journal.
        read: Decodes a recorded value.
    """
    done: dict[Identity, Record] = {}
    begun: set[str] = set()  # keys of what was begun, with those of all calls that it is part of
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
    calls, edits = calls_of(message), dict[int, str]()
    for index, call in enumerate(calls):
        function = call.get("function")
        known = function if isinstance(function, dict) else call
        if (record := done.get((f"signal:tool:{known.get('name')}", f"{key}:{index}"))) is not None:
            edited, hooked = decision_of(read(record.result)).arguments, done.get(("hook", f"{key}:{index}:before"))
            if edited is not None and edited != (_arguments(known) if hooked is None else read(hooked.result)):
                edits[index] = encode(edited)
    keys = [f"{key}:{index}" for index in range(len(calls))]
    return LoopTurn(
        key=key, said=_list(asked.get("said")), continues="input" in asked, received=_list(asked.get("received")),
        answer=_edited(message, edits), calls=calls, results=tool_results(key, calls, done, read),
        begun={index for index, each in enumerate(keys) if each in begun},
        started={index for index, each in enumerate(keys) if each in started}, owned=asked.get("owned") is True,
    )  # fmt: skip


def tool_results(
    key: str, calls: Iterable[Mapping[str, Any]], done: Mapping[Identity, Record], read: Callable[[str | None], Any]
) -> dict[int, dict[str, Any]]:  # fmt: skip
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


def _edited(message: dict[str, Any], edits: Mapping[int, str]) -> dict[str, Any]:
    """Return an answer with the arguments that a person has approved instead of those of the model.

    What only its provider reads is left out then: it has the arguments of the model.
    """
    if not edits:
        return message
    calls = [
        {**each, "function": {**each.get("function", {}), "arguments": edits[index]}} if index in edits else each
        for index, each in enumerate(calls_of(message))
    ]
    return {**{name: value for name, value in message.items() if name != "provider_fields"}, "tool_calls": calls}


def _arguments(function: Mapping[str, Any]) -> Any:
    try:
        return read_arguments(function.get("arguments"))
    except BadArguments:
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
