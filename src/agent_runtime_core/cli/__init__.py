"""The command `agent-runtime`: workers, dead letters, and where runs stand."""
