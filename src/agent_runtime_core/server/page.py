"""`/` and `/static/…`: the page of the inspector. It has no data: the page reads it from the API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from .._views.page import page_files
from .errors import Problem

router: APIRouter = APIRouter(include_in_schema=False)


@router.get("/")
async def page(request: Request) -> Response:
    """Return the page."""
    return _file(request, "index.html")


@router.get("/static/{path:path}")
async def static_file(request: Request, path: str) -> Response:
    """Return a script, a style sheet or the icon."""
    return _file(request, path)


def _file(request: Request, name: str) -> Response:
    found = page_files().get(name)
    if found is None:
        raise Problem.of(404, "The page has no such file.")
    if request.headers.get("if-none-match") == found.headers["ETag"]:
        return Response(status_code=304, headers=found.headers)
    return Response(found.content, headers=found.headers)
