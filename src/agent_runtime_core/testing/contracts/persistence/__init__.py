"""Conformance tests for persistence stores. They need no test framework."""
