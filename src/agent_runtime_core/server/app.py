"""The application: routes, errors and the checks of every request."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, cast

from fastapi import APIRouter, FastAPI
from pydantic import ConfigDict, Field, model_validator
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .._core.lazy_import import load
from .._core.validation import must
from .._views.queries import OF_TENANT, TENANT_TEXT
from ..orchestrator import Orchestrator
from ..runner.runner import AgentRunner
from ..tracing.prometheus import PrometheusSink
from ..turns.manager import TurnManager
from . import actions, runs, schedules, service, socket, streams
from .access import HEADER, Access, Authenticate, Tokens, cookie_name, is_own, require
from .documents import OPEN, Body, SignedIn, form, one_of
from .errors import MEDIA_TYPE, PROBLEM_SCHEMA, Problem, add_handlers
from .limits import Limits
from .security import PREFIX, Envelope, RequestChecks
from .service import prepare
from .settings import ServerSettings
from .state import ServerState, state_of
from .token_file import default_path

__all__ = ["PREFIX", "create_app"]


def create_app(
    runner: AgentRunner,
    *,
    orchestrator: Orchestrator | None = None,
    turns: TurnManager | None = None,
    authenticate: Authenticate | None = None,
    settings: ServerSettings | None = None,
    metrics: PrometheusSink | None = None,
) -> FastAPI:
    """Return an ASGI application that serves the runs of `runner`. Run it, or mount it in another application.

        app.mount("/agents", create_app(runner))

    It starts no worker and closes nothing: `runner.run_loop()` executes the runs, here or in another process.

    Args:
        runner: Stores the runs.
        orchestrator: Plans the prompts of `POST /api/v1/runs`. None answers them with 422.
        turns: Starts conversation turns. None answers them with 422.
        authenticate: Returns the `Caller` of a request, or None for 401. It may be a coroutine function. By default,
            requests need a token of the file beside the SQLite store, or else of
            `$XDG_STATE_HOME/agent-runtime/token`; the file is created if it is missing, but not beside a store that is
            only read.
        settings: Limits and trusted names. None means the defaults.
        metrics: Returned by `/metrics`, with the queue of `runner` and the requests of this application. It becomes a
            trace sink of `runner`.

    Raises:
        InvalidArgument: An argument is invalid, or the token file cannot be used.
    """
    for name, value, kind in (
        ("runner", runner, AgentRunner), ("orchestrator", orchestrator, Orchestrator), ("turns", turns, TurnManager),
        ("settings", settings, ServerSettings), ("metrics", metrics, PrometheusSink),
    ):  # fmt: skip
        if not isinstance(value, kind) and (name == "runner" or value is not None):
            raise must(name, f"be {'an' if kind.__name__[0] in 'AO' else 'a'} {kind.__name__}", value)
    settings = settings or ServerSettings()
    if authenticate is None:
        authenticate = Tokens(default_path(runner), cookie_seconds=settings.cookie_seconds, clock=runner.queue.clock)
    elif not callable(authenticate):
        raise must("authenticate", "be a function of the request", authenticate)
    limits = Limits(settings, runner.queue.clock)
    access = Access(authenticate, limits)
    state = ServerState(runner, orchestrator, turns, access, settings, limits, metrics)
    prepare(state)
    return _application(state)


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. FastAPI appends the parameters of `mount`; generated files name them first."""
        if self.openapi_schema is None:
            for operations in super().openapi()["paths"].values():
                if "parameters" in (read := operations.get("get", {})):
                    read["responses"] = read.pop("responses")
        return super().openapi()


def _application(state: ServerState) -> FastAPI:
    app = _Application(
        title="agent-runtime", version=str(load("agent_runtime_core:__version__")),
        generate_unique_id_function=lambda route: route.name,  # the operation ids
        openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False,
        # Every route may answer with a problem. Without this, FastAPI documents its own body of 422.
        responses={"default": {
            "description": "A problem", "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }},
    )  # fmt: skip
    app.state.server = state
    add_handlers(app)
    parts = (runs.router, actions.router, schedules.router, runs.overview, streams.router, socket.router)
    for router in (*parts, service.router, session_router):
        app.include_router(router, prefix=PREFIX)
    app.include_router(service.others)
    app.add_api_route("/openapi.json", _openapi, dependencies=[require("read")], include_in_schema=False)
    # The last one added is the first to see a request.
    app.add_middleware(RequestChecks, state=state)
    if state.settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "Prefer"],
            expose_headers=["Location", "Retry-After", "X-Request-Id"],
        )
    app.add_middleware(Envelope, state=state)
    return app


def _with_tenant(operation: dict[str, Any]) -> dict[str, Any]:
    """Return an operation with the parameter that `Access.caller` reads for every route.

    A parameter of a dependency would be in the document too, but it costs each request 35 calls of FastAPI.
    """
    given = operation.get("parameters", [])
    if "security" in operation or any(each["name"] == "tenant" for each in given):
        return operation
    schema = {"type": "string", **TENANT_TEXT}
    tenant = {"name": "tenant", "in": "query", "required": False, "description": OF_TENANT, "schema": schema}
    return {**operation, "parameters": [*given, tenant]}


async def _openapi(request: Request) -> Response:
    """Return the OpenAPI document. There is no page for it, which would load scripts from another host."""
    document = cast("FastAPI", request.app).openapi()
    parts = document.get("components", {})
    return JSONResponse(
        {
            **document,
            "paths": {
                path: {method: _with_tenant(each) for method, each in operations.items()}
                for path, operations in document.get("paths", {}).items()
            },
            "servers": [{"url": request.scope.get("root_path", "").rstrip("/") or "/"}],
            "security": [{"token": []}],
            "components": {
                **parts,
                "schemas": {**parts.get("schemas", {}), "Problem": PROBLEM_SCHEMA},
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


session_router: APIRouter = APIRouter(tags=["session"])


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


@session_router.post("/session", responses={200: {"model": SignedIn}}, openapi_extra=OPEN)
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


@session_router.delete("/session", status_code=204, openapi_extra=OPEN)
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
