"""The six stores on each technology."""
