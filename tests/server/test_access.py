from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import HTTPConnection

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server import access
from agent_runtime_core.server.access import Caller, Tokens
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.settings import ServerSettings
from agent_runtime_core.server.token_file import Token, TokenFile, default_path
from agent_runtime_core.testing import VirtualClock
from tests.server.conftest import BASE, TOKEN, client_of

COOKIE = "agent_runtime_session_8000"
PAGE = {"Origin": BASE, "Sec-Fetch-Site": "same-origin", "X-Agent-Runtime": "1"}
OPENAPI = "/openapi.json"  # needs the scope read


async def test_a_request_needs_a_valid_token(app: Any) -> None:
    async with client_of(app, None) as client:
        missing = await client.get(OPENAPI)
        wrong = await client.get(OPENAPI, headers={"Authorization": f"Bearer {TOKEN}x"})
        other = await client.get(OPENAPI, headers={"Authorization": f"Basic {TOKEN}"})
        valid = await client.get(OPENAPI, headers={"Authorization": f"bearer {TOKEN}"})
        query = await client.get(OPENAPI, params={"token": TOKEN, "access_token": TOKEN})
    assert [each.status_code for each in (missing, wrong, other, valid, query)] == [401, 401, 401, 200, 401]
    assert missing.headers["www-authenticate"] == 'Bearer realm="agent-runtime"'
    assert wrong.headers["www-authenticate"].endswith('error="invalid_token"')
    assert missing.json()["type"] == "urn:agent-runtime:not-authenticated"


async def test_a_token_has_only_its_scopes(make_app: Callable[..., Any]) -> None:
    app = make_app(authenticate=Tokens([Token.of("reader", "r", ["read"]), Token.of("runner", "w", ["run"])]))
    async with client_of(app, "reader") as reader, client_of(app, "runner") as runner:
        assert (await reader.get(OPENAPI)).status_code == 200
        refused = await runner.get(OPENAPI)
    assert refused.status_code == 403
    assert "scope read" in refused.json()["detail"]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_function_replaces_the_tokens(make_app: Callable[..., Any], kind: str) -> None:
    def by_header(request: Any) -> Caller | None:
        name = request.headers.get("x-user")
        return Caller(name, frozenset({"read"})) if name else None

    async def later(request: Any) -> Caller | None:
        return by_header(request)

    async with client_of(make_app(authenticate=by_header if kind == "sync" else later)) as client:
        assert (await client.get(OPENAPI, headers={"x-user": "ada"})).status_code == 200
        refused = await client.get(OPENAPI)
        assert refused.status_code == 401
        assert "Bearer" not in refused.text
        health = [await client.get("/api/v1/health", headers=each) for each in ({"x-user": "ada"}, {})]
        assert ["version" in each.json() for each in health] == [True, False]
        assert (
            await client.post("/api/v1/session", json={"token": TOKEN}, headers={"x-user": "ada"})
        ).status_code == 404


async def test_a_function_that_returns_something_else_is_an_internal_error(make_app: Callable[..., Any]) -> None:
    async with client_of(make_app(authenticate=lambda request: "sk-canary-secret")) as client:
        response = await client.get(OPENAPI)
    assert response.status_code == 500
    assert "canary" not in response.text


# -- the token file


def test_the_first_start_creates_a_token_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "agents.db.token"
    first = TokenFile(path)
    text = path.read_text()
    assert first.created
    assert path.stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"[\w-]{43}\n", text)  # 256 bits
    assert not TokenFile(path).created
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["agents.db.token"]


def test_the_text_of_a_token_does_not_stay_in_memory(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "token")
    text = (tmp_path / "token").read_text().strip()
    assert text not in repr(vars(tokens)) + repr(vars(tokens.file)) + repr(tokens.tokens)
    assert text.encode() not in b"".join(each.digest for each in tokens.tokens)


async def test_named_tokens_are_read_again_without_a_restart(
    tmp_path: Path, make_app: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text("# the tokens of our team\n\none ada read\ntwo bob read,run\n")
    app = make_app(authenticate=Tokens(path))
    async with client_of(app, None) as client:

        async def status(token: str) -> int:
            return (await client.get(OPENAPI, headers={"Authorization": f"Bearer {token}"})).status_code

        assert [await status(each) for each in ("one", "two", "three")] == [200, 200, 401]
        path.write_text("three ada read,admin\n")
        assert [await status(each) for each in ("one", "two", "three")] == [401, 401, 200]
        path.write_text("no such scope here, and too many words\n")
        assert await status("three") == 200  # an invalid file changes nothing
        assert "line 1 must be TOKEN NAME SCOPES" in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it has no token"),
        ("one ada reed", "line 1: unknown scope 'reed'. Did you mean 'read'?"),
        ("one a\ntwo a", "line 2: the name of a token must be unique"),
        ("one a/b", "line 1: the name of a token must have 1 to 64 letters"),
        ("one ada read run", "line 1 must be TOKEN NAME SCOPES"),
        ("töken", "line 1: a token must have 1 to 512 visible ASCII"),
    ],
)
def test_an_invalid_token_file_is_refused_without_its_tokens(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "token"
    path.write_text(text, "utf-8")
    with pytest.raises(InvalidArgument) as raised:
        TokenFile(path)
    assert problem in str(raised.value)
    assert "töken" not in str(raised.value)


def test_the_token_file_is_beside_a_sqlite_file_else_in_the_state_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_path(AgentRunner.open(tmp_path / "a.db")) == tmp_path / "a.db.token"
    assert default_path(AgentRunner.open("memory://")) == tmp_path / "state" / "agent-runtime" / "token"
    assert (tmp_path / "state" / "agent-runtime").stat().st_mode & 0o777 == 0o700


async def test_an_app_without_authenticate_creates_the_token_file(tmp_path: Path) -> None:
    runner = AgentRunner.open(tmp_path / "a.db", registry=Registry())
    app = create_app(runner)
    token = (tmp_path / "a.db.token").read_text().strip()
    async with client_of(app, token) as client, client_of(app, None) as other:
        assert (await client.get(OPENAPI)).status_code == 200
        assert (await other.get(OPENAPI)).status_code == 401


async def test_an_app_on_a_store_that_is_only_read_creates_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "store"
    folder.mkdir()
    async with AgentRunner.open(folder / "a.db", registry=Registry()) as writer:
        await writer.submit("echo", run_id="one")
    before = sorted(folder.iterdir())
    async with AgentRunner.open(folder / "a.db", registry=Registry(), read_only=True) as runner:
        app = create_app(runner)
        token = (tmp_path / "state" / "agent-runtime" / "token").read_text().strip()
        async with client_of(app, token) as client:
            assert (await client.get("/api/v1/runs/one")).status_code == 200
            assert (await client.post("/api/v1/runs", json={"agent": "echo"})).status_code == 409
        assert sorted(folder.iterdir()) == before
        (folder / "a.db.token").write_text("known")
        async with client_of(create_app(runner), "known") as client:  # the file of a server that writes
            assert (await client.get("/api/v1/runs/one")).status_code == 200


# -- the cookie of a browser


async def signed_in(client: httpx.AsyncClient, **body: str) -> httpx.Response:
    return await client.post("/api/v1/session", json=body or {"token": TOKEN}, headers=PAGE)


async def test_a_cookie_is_hard_to_steal(app: Any) -> None:
    async with client_of(app, None) as client:
        response = await signed_in(client)
        read = await client.get(OPENAPI)
    cookie = response.headers["set-cookie"]
    assert response.status_code == 200
    assert {"HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert TOKEN not in cookie
    assert read.status_code == 200


async def test_about_tells_a_page_whether_it_can_sign_out(app: Any, make_app: Callable[..., Any]) -> None:
    async def found(app: Any, token: str | None, *, cookie: bool) -> bool:
        async with client_of(app, token) as client:
            if cookie:
                await signed_in(client)
            return bool((await client.get("/api/v1/about")).json()["signed_in"])

    assert await found(app, None, cookie=True)
    assert not await found(app, TOKEN, cookie=False)
    assert not await found(app, TOKEN, cookie=True)
    assert not await found(make_app(authenticate=lambda _: Caller("anyone")), None, cookie=False)


async def test_a_cookie_is_secure_behind_tls(app: Any) -> None:
    async with client_of(app, None) as client:
        client.base_url = httpx.URL(BASE.replace("http:", "https:"))
        page = PAGE | {"Origin": BASE.replace("http:", "https:")}
        response = await client.post("/api/v1/session", json={"token": TOKEN}, headers=page)
    assert "Secure" in response.headers["set-cookie"].split("; ")


async def test_the_code_of_the_printed_url_works_once(make_app: Callable[..., Any]) -> None:
    tokens = Tokens([Token.of(TOKEN)])
    code = tokens.new_code()
    async with client_of(make_app(authenticate=tokens), None) as client:
        first, second = [await signed_in(client, code=code) for _ in range(2)]
        read = await client.get(OPENAPI)
    assert (first.status_code, second.status_code, read.status_code) == (200, 401, 200)
    assert first.json()["name"] == "default"


async def test_signing_out_clears_the_cookie(app: Any) -> None:
    async with client_of(app, None) as client:
        await signed_in(client)
        response = await client.request("DELETE", "/api/v1/session", headers=PAGE)
        read = await client.get(OPENAPI)
    assert (response.status_code, read.status_code) == (204, 401)
    assert 'agent_runtime_session_8000=""' in response.headers["set-cookie"]


async def test_a_copy_of_a_cookie_is_not_valid_after_signing_out(make_app: Callable[..., Any]) -> None:
    tokens = Tokens([Token.of(TOKEN)], clock=VirtualClock())
    app = make_app(authenticate=tokens)
    async with client_of(app, None) as client, client_of(app, None) as other:
        await signed_in(client)
        await signed_in(other)
        copy = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        await client.request("DELETE", "/api/v1/session", headers=PAGE)
        forged = {"Cookie": copy[:-1] + "x"}
        assert (await client.request("DELETE", "/api/v1/session", headers=PAGE | forged)).status_code == 204
        assert (await client.get(OPENAPI, headers={"Cookie": copy})).status_code == 401
        assert (await other.get(OPENAPI)).status_code == 200


def test_cookies_that_were_signed_out_are_remembered_until_they_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MOST_REVOKED", 3)
    clock = VirtualClock()
    tokens = Tokens([Token.of(TOKEN)], clock=clock, cookie_seconds=100)

    def cookie() -> str:
        signed_in = tokens.sign_in(token=TOKEN)
        assert signed_in is not None
        clock.advance(1)
        return signed_in[0]

    def is_valid(value: str) -> bool:
        scope = {
            "type": "http",
            "method": "GET",
            "scheme": "http",
            "path": "/",
            "query_string": b"",
            "headers": [(b"host", b"localhost:1"), (b"cookie", f"agent_runtime_session_1={value}".encode())],
        }
        return tokens(HTTPConnection(scope)) is not None

    first, second, *ended, last = [cookie() for _ in range(7)]
    for value in (ended[0], ended[0], *ended[1:3]):
        tokens.sign_out(value)
    assert [is_valid(each) for each in (first, second, *ended, last)] == [True, True, False, False, False, True, True]
    tokens.sign_out(ended[3])  # one too many: the one that expires first is forgotten, with all that expire before it
    assert [is_valid(each) for each in (first, second, *ended, last)] == [False] * 6 + [True]
    assert len(tokens._revoked) == 3
    clock.advance(100)
    tokens.sign_out(cookie())
    assert len(tokens._revoked) == 1


@pytest.mark.parametrize("missing", ["Origin", "Sec-Fetch-Site", "X-Agent-Runtime"])
async def test_an_unsafe_request_with_a_cookie_needs_all_marks_of_the_own_page(app: Any, missing: str) -> None:
    async with client_of(app, None) as client:
        await signed_in(client)
        # The route does not exist, which is found out only after the checks.
        allowed = await client.post("/api/v1/nothing", json={}, headers=PAGE)
        refused = await client.post(
            "/api/v1/nothing", json={}, headers={name: value for name, value in PAGE.items() if name != missing}
        )
        with_token = await client.post("/api/v1/nothing", json={}, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (allowed.status_code, refused.status_code, with_token.status_code) == (404, 403, 404)


@pytest.mark.parametrize("change", [("Sec-Fetch-Site", "cross-site"), ("Origin", "https://127.0.0.1:8000")])
async def test_an_unsafe_request_with_a_cookie_from_another_page_is_refused(app: Any, change: tuple[str, str]) -> None:
    async with client_of(app, None) as client:
        await signed_in(client)
        response = await client.post("/api/v1/nothing", json={}, headers=PAGE | dict([change]))
    assert response.status_code == 403


async def test_a_cookie_ends_after_12_hours_with_its_token_or_when_it_is_changed(make_app: Callable[..., Any]) -> None:
    clock = VirtualClock()
    tokens = Tokens([Token.of(TOKEN)], clock=clock)
    app = make_app(authenticate=tokens)
    async with client_of(app, None) as client:
        await signed_in(client)
        value = client.cookies[COOKIE]

        async def status(cookie: str) -> int:
            client.cookies.clear()
            return (await client.get(OPENAPI, headers={"Cookie": f"{COOKIE}={cookie}"})).status_code

        name, expires, nonce, signature = value.split(":")
        later = ":".join((name, str(int(expires) + 1), nonce, signature))
        assert [await status(each) for each in (value, later, "", ":", "x:y:z:1", f"{value}0")] == [200] + [401] * 5
        clock.advance(12 * 3600 - 1)
        assert await status(value) == 200
        clock.advance(2)
        assert await status(value) == 401
        tokens._fixed = (Token.of("another"),)
        assert await status(value) == 401


@pytest.mark.parametrize(
    "body", [{}, {"token": TOKEN, "code": "x"}, {"tokn": TOKEN}, {"token": 5}, {"token": "x" * 513}]
)
async def test_an_invalid_sign_in_is_answered_without_its_values(app: Any, body: dict[str, Any]) -> None:
    async with client_of(app, None) as client:
        response = await client.post("/api/v1/session", json=body, headers=PAGE)
    assert response.status_code == 422
    assert "canary" not in response.text
    if "tokn" in body:
        assert response.json()["errors"] == [
            {"field": "tokn", "message": "tokn is not a known field. Did you mean 'token'?"}
        ]


async def test_a_foreign_page_cannot_sign_a_browser_in_or_out(app: Any) -> None:
    async with client_of(app, None) as client:
        for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": BASE}):
            for method in ("POST", "DELETE"):
                response = await client.request(method, "/api/v1/session", json={"token": TOKEN}, headers=headers)
                assert response.status_code == 403, headers


# -- limits


async def test_a_token_may_make_50_requests_per_second_after_200(
    make_app: Callable[..., Any], runner: AgentRunner
) -> None:
    clock = runner.queue.clock = VirtualClock()
    async with client_of(make_app()) as client:
        statuses = [(await client.get(OPENAPI)).status_code for _ in range(201)]
        response = await client.get(OPENAPI)
        clock.advance(0.1)
        after = [(await client.get(OPENAPI)).status_code for _ in range(6)]
    assert statuses == [200] * 200 + [429]
    assert response.headers["retry-after"] == "1"
    assert response.json()["type"] == "urn:agent-runtime:too-many-requests"
    assert after == [200] * 5 + [429]


async def test_wrong_tokens_of_an_address_are_limited_and_valid_ones_still_work(
    make_app: Callable[..., Any], runner: AgentRunner
) -> None:
    clock = runner.queue.clock = VirtualClock()
    app = make_app()
    async with client_of(app, "wrong") as wrong, client_of(app) as client, client_of(app, None) as none:
        statuses = [(await wrong.get(OPENAPI)).status_code for _ in range(12)]
        sign_in = await none.post("/api/v1/session", json={"token": "wrong"})
        assert statuses == [401] * 10 + [429] * 2
        assert sign_in.status_code == 429
        assert (await client.get(OPENAPI)).status_code == 200
        assert (await none.get(OPENAPI)).status_code == 401
        clock.advance(6)
        assert (await wrong.get(OPENAPI)).status_code == 401
        assert (await wrong.get(OPENAPI)).status_code == 429


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name must be a string of 1 to 256 printable characters"),
        ({"name": "a\nb"}, "name must be"),
        ({"name": "a", "scopes": "read"}, "scopes must be a set of strings"),
        ({"name": "a", "scopes": {"reed"}}, "unknown scope 'reed'. Did you mean 'read'?"),
    ],
)
def test_an_invalid_caller_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        Caller(**arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cors": ["*"]}, "cors must have origins like 'https://app.example.com'"),
        ({"cors": "https://a.example"}, "cors must be a list of strings"),
        ({"max_body_bytes": 17 << 20}, "max_body_bytes must be an integer from 1 to 16777216"),
        ({"trusted_hosts": ["a:80"]}, "trusted_hosts must have host names without a port"),
        ({"trusted_proxies": ["proxy"]}, "trusted_proxies must have IP addresses"),
        ({"max_streems": 1}, "unknown setting 'max_streems'. Did you mean 'max_streams'?"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        ServerSettings(**settings)
