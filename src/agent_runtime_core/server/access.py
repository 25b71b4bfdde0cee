"""Who calls, and what the caller may do: tokens, the browser's cookie, and the scopes of routes."""

from __future__ import annotations

import hashlib
import hmac
import inspect
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Set
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from fastapi import Depends
from starlette.requests import HTTPConnection

from .._core.arguments import checked_tenant
from .._core.clock import SYSTEM, Clock
from .._core.validation import must, unknown
from .._views.problems import invalid
from ..errors import InvalidArgument
from ..runner.settings import RunInfo
from .errors import Problem
from .limits import Limits
from .token_file import SCOPES, Token, TokenFile, digest_of, find

__all__ = ["Access", "Caller", "Tokens", "require"]

OF_SENDING: Final = ("send", "act")  # scopes that allow to send: one of them is enough
CALLER: Final = "agent_runtime.caller"  # in the ASGI scope
COOKIE: Final = "agent_runtime_session"
HEADER: Final = "x-agent-runtime"
PROTOCOL: Final = "bearer."  # the beginning of a WebSocket subprotocol that has a token
SLASH: Final = "\x1f"  # replaces an encoded slash in a path; no id has a control character
MOST_REVOKED: Final = 10_000  # cookies that are remembered after their browser has signed out
SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True)
class Caller:
    """Who makes a request.

    Args:
        name: Shown in logs, and counted by the limits.
        scopes: What the caller may do: `run`, `result`, `send`, `approve`, `read`, `act`, `metrics`, `admin`.
        may: Called with "read", "act" or "delete" and a run; False hides the run. None allows every run. In lists, it
            is called a second time for each run whose `input` it reads, which is loaded then.
        tenant: The caller submits runs of this tenant, and sees no other runs. None: the caller sees the runs of all
            tenants, and may name a tenant with the parameter `tenant` of a request.

    Raises:
        InvalidArgument: A scope is unknown, `tenant` is no name of a tenant, or `may` is a coroutine function, whose
            calls would all be true.
    """

    name: str
    scopes: Set[str] = frozenset(SCOPES)
    may: Callable[[str, RunInfo], bool] | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isprintable() or not 0 < len(self.name) <= 256:
            raise must("name", "be a string of 1 to 256 printable characters", self.name)
        if self.may is not None and (not callable(self.may) or inspect.iscoroutinefunction(self.may)):
            raise must("may", "be a function that returns True or False, or None", self.may, "Look up grants before")
        if isinstance(self.scopes, str):
            raise must("scopes", "be a set of strings", self.scopes)
        for scope in self.scopes:
            if scope not in SCOPES:
                raise InvalidArgument(unknown("scope", scope, SCOPES))
        checked_tenant(self.tenant)
        object.__setattr__(self, "scopes", frozenset(self.scopes))

    @property
    def limited(self) -> bool:
        """Whether some runs may be hidden from the caller."""
        return self.may is not None or self.tenant is not None


Authenticate = Callable[[HTTPConnection], "Awaitable[Caller | None] | Caller | None"]


class Tokens:
    """Authenticates by a token in `Authorization: Bearer TOKEN`, or by the cookie of a browser that has signed in.

    Args:
        source: The path of a token file, or tokens. The file is created with one token if it is missing.
        cookie_seconds: Seconds for which a browser stays signed in.
        clock: Dates the cookies.
    """

    def __init__(
        self, source: str | os.PathLike[str] | Iterable[Token], *, cookie_seconds: float = 12 * 3600.0,
        clock: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        #: The token file, or None.
        self.file: TokenFile | None = TokenFile(source) if isinstance(source, str | os.PathLike) else None
        self._fixed = () if self.file is not None else tuple(cast("Iterable[Token]", source))
        self.cookie_seconds: float = cookie_seconds
        self._clock = clock
        self._code: bytes | None = None
        self._revoked: dict[str, int] = {}  # the signed text of a cookie: when it expires
        self._valid_after = 0  # cookies that expire at this time or before are not valid

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens that count now."""
        return self._fixed if self.file is None else self.file.tokens

    def __call__(self, connection: HTTPConnection) -> Caller | None:
        """Return who sent this request, or None."""
        text = bearer_of(connection)
        token = (
            self._of_cookie(connection.cookies.get(cookie_name(connection), ""))
            if text is None
            else find(self.tokens, text)
        )
        return None if token is None else _caller_of(token)

    def new_code(self) -> str:
        """Return a code that signs in one browser, once, with the first token. It replaces an unused code."""
        code = secrets.token_urlsafe(32)
        self._code = digest_of(code)
        return code

    def sign_in(self, *, token: str | None = None, code: str | None = None) -> tuple[str, Caller] | None:
        """Return the value of a cookie and whose it is for a token or the one-time code; None if it is wrong.

        Args:
            token: The token.
            code: The one-time code.
        """
        found = None
        if token is not None:
            found = find(self.tokens, token)
        elif code is not None and self._code is not None and hmac.compare_digest(self._code, digest_of(code)):
            self._code = None
            found = self.tokens[0]
        return None if found is None else (self._cookie(found), _caller_of(found))

    def sign_out(self, cookie: str) -> None:
        """End the cookie with this value, in this process. Nothing happens if it is not valid.

        Args:
            cookie: The cookie of the session.
        """
        if self._of_cookie(cookie) is None:
            return
        now, text = self._clock.wall(), cookie.rpartition(":")[0]
        self._revoked = {each: expires for each, expires in self._revoked.items() if expires > now}
        self._revoked[text] = _expiry(text)
        if len(self._revoked) > MOST_REVOKED:  # a forgotten cookie must not become valid again
            first = min(self._revoked, key=self._revoked.__getitem__)
            self._valid_after = max(self._valid_after, self._revoked.pop(first))

    def _cookie(self, token: Token) -> str:
        text = f"{token.name}:{int(self._clock.wall() + self.cookie_seconds)}:{secrets.token_hex(8)}"
        return f"{text}:{_signature(token, text)}"

    def _of_cookie(self, value: str) -> Token | None:
        """Return the token that a cookie was made for. If it was removed from the file, the cookie ends too."""
        text, _, signature = value.rpartition(":")
        name = text.partition(":")[0]
        token = next((each for each in self.tokens if each.name == name), None)
        if token is None or not value.isascii() or not hmac.compare_digest(_signature(token, text), signature):
            return None
        if text in self._revoked:
            return None
        return token if _expiry(text) > max(self._clock.wall(), self._valid_after) else None


def _caller_of(token: Token) -> Caller:
    return Caller(token.name, token.scopes, tenant=token.tenant)


def _expiry(text: str) -> int:
    """Return when a cookie with this signed text expires."""
    return int(text.split(":")[1])


def _signature(token: Token, text: str) -> str:
    return hmac.new(token.digest, f"cookie:{text}".encode(), hashlib.sha256).hexdigest()


def cookie_name(connection: HTTPConnection) -> str:
    """Return the name of the cookie. It contains the port, because all servers of a host share its cookies."""
    port = connection.url.port
    return COOKIE if port is None else f"{COOKIE}_{port}"


def has_session(connection: HTTPConnection, access: Access) -> bool:
    """Whether the request is made with the cookie of a browser that has signed in, which it can give up."""
    tokens = isinstance(access.authenticate, Tokens)
    return tokens and bearer_of(connection) is None and cookie_name(connection) in connection.cookies


def bearer_of(connection: HTTPConnection) -> str | None:
    """Return the token in the header, or in the WebSocket subprotocols; "" for another kind of credentials."""
    header = connection.headers.get("authorization")
    if header is not None:
        kind, _, text = header.strip().partition(" ")
        return text.strip() if kind.lower() == "bearer" else ""
    if connection.scope["type"] == "websocket":
        offered = connection.scope.get("subprotocols") or ()
        return next((each[len(PROTOCOL) :] for each in offered if each.startswith(PROTOCOL)), None)
    return None


def is_own(connection: HTTPConnection, origin: str, *, scheme: bool = True) -> bool:
    """Whether an `Origin` names this server, as the client addressed it."""
    host = connection.headers.get("host", "").lower()
    own = f"{'https' if connection.url.scheme in ('https', 'wss') else 'http'}://{host}"
    return origin.lower() in ((own,) if scheme else (f"http://{host}", f"https://{host}"))


class Access:
    """Authenticates the requests of one server."""

    def __init__(self, authenticate: Authenticate, limits: Limits) -> None:
        self.authenticate: Authenticate = authenticate
        self._limits = limits

    async def caller(self, connection: HTTPConnection) -> Caller:
        """Return who makes this request, in the tenant that its query names. The first call counts it.

        Raises:
            Problem: 401 without valid credentials; 403 for an unsafe request that only has a cookie, or for another
                tenant than the caller's tenant; 422 for an invalid tenant; 429 past a limit.
        """
        known = connection.scope.get(CALLER)
        if known is not None:
            return cast("Caller", known)
        answer = self.authenticate(connection)
        found = await answer if inspect.isawaitable(answer) else answer
        if found is None:
            raise self.refused(connection)
        if not isinstance(found, Caller):
            raise TypeError("authenticate must return a Caller or None")  # a fault of the server: status 500
        self._limits.request(found.name)
        if (problem := self._limits.unread(found.name)) is not None:
            raise problem
        check_cookie_request(connection)
        found = in_tenant(found, connection.query_params.get("tenant"))
        connection.scope[CALLER] = found
        return found

    async def optional(self, connection: HTTPConnection) -> Caller | None:
        """Return who makes this request of an open route; None without credentials."""
        anonymous = bearer_of(connection) is None
        if anonymous and isinstance(self.authenticate, Tokens) and cookie_name(connection) not in connection.cookies:
            return None
        try:
            return await self.caller(connection)
        except Problem as problem:
            # Only a function of the application knows in which header or cookie it finds credentials.
            if problem.status == 401 and anonymous and not isinstance(self.authenticate, Tokens):
                return None
            raise

    def refused(self, connection: HTTPConnection) -> Problem:
        """Return Problem 401; a wrong token is counted, and raises Problem 429 past the limit."""
        wrong = bearer_of(connection) is not None
        if wrong:
            self.count_failure(connection)
        challenge = 'Bearer realm="agent-runtime"' + ', error="invalid_token"' * wrong
        if not isinstance(self.authenticate, Tokens):
            detail = "The request has no valid credentials."
        else:
            detail = "The token is not valid." if wrong else "Send a token in the header Authorization: Bearer TOKEN."
        return Problem.of(401, detail, headers={"WWW-Authenticate": challenge})

    def count_failure(self, connection: HTTPConnection) -> None:
        """Count a wrong token or code, or raise Problem 429 if there were too many from this address."""
        self._limits.failed_login("" if connection.client is None else connection.client.host)


def check_cookie_request(connection: HTTPConnection) -> None:
    """Raise Problem 403 for an unsafe request that a foreign page may have made with the browser's cookie."""
    headers = connection.headers
    if bearer_of(connection) is not None or "cookie" not in headers:
        return
    socket = connection.scope["type"] == "websocket"
    if not socket and connection.scope["method"] in SAFE_METHODS:
        return
    same = is_own(connection, headers.get("origin", ""))
    if not socket:
        same = same and headers.get("sec-fetch-site") == "same-origin" and headers.get(HEADER) == "1"
    if not same:
        raise Problem.of(
            403,
            "A request with a cookie needs the server's own Origin, Sec-Fetch-Site: same-origin and "
            "X-Agent-Runtime: 1.",
            type="urn:agent-runtime:foreign-origin",
        )


def check_scope(caller: Caller, scopes: Iterable[str], what: str = "request") -> None:
    """Raise Problem 403 for a caller without any of these scopes."""
    if caller.scopes.isdisjoint(scopes):
        raise Problem.of(403, f"This {what} needs a token with the scope {' or '.join(scopes)}.")


def in_tenant(caller: Caller, tenant: str | None) -> Caller:
    """Return the caller for a request that names a tenant: it submits, reads and changes runs of this tenant alone.

    Raises:
        Problem: 403 if the caller belongs to another tenant. 422 if the text is no name of a tenant.
    """
    if tenant is None or tenant == caller.tenant:
        return caller
    if caller.tenant is not None:
        raise Problem.of(403, "This caller has another tenant. Leave out tenant.")
    try:
        return replace(caller, tenant=tenant)
    except InvalidArgument as error:
        raise invalid("tenant", error) from None


async def admitted(connection: HTTPConnection, *scopes: str) -> Caller:
    """Return who makes this request, and decode the slashes in the ids of its path.

    Raises:
        Problem: 401 without valid credentials; 403 without one of these scopes; as `Access.caller` does.
    """
    found: Caller = await connection.app.state.server.access.caller(connection)
    check_scope(found, scopes)
    # FastAPI reads the path after its dependencies have run.
    parameters = connection.scope.get("path_params", {})
    parameters.update((name, value.replace(SLASH, "/")) for name, value in parameters.items() if isinstance(value, str))
    return found


def require(*scopes: str) -> Any:
    """Return a dependency that yields the `Caller`, and raises Problem 401, or 403 without one of these scopes.

    @router.get("/runs")
    async def runs(caller: Annotated[Caller, require("read")]) -> ...
    """
    for scope in scopes:
        if scope not in SCOPES:
            raise InvalidArgument(unknown("scope", scope, SCOPES))

    async def caller(connection: HTTPConnection) -> Caller:
        return await admitted(connection, *scopes)

    return Depends(caller)
