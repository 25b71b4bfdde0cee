"""The operations of memory_op steps: get, set, delete and search values by key in `ctx.persistence.memory`."""

from __future__ import annotations

import json
from typing import Any, Final

from .._core.validation import must
from ..errors import NotSupported
from ..interfaces import RunContext
from ..tools.registry import ToolRegistry
from ..tools.tool import Tool

#: The library uses keys with this prefix itself. Plans cannot read or write them.
RESERVED: Final = "agent_runtime_core/"
_DEFAULT_LIMIT = 20  # results of a search
_KEY: Final = {"type": "string", "minLength": 1, "description": "The key it is kept under."}


def memory_operations() -> ToolRegistry:
    """Return the operations as tools, for LLMPlanner(memory=…) and Plan.validate(tools, memory)."""
    registry = ToolRegistry()
    for name, (description, properties, needed, handler) in _OPERATIONS.items():
        about = {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
        registry.register(Tool(name, description, about, handler, has_side_effects=name in ("set", "delete")))
    return registry


async def _get(ctx: RunContext, key: str) -> Any:
    return await _memory(ctx).get(_free(key))


async def _set(ctx: RunContext, key: str, value: Any) -> Any:
    await _memory(ctx).set(_free(key), value)
    return value


async def _delete(ctx: RunContext, key: str) -> bool:
    return bool(await _memory(ctx).delete(_free(key)))


async def _search(
    ctx: RunContext, query: str = "", prefix: str = "", limit: int = _DEFAULT_LIMIT
) -> list[dict[str, Any]]:
    memory, wanted, found = _memory(ctx), query.casefold(), list[dict[str, Any]]()
    for key in await memory.list_keys(prefix=prefix or None):
        if len(found) == limit:
            break
        if key.startswith(RESERVED):
            continue
        value = await memory.get(key)
        if wanted in key.casefold() or wanted in _text(value).casefold():
            found.append({"key": key, "value": value})
    return found


def _free(key: str) -> str:
    if key.startswith(RESERVED):
        raise must("key", f"not start with {RESERVED!r}", key, "Use another key: this prefix is reserved")
    return key


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _memory(ctx: Any) -> Any:
    stores = getattr(ctx, "persistence", None)
    if stores is None:
        raise NotSupported(
            f"a memory_op step needs a context with persistence, and {type(ctx).__name__} has none. Run it in a runner."
        )
    return stores.memory


_OPERATIONS: Final[dict[str, Any]] = {
    "get": ("The value kept under a key, or null.", {"key": _KEY}, ["key"], _get),
    "set": ("Keep a value under a key; the result is the value.", {"key": _KEY, "value": {}}, ["key", "value"], _set),
    "delete": ("Forget a key; the result is whether there was one.", {"key": _KEY}, ["key"], _delete),
    "search": (
        "Keys and values that contain a text, as a list of {key, value} in the order of the keys.",
        {
            "query": {"type": "string", "description": "What the key or the value contains, in any case."},
            "prefix": {"type": "string", "description": "How the key begins."},
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
        },
        [],
        _search,
    ),
}
