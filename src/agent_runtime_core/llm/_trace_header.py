"""The header that lets the trace of a run continue in a model provider or gateway."""

from __future__ import annotations

from typing import Any

from ..interfaces import current_run


def with_traceparent(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a request with the span of the calling code as the header `traceparent`.

    They are unchanged outside of runs, and if no trace sink sends spans. A header of the caller takes precedence.
    """
    traceparent = getattr(current_run(), "traceparent", None)
    if traceparent is None:
        return arguments
    headers = arguments.get("extra_headers") or {}
    return {**arguments, "extra_headers": {"traceparent": traceparent, **headers}}
