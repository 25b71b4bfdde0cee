"""Adapters for frameworks. Import each by its module, such as `agent_runtime_core.integrations.langgraph`."""
