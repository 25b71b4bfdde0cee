"""A trace sink that keeps nothing."""

from __future__ import annotations

from ..interfaces import TraceSink


class NoopTraceSink(TraceSink):
    """Does nothing; a runner with no other sink traces nothing, at no cost."""
