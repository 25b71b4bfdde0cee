"""Views of runs and events as plain JSON, for the command line, the HTTP API and the inspector."""
