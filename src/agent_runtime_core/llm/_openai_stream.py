"""Assemble a streamed answer in OpenAI's chat format from its deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ProviderUnavailable
from ._finish_reasons import COMPLETE, FAILED, native_reason, reason_of
from ._openai_format import calls_in, incoming, is_whole, joined, text_of_answer
from ._openai_usage import cost_of, merged_usage, reports_no_tokens, usage_of
from ._provider import Completion
from ._provider_errors import require_answer

#: Fields whose text arrives in parts; every other text field of a delta is complete.
_GROWING = frozenset(
    {"reasoning", "reasoning_content", "refusal", "thinking", "text", "summary", "data", "signature", "transcript"}
)


class _Call:
    """A tool call that is being assembled."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments = ""
        self.rest: dict[str, Any] = {}
        self._last = ""
        #: Whether each piece of the arguments begins with the piece before it.
        self._cumulative = True

    def add(self, delta: Mapping[str, Any]) -> None:
        function = delta.get("function") or {}
        self.id = self.id or str(delta.get("id") or "")
        name = function.get("name") or ""
        # Servers send a name once, in parts, or again with each delta.
        if name != self.name and not (self.name and self.arguments):
            self.name += name
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            self.arguments += arguments
            if arguments:
                self._cumulative = self._cumulative and arguments.startswith(self._last)
                self._last = arguments
        elif arguments:
            self.rest["function"] = {"arguments": arguments}
        grow(self.rest, {k: v for k, v in delta.items() if k not in ("index", "id", "function") and v is not None})

    @property
    def is_open(self) -> bool:
        """Whether arguments of this call are still to come."""
        return self.arguments.strip() in ("", "{}") or not is_whole(self.arguments)

    def as_dict(self) -> dict[str, Any]:
        complete = (self.rest.get("function") or {}).get("arguments")
        if self._cumulative and self._last != self.arguments and is_whole(self._last) and not is_whole(self.arguments):
            # Each delta had all arguments so far.
            complete = complete or self._last
        return {**self.rest, "id": self.id, "function": {"name": self.name, "arguments": complete or self.arguments}}


class Assembly:
    """Assembles the chunks of a stream in order; `answer()` returns the answer once it is complete."""

    def __init__(self, provider: str, model: str, taken: set[str]) -> None:
        self._provider, self._model, self._taken = provider, model, taken
        self._text: list[str] = []
        self._half = ""
        self._refusal = ""
        self._calls: list[_Call] = []
        self._at_index: dict[int, _Call] = {}
        self._rest: dict[str, Any] = {}
        self._usage: Mapping[str, Any] | None = None
        self.finish_reason: str = ""
        #: The word of the model's provider for it, if a gateway passes it on.
        self.native_reason: Any = None
        #: Whether the usage of the finished answer was reported.
        self.has_usage: bool = False
        #: Whether the last chunk added text or a part of a call.
        self.grew: bool = False

    @property
    def finished(self) -> bool:
        """Whether the answer is complete. What follows a failure may describe it."""
        return bool(self.finish_reason) and reason_of(self.finish_reason, self.native_reason) != FAILED

    def add_usage(self, reported: Any) -> None:
        """Add a report of the usage so far."""
        self._usage = merged_usage(self._usage, reported)

    def add_refusal(self, chunk: Mapping[str, Any]) -> None:
        """Add only the words of a refusal in a chunk."""
        for choice in chunk.get("choices") or ():
            self._refusal += str((choice.get("delta") or {}).get("refusal") or "")

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Add a chunk; return the text that it adds."""
        known, self._model = self._usage, chunk.get("model") or self._model
        self.add_usage(chunk.get("usage"))
        if isinstance(of_groq := chunk.get("x_groq"), Mapping):
            self.add_usage(of_groq.get("usage"))
        added, self.grew = "", False
        for choice in chunk.get("choices") or ():
            if not isinstance(choice, Mapping) or choice.get("index"):
                continue
            self.add_usage(choice.get("usage"))  # Moonshot's place for it
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.native_reason = native_reason(choice) or self.native_reason
            delta = self._delta_of(choice)
            added += text_of_answer(delta.get("content"))
            for call in calls_in(delta):
                self._call_of(call).add(call)
                self.grew = True
            skipped = ("role", "content", "tool_calls", "function_call")
            grow(self._rest, {k: v for k, v in delta.items() if k not in skipped and v is not None})
        self.has_usage = self.has_usage or (bool(self.finish_reason) and self._usage is not known)
        self.grew = self.grew or bool(added)
        added = self._half + added
        # The first half of a surrogate pair waits for the second half.
        self._half = added[-1:] if "\ud800" <= added[-1:] <= "\udbff" else ""
        text: str = joined(added.removesuffix(self._half))
        self._text.append(text)
        return text

    def _delta_of(self, choice: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a choice adds; some servers send a complete message instead, or both."""
        delta: Mapping[str, Any] = choice.get("delta") or {}
        message = choice.get("message")
        if not isinstance(message, Mapping) or any(delta.get(name) for name in ("content", "tool_calls")):
            return delta
        return delta if self._calls or any(self._text) else message

    def _call_of(self, delta: Mapping[str, Any]) -> _Call:
        index, call_id = delta.get("index"), delta.get("id")
        function = delta.get("function") or {}
        if isinstance(index, int) and not function.get("name") and (call := self._continued(index, call_id, function)):
            return call
        if isinstance(index, int):
            current = self._at_index.get(index)
        else:
            known = [call for call in self._calls if call_id and call.id == call_id] or self._calls
            current = known[-1] if known else None
        if current is not None and not _starts_next_call(current, index, call_id, function):
            return current
        call = _Call()
        self._calls.append(call)
        if isinstance(index, int):
            self._at_index[index] = call
        return call

    def _continued(self, index: int, call_id: Any, function: Mapping[str, Any]) -> _Call | None:
        """Return the call that a delta without a name continues; some servers send its parts under two indexes."""
        current = self._at_index.get(index)
        last = self._calls[-1] if self._calls else None
        if current is None and call_id:
            current = next((call for call in self._calls if call.id == call_id), None)
        if last is None or current is last:
            return current
        arguments = function.get("arguments")
        if current is None:
            if arguments and not last.is_open and arguments != last.arguments:
                return None
            if arguments:
                self._at_index[index] = last
            return last
        return last if arguments and last.is_open and not current.is_open else current

    def finish(self) -> None:
        """Take the answer as finished by the server, which did not send a finish reason."""
        whole = all(call.name and (not call.arguments or is_whole(call.arguments)) for call in self._calls)
        if not self.finish_reason and whole and (self._calls or any(self._text)):
            self.finish_reason = "tool_calls" if self._calls else "stop"

    def usage(self) -> dict[str, int]:
        """Return the usage that was reported so far."""
        return usage_of(self._usage, answered=bool(self._calls or any(self._text)))

    def cost(self) -> float | None:
        """Return the cost in USD that was reported so far."""
        return cost_of(self._usage)

    def answer(self) -> Completion | None:
        """Return the answer, or None if it is not complete."""
        if not self.finish_reason:
            return None
        reason = reason_of(self.finish_reason, self.native_reason)
        calls = [call.as_dict() for call in self._calls if call.name or call.arguments]
        if reason in COMPLETE and any(not call["function"]["name"] for call in calls):
            wrong = "the answer has a tool call without naming the tool"
            raise ProviderUnavailable(wrong, provider=self._provider, model=self._model)
        merged = {"refusal": self._refusal, **self._rest, "content": "".join(self._text), "tool_calls": calls}
        words = self.finish_reason, self.native_reason
        return completion_of(merged, self._usage, words, self._provider, self._model, self._taken)


def completion_of(
    reported: Mapping[str, Any],
    usage: Mapping[str, Any] | None,
    words: tuple[Any, Any],
    provider: str,
    model: str,
    taken: set[str],
    raw: Any = None,
) -> Completion:
    """Return the answer for a complete message.

    Args:
        reported: The message.
        usage: The usage as the server reported it.
        words: Why it ended, in the word of the server and, if a gateway passes it on, of the model's provider.
        provider: The name of the provider.
        model: The model that answered.
        taken: The ids of the earlier calls in the conversation.
        raw: The response of the provider's package.
    """
    reason = reason_of(*words)
    message = incoming(reported, provider, reason, taken)
    if message.get("refusal") and not message.get("tool_calls"):
        reason = "refusal"
    word = words[0] if reason == reason_of(words[0], None) else words[1]
    no_tokens = reports_no_tokens(usage)
    require_answer(message, reason, word, no_tokens=no_tokens, provider=provider, model=model)
    answered = bool(message.get("content") or message.get("refusal") or reported.get("tool_calls"))
    return Completion(message, usage_of(usage, answered=answered), model, reason, raw, cost_of(usage))


def _starts_next_call(current: _Call, index: Any, call_id: Any, function: Mapping[str, Any]) -> bool:
    # Servers repeat an id, send a new id with each delta, or send one index or none for all calls. So only a name
    # starts a call: with a different id, after complete arguments, or if there is no index and the name differs.
    name = function.get("name")
    if not name or not current.name or (call_id and call_id == current.id):
        return False
    if index is not None and name == current.name and not is_whole(current.arguments):
        return False  # some servers repeat the name and send a new id with each delta
    if index is not None and name == current.name and not call_id and function.get("arguments") in (None, ""):
        return False  # some servers repeat the name in a last, empty delta
    return bool(call_id and current.id) or is_whole(current.arguments) or (index is None and name != current.name)


def grow(merged: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Merge a delta's fields into those received so far."""
    for key, value in delta.items():
        previous = merged.get(key)
        if isinstance(value, str) and isinstance(previous, str) and key in _GROWING:
            merged[key] = previous + value
        elif isinstance(value, Mapping):
            inner = merged[key] = dict(previous) if isinstance(previous, Mapping) else {}
            grow(inner, value)
        elif isinstance(value, list):
            items = merged[key] = list(previous) if isinstance(previous, list) else []
            for item in value:
                _grow_list(items, item)
        elif value is not None:
            merged[key] = value


def _grow_list(items: list[Any], item: Any) -> None:
    if not isinstance(item, Mapping):
        items.append(item)
        return
    for known in items:
        if isinstance(known, dict) and _continues(known, item):
            grow(known, item)
            return
    items.append(dict(item))


def _continues(known: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    if item.get("index") is not None:
        return bool(known.get("index") == item["index"])
    # A signature ends a thinking block.
    return known.get("type") == item.get("type") == "thinking" and not known.get("signature")
