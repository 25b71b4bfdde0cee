"""Conformance suites of the stores that keep conversations, tasks, memory, preferences, knowledge and audit."""
