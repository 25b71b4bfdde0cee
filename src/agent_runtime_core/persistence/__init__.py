"""Conversations, tasks, memory, preferences, knowledge and audit: what outlives a run."""
