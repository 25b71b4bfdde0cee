"""Conformance suites of the stores of persistence, and of the documents below ours."""
