"""An application of the reader's own, in which the server is mounted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.testclient import TestClient

from agent_runtime_core.errors import InvalidArgument, StorageBusy, StorageClosed, StorageFull
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server import Caller, ServerSettings, create_app, install_error_handlers
from tests.support.pages import ROOT


def mounted(runner: AgentRunner, settings: ServerSettings | None = None) -> FastAPI:
    app = FastAPI()
    app.mount("/agents", create_app(runner, authenticate=lambda request: Caller("ada"), settings=settings))
    return app


def test_the_host_of_a_test_client_works_and_others_name_the_setting(runner: AgentRunner) -> None:
    assert TestClient(mounted(runner)).get("/agents/api/v1/about").status_code == 200
    with TestClient(mounted(runner)).websocket_connect("/agents/api/v1/socket") as socket:
        socket.send_json({"type": "follow", "run_id": "unknown", "ref": 1})
        assert socket.receive_json()["status"] == 404
    for host in ("app.example.com", "testserver.example.com", "testserver:80"):
        refused = TestClient(mounted(runner), base_url=f"http://{host}").get(
            "/agents/api/v1/about", headers={"Host": host}
        )
        assert refused.status_code == 421
        assert "trusted_hosts" in refused.json()["detail"]
    settings = ServerSettings(trusted_hosts=["app.example.com"])
    trusted = TestClient(mounted(runner, settings), base_url="http://app.example.com")
    assert trusted.get("/agents/api/v1/about").status_code == 200


def test_the_host_of_a_test_client_is_no_name_of_a_real_server(
    runner: AgentRunner, live_server: Callable[..., Any]
) -> None:
    import httpx

    url = live_server(create_app(runner, authenticate=lambda request: Caller("ada"))).url
    assert httpx.get(f"{url}/api/v1/about", headers={"Host": "testserver"}).status_code == 421


@pytest.mark.parametrize("kind", [FastAPI, Starlette])
def test_own_routes_answer_the_errors_of_the_library_like_the_api(runner: AgentRunner, kind: type[Starlette]) -> None:
    errors: dict[str, Exception] = {
        "busy": StorageBusy("the store is locked"),
        "closed": StorageClosed("the runner was closed"),
        "full": StorageFull("no space is left"),
        "invalid": InvalidArgument("delay must be positive, got -1"),
        "failed": ValueError("a bug"),
    }
    app = kind()
    install_error_handlers(app)
    api = create_app(runner, authenticate=lambda request: Caller("ada"))

    async def fail(request: Any) -> Any:
        raise errors[request.path_params["name"]]

    for each in (app, api):
        each.add_route("/fail/{name}", fail)
    own, theirs = (TestClient(each, raise_server_exceptions=False) for each in (app, api))
    for name, status in (("busy", 503), ("closed", 503), ("full", 507), ("invalid", 422), ("failed", 500)):
        found, wanted = own.get(f"/fail/{name}"), theirs.get(f"/fail/{name}")
        assert (found.status_code, wanted.status_code) == (status, status)
        if status == 500:  # the application reports its own errors
            continue
        for header in ("content-type", "retry-after", "cache-control"):
            assert found.headers.get(header) == wanted.headers.get(header), (name, header)
        assert found.headers["x-request-id"] == found.json()["request_id"]
        assert found.json() == wanted.json() | {"request_id": found.json()["request_id"]}


def test_something_else_is_no_application() -> None:
    with pytest.raises(InvalidArgument, match="app must be an application of FastAPI or Starlette, got 3"):
        install_error_handlers(3)  # type: ignore[arg-type]


def test_the_program_of_the_guide_is_the_one_that_type_checkers_check() -> None:
    """`scripts/check` reads FastAPI and the library once for all files."""
    page = (ROOT / "docs/guide/fastapi.md").read_text("utf-8")
    [program] = re.findall(r"<!-- docs: file refunds.py -->\n```python\n(.*?)```", page, re.DOTALL)
    assert program == (ROOT / "tests/typing/refunds.py").read_text("utf-8"), "copy it there"
