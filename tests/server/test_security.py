from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict
from starlette.responses import StreamingResponse

from agent_runtime_core.errors import (
    IdempotencyConflict,
    IllegalTransition,
    InvalidArgument,
    InvalidTurn,
    RunBusy,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    StorageFull,
    UnknownAgent,
    UnknownRun,
)
from agent_runtime_core.server.access import Caller, require
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.errors import safe_text
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import TOKEN, client_of

CANARY = "sk-canary-in-a-prompt"


class Prompt(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str
    max_steps: int = 10


def with_routes(app: Any, *, error: Exception | None = None) -> Any:
    """The application with routes of the test: one that takes a body, one that fails, one that returns its path."""

    async def take(body: Prompt, caller: Annotated[Caller, require("run")]) -> dict[str, Any]:
        return {"prompt": body.prompt, "caller": caller.name}

    async def fail(caller: Annotated[Caller, require("read")]) -> None:
        assert error is not None
        raise error

    async def path(id: str, caller: Annotated[Caller, require("read")]) -> dict[str, str]:
        return {"id": id}

    app.add_api_route("/api/v1/take", take, methods=["POST"])
    app.add_api_route("/api/v1/fail", fail)
    app.add_api_route("/api/v1/path/{id}/end", path)
    return app


# -- host and origin


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("127.0.0.1:9999", 200), ("[::1]:80", 200), ("LOCALHOST:1", 200), ("127.1.2.3", 200),
        ("agents.example.com:443", 200), ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("10.0.0.1", 421),
        ("localhost@evil.example", 421), ("localhost, evil", 421), ("localhost:x", 421), ("", 421),
    ],
)  # fmt: skip
async def test_only_loopback_and_trusted_hosts_are_answered(
    make_app: Callable[..., Any], host: str, status: int
) -> None:
    app = make_app(settings=ServerSettings(trusted_hosts=["agents.example.com"]))
    async with client_of(app) as client:
        response = await client.get("/openapi.json", headers={"Host": host})
    assert response.status_code == status
    if status == 421:
        assert response.json()["type"] == "urn:agent-runtime:wrong-host"


async def test_a_page_of_another_origin_is_refused_even_with_a_token(app: Any) -> None:
    async with client_of(app) as client:
        for origin in ("https://evil.example", "null", "http://127.0.0.1", "http://127.0.0.1:8001"):
            response = await client.get("/openapi.json", headers={"Origin": origin})
            assert response.status_code == 403, origin
            assert "access-control-allow-origin" not in response.headers
        assert (await client.get("/openapi.json", headers={"Origin": "http://127.0.0.1:8000"})).status_code == 200


async def test_a_trusted_origin_may_call_without_cookies(make_app: Callable[..., Any]) -> None:
    app = make_app(settings=ServerSettings(cors=["https://app.example"]))
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with client_of(app) as client:
        read = await client.get("/openapi.json", headers={"Origin": "https://app.example"})
        before = await client.options("/api/v1/runs", headers={"Origin": "https://app.example", **asks})
        evil = await client.options("/api/v1/runs", headers={"Origin": "https://evil.example", **asks})
    assert read.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-credentials" not in read.headers
    assert before.status_code == 200
    assert "POST" in before.headers["access-control-allow-methods"]
    assert "access-control-allow-origin" not in evil.headers


# -- bodies


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"not json", 400, "not-json"),
        (b'{"prompt": "a"', 400, "not-json"),
        (b'{"prompt": "\xff"}', 400, "not-json"),
        (b"\xef\xbb\xbf{}", 400, "not-json"),
        (b'{"max_steps": NaN}', 400, "not-json"),
        (b'{"max_steps": -Infinity}', 400, "not-json"),
        (b'{"max_steps": 1e999}', 400, "not-json"),
        (b'{"max_steps": ' + b"9" * 5000 + b"}", 400, "not-json"),
        (b'{"prompt": "\\ud800"}', 422, "invalid-argument"),
        (b"[" * 101 + b"]" * 101, 422, "invalid-argument"),
        (b"[" * 10_000, 422, "invalid-argument"),
        (b'{"a":' * 101, 422, "invalid-argument"),
        (b"[]", 422, "invalid-argument"),
        (b"{}", 422, "invalid-argument"),
        (b'{"prompt": 5}', 422, "invalid-argument"),
        (b'{"prompt": "a", "max_steps": true}', 422, "invalid-argument"),
        (b'{"prompt": "a", "max_steps": 1.5}', 422, "invalid-argument"),
    ],
)
async def test_an_invalid_body_is_a_problem_without_its_values(app: Any, body: bytes, status: int, kind: str) -> None:
    async with client_of(with_routes(app)) as client:
        response = await client.post("/api/v1/take", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    assert response.json()["type"] == f"urn:agent-runtime:{kind}"


@pytest.mark.parametrize("body", [{"prompt": "[" * 1000}, {"prompt": "\U0001f600 é \\ud800 NaN"}])
async def test_text_that_looks_invalid_is_accepted(app: Any, body: dict[str, str]) -> None:
    async with client_of(with_routes(app)) as client:
        response = await client.post(
            "/api/v1/take", content=json.dumps(body), headers={"Content-Type": "application/json; charset=utf-8"}
        )
    assert response.json() == {**body, "caller": "default"}


async def test_a_problem_names_each_field_and_the_nearest_name(app: Any) -> None:
    async with client_of(with_routes(app)) as client:
        response = await client.post("/api/v1/take", json={"promt": CANARY, "max_steps": CANARY, CANARY: 1})
    assert response.status_code == 422
    assert response.json()["errors"] == [
        {"field": "prompt", "message": "prompt is missing."},
        {"field": "max_steps", "message": "max_steps must be an integer."},
        {"field": "promt", "message": "promt is not a known field. Did you mean 'prompt'?"},
        {"field": "…", "message": "… is not a known field. Known: max_steps, prompt."},
    ]
    assert "canary" not in response.text


async def test_sizes_are_limited(make_app: Callable[..., Any]) -> None:
    app = with_routes(make_app(settings=ServerSettings(max_body_bytes=1000, max_header_bytes=2000, max_url_bytes=500)))

    async def parts() -> Any:
        for _ in range(11):
            yield b" " * 100

    headers = {"Content-Type": "application/json"}
    async with client_of(app) as client:
        fits = await client.post("/api/v1/take", json={"prompt": "a" * 900})
        declared = await client.post("/api/v1/take", json={"prompt": "a" * 1000})
        chunked = await client.post("/api/v1/take", content=parts(), headers=headers)
        long_url = await client.get("/api/v1/path/" + "a" * 500)
        long_query = await client.get("/openapi.json", params={"a": "b" * 500})
        large_header = await client.get("/openapi.json", headers={"X-A": "b" * 2000})
        media = await client.post("/api/v1/take", content=b"{}", headers={"Content-Type": "text/plain"})
        no_media = await client.post("/api/v1/take", content=b"{}")
    assert [each.status_code for each in (fits, declared, chunked)] == [200, 413, 413]
    assert declared.headers["connection"] == chunked.headers["connection"] == "close"
    assert [each.status_code for each in (long_url, long_query, large_header)] == [414, 414, 431]
    assert [each.status_code for each in (media, no_media)] == [415, 415]


async def test_an_unknown_client_cannot_send_a_body(app: Any) -> None:
    sent = 0

    async def parts() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * 1000

    async with client_of(app, None) as client:
        response = await client.post("/api/v1/take", content=parts(), headers={"Content-Type": "application/json"})
    assert response.status_code == 401
    assert sent == 0
    assert response.headers["connection"] == "close"


# -- paths


@pytest.mark.parametrize(
    ("path", "id"),
    [("a%2Fb", "a/b"), ("%2e%2e", ".."), ("a%20b", "a b"), ("%C3%A9", "é"), ("a%252Fb", "a%2Fb"), ("%2f", "/")],
)
async def test_an_encoded_id_is_one_segment(app: Any, path: str, id: str) -> None:
    async with client_of(with_routes(app)) as client:
        response = await client.get(
            httpx.URL("http://127.0.0.1:8000").copy_with(raw_path=f"/api/v1/path/{path}/end".encode())
        )
    assert response.json() == {"id": id}


async def test_a_path_cannot_forge_an_encoded_slash(app: Any) -> None:
    async with client_of(with_routes(app)) as client:
        url = httpx.URL("http://127.0.0.1:8000").copy_with(raw_path=b"/api/v1/path/a%1fb/end")
        assert (await client.get(url)).status_code == 404


# -- errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UnknownRun(f"run '{CANARY}' not found in /var/agents.db"), 404, "unknown-run"),
        (UnknownAgent(f"unknown agent '{CANARY}'. Did you mean 'echo'?"), 422, "unknown-agent"),
        (InvalidArgument(f"prompt must be a string, got '{CANARY}'. Pass a string"), 422, "invalid-argument"),
        (InvalidTurn("user_id", f"must be a string, got {CANARY!r}"), 422, "invalid-turn"),
        (IdempotencyConflict(f"key '{CANARY}' was used"), 409, "idempotency-conflict"),
        (IllegalTransition("a run cannot change"), 409, "illegal-transition"),
        (RunBusy(CANARY, "worker", None), 409, "run-busy"),
        (StorageBusy("/var/agents.db is locked"), 503, "storage-busy"),
        (StorageClosed("/var/agents.db was closed"), 503, "storage-closed"),
        (StorageFull("/var/agents.db: no space"), 507, "storage-full"),
        (StorageCorrupt("/var/agents.db is damaged"), 500, "internal-error"),
        (ValueError(f"{CANARY} in /var/agents.db"), 500, "internal-error"),
    ],
)
async def test_errors_have_their_code_and_hide_values_and_paths(
    app: Any, error: Exception, status: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with client_of(with_routes(app, error=error)) as client:
        response = await client.get("/api/v1/fail")
    body = response.json()
    assert (response.status_code, body["type"]) == (status, f"urn:agent-runtime:{kind}")
    assert body["request_id"] == response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (status == 503)
    assert "canary" not in response.text + caplog.text
    assert "/var" not in response.text
    if status == 500:
        assert set(body) == {"type", "title", "status", "request_id"}
        assert f"request {body['request_id']} failed with {type(error).__name__}" in caplog.text
    assert ("/var/agents.db is damaged" in caplog.text) == isinstance(error, StorageCorrupt)
    if isinstance(error, InvalidTurn):
        assert body["errors"] == [{"field": "user_id", "message": "user_id must be a string."}]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "max_steps must be an integer from 1 to 100, got 'x'. Pass one",
            "max_steps must be an integer from 1 to 100.",
        ),
        ("unknown agent 'helo'. Did you mean 'hello'?", "unknown agent …. Did you mean 'hello'?"),
        ("the run's key is \"it's\" in '/tmp/a b'", "the run's key is … in …"),
        ("a cut text 'abc… and the rest", "a cut text …"),
        ("cannot open /home/ada/agents.db: busy", "cannot open …: busy."),
        ("redis://user:secret@host/0 is away", "redis://***@host/0 is away."),
    ],
)
def test_values_are_removed_from_messages(message: str, shown: str) -> None:
    assert safe_text(message).replace("… busy", "…: busy") == shown


async def test_a_response_that_fails_after_its_beginning_ends_the_connection(
    app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> Any:
        yield b"a"
        raise ValueError(CANARY)

    app.add_api_route("/api/v1/stream", lambda: StreamingResponse(body()), response_model=None)
    async with client_of(app) as client:
        client._transport.raise_app_exceptions = True  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="failed after its response had begun") as raised:
            await client.get("/api/v1/stream")
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert "canary" not in caplog.text


# -- ids and logs


async def test_every_request_has_an_id_and_a_line_in_the_log_without_its_content(
    app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agent_runtime_core.access")
    async with client_of(with_routes(app)) as client, client_of(app, CANARY) as wrong:
        responses = [
            await client.post(f"/api/v1/take?q={CANARY}", json={"prompt": CANARY}),
            await client.get(f"/api/v1/path/{CANARY}/end", headers={"X-Request-Id": CANARY, "X-A": CANARY}),
            await client.get(f"/api/v1/{CANARY}"),
            await client.request("CANARY", f"/{CANARY}"),
            await wrong.get("/openapi.json"),
        ]
    ids = [each.headers["x-request-id"] for each in responses]
    lines = [each.getMessage() for each in caplog.records if each.name == "agent_runtime_core.access"]
    assert len(set(ids)) == 5
    assert [line.split(" ms ")[1] for line in lines] == [
        f"request {id} caller {name}" for id, name in zip(ids, ["default"] * 2 + ["-"] * 3, strict=True)
    ]
    assert [line.split()[:3] for line in lines] == [
        ["POST", "/api/v1/take", "200"], ["GET", "/api/v1/path/{id}/end", "200"], ["GET", "-", "404"],
        ["-", "-", "404"], ["GET", "/openapi.json", "401"],
    ]  # fmt: skip
    assert "canary" not in caplog.text


# -- shutting down, mounting


async def test_a_draining_server_rejects_requests_and_says_so(app: Any) -> None:
    app.state.server.draining.set()
    async with client_of(app) as client:
        response = await client.get("/openapi.json")
        ready = await client.get("/api/v1/health/ready")
        live = await client.get("/api/v1/health/live")
        health = await client.get("/api/v1/health")
    assert [each.status_code for each in (response, ready, live, health)] == [503, 503, 200, 503]
    assert response.headers["retry-after"] == ready.headers["retry-after"] == "5"
    assert health.json()["problems"] == ["the server is shutting down"]


async def test_a_store_that_was_closed_is_not_ready(app: Any, runner: Any) -> None:
    await runner.close()
    async with client_of(app, None) as client:
        ready = await client.get("/api/v1/health/ready")
        live = await client.get("/api/v1/health/live")
    assert (ready.status_code, live.status_code) == (503, 200)
    assert ready.json() == {"status": "unavailable"}


async def test_an_application_can_be_mounted(app: Any) -> None:
    from fastapi import FastAPI

    outer = FastAPI()
    outer.mount("/agents", with_routes(app))
    async with client_of(outer) as client:
        document = (await client.get("/agents/openapi.json")).json()
        taken = await client.post("/agents/api/v1/take", json={"prompt": "a"})
        encoded = await client.get(
            httpx.URL("http://127.0.0.1:8000").copy_with(raw_path=b"/agents/api/v1/path/a%2Fb/end")
        )
        session = await client.post("/agents/api/v1/session", json={"token": TOKEN})
        unknown = await client.get("/agents/nothing")
    assert document["servers"] == [{"url": "/agents"}]
    assert taken.json()["prompt"] == "a"
    assert encoded.json() == {"id": "a/b"}
    assert "Path=/agents/" in session.headers["set-cookie"]
    assert unknown.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["runner", "orchestrator", "turns", "settings", "authenticate"])
def test_invalid_arguments_of_create_app_are_refused(runner: Any, name: str) -> None:
    arguments: dict[str, Any] = {"runner": runner, name: 5}
    with pytest.raises(InvalidArgument, match=f"{name} must be"):
        create_app(**arguments)
