"""Measured beside floors, each row in the same run as its own: `python -m benchmarks.run`."""
