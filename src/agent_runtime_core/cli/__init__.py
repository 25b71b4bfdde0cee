"""The command `agent-runtime`: run workers, inspect runs, and fix failed runs."""
