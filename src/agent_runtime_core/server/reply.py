"""JSON responses."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import JSONResponse


class Reply(JSONResponse):
    """A JSON response. A stored text may have a lone surrogate, which is sent as an escape."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        try:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return text.encode("utf-8")
        except UnicodeEncodeError:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
