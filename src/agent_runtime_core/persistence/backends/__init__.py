"""The six stores on each backend."""
