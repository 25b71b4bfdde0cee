"""Identify spans of traces: the W3C `traceparent`, and ids that are derived from runs, steps and attempts.

The format is https://www.w3.org/TR/trace-context/#traceparent-header, version 00.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from .validation import must

_FORM = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceParent(NamedTuple):
    """A span, as the parent of others.

    Attributes:
        trace_id: 128 bits.
        span_id: 64 bits.
        sampled: Whether the spans of this trace are sent.
    """

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def text(self) -> str:
        """The value of a `traceparent` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parsed(text: object) -> TraceParent | None:
    """Return the span that a `traceparent` names; None if the text is none."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    parent = TraceParent(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & 1))
    return parent if parent.trace_id and parent.span_id else None


def checked(text: object) -> str:
    """Return a `traceparent`.

    Raises:
        InvalidArgument: The text is none.
    """
    if parsed(text) is None:
        raise must("traceparent", "be a W3C traceparent", text, f"Example: {TraceParent(1, 1).text}")
    return str(text)


def span_id(*parts: str) -> int:
    """Return the id of a span: the same one for the same parts."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big") or 1


class RunTrace(NamedTuple):
    """The place of one execution of a run in its trace.

    Ids are derived from numbers that the execution after a crash knows too, since it reports the crashed one.

    Attributes:
        run_id: The run.
        generation: The generation of the run.
        failures: How many attempts of the run have failed before.
        crashes: How many have crashed before.
        resumes: How often the present attempt was parked and resumed before.
        parent: The span that the run was submitted in.
    """

    run_id: str
    generation: int = 1
    failures: int = 0
    crashes: int = 0
    resumes: int = 0
    parent: TraceParent | None = None

    @property
    def trace_id(self) -> int:
        return int(self.run_id.replace("-", ""), 16) if self.parent is None else self.parent.trace_id

    @property
    def execution(self) -> TraceParent:
        """The span of the execution."""
        return self._span(span_id(self.run_id, f"{self.generation}.{self.failures}.{self.crashes}.{self.resumes}"))

    def step(self, step_id: str, attempt: int) -> TraceParent:
        """Return the span of an attempt of a step.

        A crash does not change its id, so what the interrupted attempt has sent keeps its parent: the attempt that
        repeats it. A failed attempt of the run changes it, since the repeated step is another span.
        """
        return self._span(span_id(step_id, f"{self.generation}.{self.failures}.{attempt}"))

    def _span(self, number: int) -> TraceParent:
        return TraceParent(self.trace_id, number, self.parent is None or self.parent.sampled)
