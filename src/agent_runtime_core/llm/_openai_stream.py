"""Assemble a streamed answer in OpenAI's chat format from its deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ProviderUnavailable
from ._openai_format import incoming, is_whole, joined, usage_of
from ._provider import Completion

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

    def add(self, delta: Mapping[str, Any]) -> None:
        function = delta.get("function") or {}
        self.id = self.id or str(delta.get("id") or "")
        name = function.get("name") or ""
        # Servers send a name once, in parts, or again with each delta.
        if name != self.name and not self.arguments:
            self.name += name
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            self.arguments += arguments
        elif arguments:
            self.rest["function"] = {"arguments": arguments}
        grow(self.rest, {k: v for k, v in delta.items() if k not in ("index", "id", "function") and v is not None})

    def as_dict(self) -> dict[str, Any]:
        complete = (self.rest.get("function") or {}).get("arguments")
        return {**self.rest, "id": self.id, "function": {"name": self.name, "arguments": complete or self.arguments}}


class Assembly:
    """Assembles the chunks of a stream in order; `answer()` returns the answer once the provider has finished it."""

    def __init__(self, provider: str, model: str, taken: set[str]) -> None:
        self._provider, self._model, self._taken = provider, model, taken
        self._text: list[str] = []
        self._half = ""
        self._calls: list[_Call] = []
        self._at_index: dict[int, _Call] = {}
        self._rest: dict[str, Any] = {}
        self._usage: Mapping[str, Any] | None = None
        self.finish_reason: str = ""

    def add(self, chunk: Mapping[str, Any]) -> str:
        """Add a chunk; return the text that it adds."""
        self._model = chunk.get("model") or self._model
        self._usage = chunk.get("usage") or self._usage
        added = ""
        for choice in chunk.get("choices") or ():
            if choice.get("index"):
                continue
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            added += plain_text(delta.get("content"))
            for call in delta.get("tool_calls") or ():
                self._call_of(call).add(call)
            skipped = ("role", "content", "tool_calls", "function_call")
            grow(self._rest, {k: v for k, v in delta.items() if k not in skipped and v is not None})
        added = self._half + added
        # The first half of a surrogate pair waits for the second one.
        self._half = added[-1:] if "\ud800" <= added[-1:] <= "\udbff" else ""
        text: str = joined(added.removesuffix(self._half))
        self._text.append(text)
        return text

    def _call_of(self, delta: Mapping[str, Any]) -> _Call:
        index, call_id = delta.get("index"), delta.get("id")
        function = delta.get("function") or {}
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

    def answer(self) -> Completion | None:
        """Return the answer, or None if the provider has not finished it."""
        if not self.finish_reason:
            return None
        calls = [call.as_dict() for call in self._calls if call.name or call.arguments]
        wrong = "the provider reported an error" if self.finish_reason == "error" else ""
        if any(not call["function"]["name"] for call in calls):
            wrong = "the answer has a tool call without naming the tool"
        if wrong:
            raise ProviderUnavailable(wrong, provider=self._provider, model=self._model)
        merged = {**self._rest, "content": "".join(self._text), "tool_calls": calls}
        message = incoming(merged, self._provider, self.finish_reason, self._taken)
        return Completion(message, usage_of(self._usage), self._model, self.finish_reason)


def _starts_next_call(current: _Call, index: Any, call_id: Any, function: Mapping[str, Any]) -> bool:
    # Servers repeat an id, send a new one with each delta, or send one index or none for all calls. So only a name
    # starts a call: with a different id, after complete arguments, or if there is no index and the name differs.
    name = function.get("name")
    if not name or (call_id and call_id == current.id):
        return False
    if index is not None and name == current.name and not call_id and function.get("arguments") in (None, ""):
        return False  # some servers repeat the name in a last, empty delta
    return bool(call_id and current.id) or is_whole(current.arguments) or (index is None and name != current.name)


def plain_text(content: Any) -> str:
    """Return the text of a content, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(plain_text(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


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
