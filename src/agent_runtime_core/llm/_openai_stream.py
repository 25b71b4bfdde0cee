"""A streamed answer in OpenAI's chat format, put together from its deltas; it lives as long as the stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ProviderUnavailable
from ._openai_format import incoming, is_whole, joined, usage_of
from ._provider import Completion

#: Texts that come in pieces; any other text of a delta is whole each time.
_GROWING = frozenset(
    {"reasoning", "reasoning_content", "refusal", "thinking", "text", "summary", "data", "signature", "transcript"}
)


class _Call:
    """A tool call so far."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments = ""
        self.rest: dict[str, Any] = {}

    def take(self, delta: Mapping[str, Any]) -> None:
        function = delta.get("function") or {}
        self.id = self.id or str(delta.get("id") or "")
        name = function.get("name") or ""
        # A name comes whole, or in pieces, or whole again with each delta.
        if name != self.name and not self.arguments:
            self.name += name
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            self.arguments += arguments
        elif arguments:
            self.rest["function"] = {"arguments": arguments}
        grow(self.rest, {k: v for k, v in delta.items() if k not in ("index", "id", "function") and v is not None})

    def told(self) -> dict[str, Any]:
        whole = (self.rest.get("function") or {}).get("arguments")
        return {**self.rest, "id": self.id, "function": {"name": self.name, "arguments": whole or self.arguments}}


class Assembly:
    """Takes the chunks of a stream in order; `answer()` is there once the provider says that it is finished."""

    def __init__(self, provider: str, model: str, taken: set[str]) -> None:
        self._provider, self._model, self._taken = provider, model, taken
        self._text: list[str] = []
        self._half = ""
        self._calls: list[_Call] = []
        self._at_index: dict[int, _Call] = {}
        self._rest: dict[str, Any] = {}
        self._usage: Mapping[str, Any] | None = None
        self.finish_reason: str = ""

    def take(self, chunk: Mapping[str, Any]) -> str:
        """The text that this chunk adds."""
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
                self._call_of(call).take(call)
            skipped = ("role", "content", "tool_calls", "function_call")
            grow(self._rest, {k: v for k, v in delta.items() if k not in skipped and v is not None})
        added = self._half + added
        # The first half of a character waits for the other one.
        self._half = added[-1:] if "\ud800" <= added[-1:] <= "\udbff" else ""
        told: str = joined(added.removesuffix(self._half))
        self._text.append(told)
        return told

    def _call_of(self, delta: Mapping[str, Any]) -> _Call:
        index, call_id = delta.get("index"), delta.get("id")
        function = delta.get("function") or {}
        if isinstance(index, int):
            current = self._at_index.get(index)
        else:
            known = [call for call in self._calls if call_id and call.id == call_id] or self._calls
            current = known[-1] if known else None
        if current is not None and not _begins_another(current, index, call_id, function):
            return current
        call = _Call()
        self._calls.append(call)
        if isinstance(index, int):
            self._at_index[index] = call
        return call

    def answer(self) -> Completion | None:
        """The answer, or None if the provider has not said that it is finished."""
        if not self.finish_reason:
            return None
        calls = [call.told() for call in self._calls if call.name or call.arguments]
        wrong = "it says that it failed" if self.finish_reason == "error" else ""
        if any(not call["function"]["name"] for call in calls):
            wrong = "it finished a tool call without naming the tool"
        if wrong:
            raise ProviderUnavailable(wrong, provider=self._provider, model=self._model)
        told = {**self._rest, "content": "".join(self._text), "tool_calls": calls}
        message = incoming(told, self._provider, self.finish_reason, self._taken)
        return Completion(message, usage_of(self._usage), self._model, self.finish_reason)


def _begins_another(current: _Call, index: Any, call_id: Any, function: Mapping[str, Any]) -> bool:
    # Servers repeat an id, make up a new one with each delta, or give all calls one index or none: only a name says
    # that a call begins, and only beside another id, after arguments that are whole, or where nothing else could.
    name = function.get("name")
    if not name or (call_id and call_id == current.id):
        return False
    if index is not None and name == current.name and not call_id and function.get("arguments") in (None, ""):
        return False  # some repeat the name in a last delta without anything
    return bool(call_id and current.id) or is_whole(current.arguments) or (index is None and name != current.name)


def plain_text(content: Any) -> str:
    """The text of a content, which may be in parts."""
    if isinstance(content, list):
        return "".join(plain_text(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def grow(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a delta's fields to those so far."""
    for key, value in piece.items():
        before = whole.get(key)
        if isinstance(value, str) and isinstance(before, str) and key in _GROWING:
            whole[key] = before + value
        elif isinstance(value, Mapping):
            inner = whole[key] = dict(before) if isinstance(before, Mapping) else {}
            grow(inner, value)
        elif isinstance(value, list):
            items = whole[key] = list(before) if isinstance(before, list) else []
            for item in value:
                _grow_list(items, item)
        elif value is not None:
            whole[key] = value


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
    # A block of thinking is closed by its signature.
    return known.get("type") == item.get("type") == "thinking" and not known.get("signature")
