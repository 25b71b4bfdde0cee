"""The agents of a process and of a store."""

from __future__ import annotations

import inspect
from typing import Any

from ..interfaces import AgentRuntime
from ..registry import Registry
from ..runner.run_client import RunClient
from ..tools.confirmation import shown_confirmation
from ..tools.registry import ToolRegistry


async def agents_view(runner: RunClient, registry: Registry, tenant: str | None = None) -> list[dict[str, Any]]:
    """Return the agents that are registered here, and those that only have runs in the store, or of a tenant.

    Each is {"key", "registered", "description", "tools", "input_schema", "runs"}. `tools` are {"name", "description",
    "parameters", "requires_confirmation"}; the last is True, False or "conditional". `input_schema` is that of the
    agent if it has one, and `runs` are the numbers of its runs by state.
    """
    counts: dict[str, dict[str, int]] = {}
    for (status, agent), count in (await runner.queue.counts(tenant)).runs.items():
        counts.setdefault(agent, {})[status] = count
    keys = registry.keys()
    found = [_agent(key, registry.get(key), counts.get(key, {})) for key in keys]
    return found + [_agent(key, None, counts[key]) for key in sorted(counts.keys() - set(keys))]


def _agent(key: str, agent: AgentRuntime | None, runs: dict[str, int]) -> dict[str, Any]:
    schema = _attribute(agent, "input_schema")
    return {
        "key": key, "registered": agent is not None, "description": _description(agent), "tools": _tools(agent),
        "input_schema": schema if isinstance(schema, dict) else None, "runs": runs,
    }  # fmt: skip


def _description(agent: AgentRuntime | None) -> str | None:
    """Return the `description` of an agent, or the first paragraph of its class's own docstring."""
    if agent is None:
        return None
    given = _attribute(agent, "description")
    if isinstance(given, str) and given:
        return given
    text = inspect.cleandoc(type(agent).__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()) or None


def _tools(agent: AgentRuntime | None) -> list[dict[str, Any]]:
    tools = _attribute(agent, "tools")
    if not isinstance(tools, ToolRegistry):
        return []
    return [
        {
            "name": each.name,
            "description": each.description,
            "parameters": each.parameters,
            "requires_confirmation": shown_confirmation(each.requires_confirmation),
        }
        for each in tools.list_tools()
    ]


def _attribute(agent: AgentRuntime | None, name: str) -> Any:
    """Return an attribute of an agent, None if it has none or its property fails, as one that needs a run does."""
    try:
        return getattr(agent, name, None)
    except Exception:  # noqa: BLE001 - a property of the application may raise anything
        return None
