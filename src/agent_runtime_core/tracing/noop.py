"""A trace sink that does nothing."""

from __future__ import annotations

from ..interfaces import TraceSink


class NoopTraceSink(TraceSink):
    """Does nothing. A runner with no other sink traces nothing, at no cost."""
