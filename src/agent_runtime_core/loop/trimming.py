"""Keep tool calls and their results together in a trimmed conversation. Pure functions on plain values.

Messages are in OpenAI's chat format, or have Anthropic's blocks as their content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_CALL, _RESULT = "tool_use", "tool_result"
_EXCHANGE: Final = frozenset({_CALL, _RESULT})


def with_whole_exchanges(trimmed: Sequence[Any], whole: Sequence[Any]) -> list[Any]:
    """Return trimmed messages in which each tool call has its result, and each result its call.

    Providers reject other messages. A call without its result is removed together with its other results, and so is a
    result without its call. The results that the model has not seen yet stay: without them, it would call again.

    Args:
        trimmed: What a trim hook returned.
        whole: The messages before.
    """
    cut = _cut(trimmed, _Owners(whole))
    if not cut:
        return list(trimmed)
    unseen = _unseen(whole)
    restored = [each for each in _parts(trimmed, unseen, whole) if each in cut]
    found: list[Any] = []
    for at, message in enumerate(trimmed):
        if restored and at == restored[0]:
            kept = [trimmed[each] for each in restored]
            found += [next((one for one in kept if _ids(one) == _ids(each)), each) for each in unseen]
        if at in restored:
            continue
        rest = _without_exchange(message) if at in cut else message
        if rest is not None:
            found.append(rest)
    return found


class _Owners:
    """Which answer requested the calls of a result.

    The ids are not enough: some servers number the calls of each answer from the beginning.
    """

    def __init__(self, messages: Sequence[Any]) -> None:
        self._pairs = [
            (messages[each], messages[answer])
            for answer, results, _ in _exchanges(messages)
            if answer is not None
            for each in results
        ]
        self._answers = {id(result): answer for result, answer in self._pairs}

    def fit(self, results: Sequence[Any], answer: Any) -> bool:
        """Return whether results may belong to an answer with their ids. A hook may have copied or changed them."""
        owners = [found for each in results if (found := self._of(each))]
        if any(answer == each for _, each in self._pairs):
            return all(answer in each for each in owners)
        return not owners or any(all(each in other for other in owners) for each in owners[0])

    def _of(self, result: Any) -> list[Any]:
        owner = self._answers.get(id(result))
        return [answer for each, answer in self._pairs if each == result] if owner is None else [owner]


def _cut(messages: Sequence[Any], owners: _Owners) -> set[int]:
    """Return the positions of calls without all of their results, and of results without their call."""
    cut = set[int]()
    for answer, results, missing in _exchanges(messages):
        if answer is None:
            cut.update(results)
        elif missing or not owners.fit([messages[each] for each in results], messages[answer]):
            cut |= {answer, *results}
    return cut


def _exchanges(messages: Sequence[Any]) -> Iterator[tuple[int | None, list[int], set[Any]]]:
    """Yield the positions of an answer with calls and of the results after it, and the ids of calls without a result.

    For a result that belongs to no call, the answer is None.
    """
    answer: int | None = None
    results: list[int] = []
    missing: set[Any] = set()
    for at, message in enumerate(messages):
        calls, found = _ids(message)
        if found and answer is not None and found <= missing:
            results.append(at)
            missing -= found
        elif found:
            yield None, [at], set()
        if not found or calls:  # the results of an answer follow it directly
            if answer is not None:
                yield answer, results, missing
            answer, results, missing = (at if calls else None), [], set(calls)
    if answer is not None:
        yield answer, results, missing


def _unseen(messages: Sequence[Any]) -> list[Any]:
    """Return the last answer and the results of its calls, if no other answer follows."""
    exchanges = [each for each in _exchanges(messages) if each[0] is not None]
    if not exchanges:
        return []
    answer, results, _ = exchanges[-1]
    assert answer is not None
    if any(_role(each) == "assistant" for each in messages[answer + 1 :]):
        return []
    return [messages[answer], *(messages[each] for each in results)]


def _parts(trimmed: Sequence[Any], unseen: Sequence[Any], whole: Sequence[Any]) -> list[int]:
    """Return the positions of the messages of `unseen`, or of those by which a hook has replaced them."""
    calls = _ids(unseen[0])[0] if unseen else frozenset[Any]()
    found: list[int] = []
    for at in range(len(trimmed) - 1, -1, -1):
        message = trimmed[at]
        requested, answered = _ids(message)
        ids = requested | answered
        if ids and ids <= calls and (message in unseen or message not in whole):
            found.append(at)
        if _role(message) == "assistant":
            break
    return found[::-1]


def _ids(message: Any) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the ids of the calls that a message requests, and of those whose results it has."""
    if not isinstance(message, Mapping):
        return frozenset(), frozenset()
    content = message.get("content")
    blocks = [each for each in content if isinstance(each, Mapping)] if isinstance(content, list) else []
    calls = [each.get("id") for each in message.get("tool_calls") or () if isinstance(each, Mapping)]
    calls += [each.get("id") for each in blocks if each.get("type") == _CALL]
    results = [each.get("tool_use_id") for each in blocks if each.get("type") == _RESULT]
    if message.get("role") == "tool":
        results.append(message.get("tool_call_id"))
    return frozenset(calls), frozenset(results)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _without_exchange(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a message says besides tool calls and results; None if that is nothing."""
    if message.get("role") == "tool":
        return None
    content = message.get("content")
    if isinstance(content, list):
        content = [each for each in content if not (isinstance(each, Mapping) and each.get("type") in _EXCHANGE)]
    if not content or (isinstance(content, str) and not content.strip()):
        return None
    rest = {name: value for name, value in message.items() if name not in ("tool_calls", "provider_fields")}
    return {**rest, "content": content}
