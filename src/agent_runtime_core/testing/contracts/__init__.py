"""Conformance suites: what every backend must do, run against one of yours. No test framework is needed."""
