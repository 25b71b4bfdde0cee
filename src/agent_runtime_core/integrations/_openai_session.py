"""A session of OpenAI Agents that keeps its items in a conversation store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, cast
from uuid import UUID, uuid5

from agents.items import TResponseInputItem
from agents.memory import SessionABC, SessionSettings

from .._core.codec.json import decode, encode
from .._core.ids import conversation_id, conversation_name
from .._core.validation import must
from ..interfaces import RunContext
from ..persistence.base.conversations import ConversationStore
from ..persistence.chat_format import chat_of, message_of
from ..persistence.manager import store_of_tenant
from ..persistence.models import Conversation, ConversationMessage, Scope
from ._openai_scope import current_run, original, scope_of

T = TypeVar("T")

#: Key in the metadata of a message: its items, in the format of the SDK.
ITEMS = "openai_items"

_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class ConversationSession(SessionABC):
    """A session of OpenAI Agents whose items are the messages of a conversation.

    The conversation can also be read, searched and continued with the other parts of this library. In a run, the
    session reads and writes in steps, and calls `ctx.own_conversation()` if it is the run's own conversation.

    Args:
        session_id: The conversation: a UUID or any other name. If None, the conversation of the current run.
        store: The store. In a run of a tenant, the part of the store that belongs to the tenant. If None, the store of
            the current run.
        scope: The scope of the conversation.
        session_settings: Settings of the SDK, such as `SessionSettings(limit=20)`: how many items a model call gets.
    """

    def __init__(
        self,
        session_id: str | UUID | None = None,
        *,
        store: ConversationStore | None = None,
        scope: Scope = Scope.PROJECT,
        session_settings: SessionSettings | dict[str, Any] | None = None,
    ) -> None:
        ctx = current_run()
        found = conversation_id(session_id) or (None if ctx is None else ctx.conversation_id)
        if found is None:
            raise must(
                "session_id", "name a conversation", session_id, "Pass a session_id, or give the run a conversation_id"
            )
        self.session_id: str = str(found)
        self._id = found
        named = session_id or getattr(ctx, "input", {}).get("conversation_id")
        self._name = conversation_name(named)
        self._store = store
        self._scope = scope
        if isinstance(session_settings, dict):
            session_settings = SessionSettings(**session_settings)
        self.session_settings: SessionSettings | None = session_settings

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Return the items of the conversation's active branch, in order.

        Args:
            limit: Only the last `limit` items. If None, the limit of `session_settings`, else all.
        """
        if limit is None and self.session_settings is not None:
            limit = self.session_settings.limit

        async def read(limit: int | None) -> list[Any]:
            store = self._open()
            if await store.get(self._id, self._scope) is None:
                return []
            items = [item for message in await store.history(self._id, self._scope) for item in _items_of(message)]
            return items if limit is None else items[max(0, len(items) - limit) :]

        return await self._step("session:get_items", read, limit)

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Append items. A conversation that does not exist is created."""

        async def write(items: list[Any]) -> None:
            ctx, store = current_run(), self._open()
            conversation = await store.get(self._id, self._scope)
            if conversation is None:
                conversation = Conversation(id=self._id, name=self._name)
                await store.save(conversation, self._scope)
            messages = list(_messages_of(items, conversation.active_branch_id))
            if ctx is not None and ctx.idempotency_key is not None:
                # Ids that are the same if the step is repeated after a crash, so nothing is appended twice.
                for index, message in enumerate(messages):
                    message.id = uuid5(self._id, f"{ctx.idempotency_key}:{index}")
            await store.append(self._id, messages, self._scope)

        if items:
            await self._step("session:add_items", write, decode(encode(items)))

    async def pop_item(self) -> TResponseInputItem | None:
        """Remove the last item, and return it; None if there is none."""

        async def remove() -> Any:
            store = self._open()
            conversation = await store.get(self._id, self._scope)
            history = [] if conversation is None else await store.history(self._id, self._scope)
            if conversation is None or not history:
                return None
            *kept, last = _items_of(history[-1])
            index = next(i for i, each in enumerate(conversation.messages) if each.id == history[-1].id)
            message = conversation.messages.pop(index)
            for rest in _messages_of(kept, message.branch_id):
                rest.id, rest.timestamp, rest.parent_message_id = (
                    message.id,
                    message.timestamp,
                    message.parent_message_id,
                )
                conversation.messages.insert(index, rest)
            await store.save(conversation, self._scope)
            return last

        return await self._step("session:pop_item", remove)

    async def clear_session(self) -> None:
        """Delete the conversation."""

        async def clear() -> None:
            await self._open().delete(self._id, self._scope)

        await self._step("session:clear", clear)

    async def _step(self, name: str, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        ctx = current_run()
        if ctx is None:
            return await fn(*args)
        if ctx.conversation_id == self._id:
            ctx.own_conversation()
        scope = scope_of(ctx)
        key = scope.next_use(name)
        return await original(scope, fn, lambda noted: ctx.step(name, noted, *args, key=key))

    def _open(self) -> ConversationStore:
        ctx: RunContext | None = current_run()
        if self._store is not None:
            if ctx is None or ctx.tenant is None:
                return self._store
            return cast(ConversationStore, store_of_tenant("conversation", self._store, ctx.tenant))
        if ctx is None:
            raise must("store", "be a conversation store outside of a run", None)
        return cast(ConversationStore, ctx.persistence.conversations)


def _messages_of(items: Iterable[Any], branch: UUID | None) -> Iterable[ConversationMessage]:
    """Return items as messages. The parts of one answer, such as text and tool calls, are one message."""
    groups: list[list[Mapping[str, Any]]] = []
    for item in items:
        if groups and _is_answer(item) and _is_answer(groups[-1][-1]):
            groups[-1].append(item)
        else:
            groups.append([item])
    for group in groups:
        message = message_of(_chat(group), UUID(int=0))
        message = ConversationMessage(
            role=message.role, content=message.content, tool_calls=message.tool_calls,
            tool_call_id=message.tool_call_id, branch_id=branch,
        )  # fmt: skip
        if [dict(item) for item in group] != _from_chat(chat_of(message)):
            message.metadata[ITEMS] = [dict(item) for item in group]
        yield message


def _items_of(message: ConversationMessage) -> list[Any]:
    """Return a message as items: those that it was made of, else those that its fields describe."""
    items = (message.metadata or {}).get(ITEMS)
    return list(items) if isinstance(items, list) else _from_chat(chat_of(message))


def _is_answer(item: Mapping[str, Any]) -> bool:
    if "role" in item:
        return bool(item["role"] == "assistant")
    return not str(item.get("type", "")).endswith("_output")


def _chat(group: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return items as one message in OpenAI's chat format."""
    first = group[0]
    if str(first.get("type", "")).endswith("_output"):
        return {"role": "tool", "tool_call_id": str(first.get("call_id", "")), "content": _text(first.get("output"))}
    texts = [text for item in group if "role" in item and (text := _text(item.get("content")))]
    chat: dict[str, Any] = {"role": str(first.get("role", "assistant")), "content": "\n".join(texts)}
    calls = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in group
        if item.get("type") == "function_call"
    ]
    return {**chat, "tool_calls": calls} if calls else chat


def _text(content: Any) -> str:
    """Return the text of a content."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get(_PARTS.get(part.get("type", ""), ""), "")) for part in parts)


def _from_chat(chat: Mapping[str, Any]) -> list[Any]:
    """Return a message in OpenAI's chat format as items."""
    role, content = chat["role"], chat.get("content") or ""
    if role == "tool":
        return [{"type": "function_call_output", "call_id": chat.get("tool_call_id", ""), "output": _text(content)}]
    items: list[Any] = []
    if content:
        parts = content if isinstance(content, str) else [_part(part, role) for part in content]
        items.append({"role": role, "content": parts})
    for call in chat.get("tool_calls") or []:
        function = call["function"]
        items.append({"type": "function_call", "call_id": call["id"], **function})
    return items


def _part(part: Any, role: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return {"type": "output_text" if role == "assistant" else "input_text", "text": part["text"]}
    if kind == "image_url":
        return {"type": "input_image", "detail": "auto", "image_url": part["image_url"]["url"]}
    return part
