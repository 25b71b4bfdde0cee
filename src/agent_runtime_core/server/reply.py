"""JSON responses."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from .._views.plain import json_bytes


class Reply(JSONResponse):
    """A JSON response."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json_bytes(content)
