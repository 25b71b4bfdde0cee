"""`/session`: a browser exchanges a token, or the one-time code of the printed URL, for a cookie."""

from __future__ import annotations

from typing import Annotated, ClassVar

from fastapi import APIRouter
from pydantic import ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import HEADER, Tokens, cookie_name, is_own
from .documents import OPEN, SignedIn
from .errors import Problem
from .models import Body, form, one_of
from .state import state_of

router: APIRouter = APIRouter(tags=["session"])


class SignIn(Body):
    """What a browser signs in with: a token or the one-time code."""

    model_config: ClassVar[ConfigDict] = one_of(
        form(("token",), token={"type": "string"}, code={"type": "null"}),
        form(("code",), code={"type": "string"}, token={"type": "null"}),
    )

    token: Annotated[str, Field(max_length=512)] | None = None
    code: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def _one(self) -> SignIn:
        if (self.token is None) == (self.code is None):
            raise ValueError("the body must have either token or code")
        return self


@router.post("/session", responses={200: {"model": SignedIn}}, openapi_extra=OPEN)
async def sign_in(request: Request, body: SignIn) -> Response:
    """Set the cookie of a browser."""
    access = state_of(request).access
    tokens = access.authenticate
    if not isinstance(tokens, Tokens):
        raise Problem.of(404, "This server has no sign-in of its own.")
    _check_page(request)
    found = tokens.sign_in(token=body.token, code=body.code)
    if found is None:
        access.count_failure(request)
        raise Problem.of(401, "The token or code is not valid.", headers={"WWW-Authenticate": "Bearer"})
    value, caller = found
    response = JSONResponse({"name": caller.name, "scopes": sorted(caller.scopes)})
    response.set_cookie(
        cookie_name(request), value, max_age=int(tokens.cookie_seconds), path=_path(request),
        secure=request.url.scheme == "https", httponly=True, samesite="strict",
    )  # fmt: skip
    return response


@router.delete("/session", status_code=204, openapi_extra=OPEN)
async def sign_out(request: Request) -> Response:
    """Clear the cookie of a browser, and end it: a copy of it is not valid any more."""
    _check_page(request)
    tokens = state_of(request).access.authenticate
    if isinstance(tokens, Tokens):
        tokens.sign_out(request.cookies.get(cookie_name(request), ""))
    response = Response(status_code=204)
    response.delete_cookie(cookie_name(request), path=_path(request), httponly=True, samesite="strict")
    return response


def _path(request: Request) -> str:
    return f"{request.scope.get('root_path', '').rstrip('/')}/"


def _check_page(request: Request) -> None:
    """Raise Problem 403 unless a page of this server, or no page, sends the request."""
    headers = request.headers
    if "origin" in headers or "sec-fetch-site" in headers:
        own = (
            is_own(request, headers.get("origin", "")) and headers.get("sec-fetch-site", "same-origin") == "same-origin"
        )
        if not own or headers.get(HEADER) != "1":
            raise Problem.of(
                403, "Only the server's own page may sign in or out.", type="urn:agent-runtime:foreign-origin"
            )
