"""Whether responses are as the OpenAPI document says."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from fastapi import FastAPI

#: What the checks before any route may answer.
BEFORE_ROUTES = {405, 408, 414, 431}


def documented(app: FastAPI) -> Callable[[httpx.Response], Awaitable[None]]:
    """Return a hook that fails for a response with an undocumented status or media type."""
    paths: dict[str, Any] = app.openapi()["paths"]
    known = sorted(paths, key=lambda path: path.count("{"))
    patterns = [(re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), path) for path in known]

    async def check(response: httpx.Response) -> None:
        request = response.request
        raw = request.url.raw_path.decode().partition("?")[0]
        template = next((path for pattern, path in patterns if pattern.fullmatch(raw)), None)
        operation = paths.get(template or "", {}).get(request.method.lower())
        if operation is None or response.status_code in BEFORE_ROUTES:
            return
        found = operation["responses"].get(str(response.status_code))
        assert found is not None, f"{request.method} {template} does not document {response.status_code}"
        kind = response.headers.get("content-type", "").partition(";")[0]
        assert kind in found.get("content", {"": {}}), (request.method, template, response.status_code, kind)

    return check
