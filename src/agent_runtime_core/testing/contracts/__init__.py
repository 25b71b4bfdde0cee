"""Conformance tests for backends and model clients. They need no test framework."""
