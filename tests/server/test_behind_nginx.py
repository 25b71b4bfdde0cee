"""A real nginx with the configuration of the guide, before `agent-runtime serve` with the options of the guide."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from agent_runtime_core._views.read_routes import MAX_WAIT
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import TOKEN, LiveServer, Served
from tests.server.streaming import Frame
from tests.support.nginx import NAME, Nginx, blocks, configuration, missing, serve_options
from tests.support.pages import commands_of, compare
from tests.support.processes import PATIENCE, until

if (absent := missing()) is not None:
    pytest.skip(f"needs {absent}", allow_module_level=True)

AGENTS = "tests.server.agents:registry"
ORIGIN = f"https://{NAME}"
#: What a browser and the page send.
PAGE = {"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin", "X-Agent-Runtime": "1"}
BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Named(httpx.HTTPTransport):
    """Connects to the proxy, and names the host of the guide as a client does that has found it by its name."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "sni_hostname": NAME}
        return super().handle_request(request)


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Callable[[int], Nginx]]:
    """`behind(port)`: nginx before the server on this port, until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(Nginx(tmp_path, port))


@pytest.fixture
def served(serve: Callable[..., Served], tmp_path: Path) -> Served:
    return serve(AGENTS, "--db", tmp_path / "agents.db", *serve_options())


@pytest.fixture
def nginx(behind: Callable[[int], Nginx], served: Served) -> Nginx:
    return behind(served.port)


def client_of(nginx: Nginx, address: str = "127.0.0.1", **headers: str) -> httpx.Client:
    transport = Named(verify=nginx.trusted(), local_address=address)
    url = f"https://127.0.0.1:{nginx.port}"
    return httpx.Client(base_url=url, headers={"Host": NAME, **headers}, timeout=PATIENCE, transport=transport)


@contextlib.contextmanager
def signed_in(nginx: Nginx) -> Iterator[httpx.Client]:
    with client_of(nginx, **PAGE) as client:
        answer = client.post("/api/v1/session", json={"token": TOKEN})
        assert answer.status_code == 200, answer.text
        yield client


def gated(client: httpx.Client, tmp_path: Path, **fields: Any) -> tuple[str, Path]:
    """Submit a run; return its id, and the file that lets it end."""
    gate = tmp_path / "gate"
    params = {"started": str(tmp_path / "started"), "gate": str(gate)}
    answer = client.post("/api/v1/runs", json={"agent": "gated", "input": {"params": params}, **fields})
    assert answer.status_code == 201, answer.text
    until((tmp_path / "started").exists, "the run has started")
    return str(answer.json()["run_id"]), gate


def test_plain_requests_are_sent_to_https_and_the_command_of_the_guide_gets_its_answer(
    nginx: Nginx, tmp_path: Path
) -> None:
    answer = httpx.get(f"http://127.0.0.1:{nginx.plain_port}/api/v1/runs?limit=1", headers={"Host": NAME})
    assert (answer.status_code, answer.headers["location"]) == (301, f"{ORIGIN}/api/v1/runs?limit=1")
    (tmp_path / ".curlrc").write_text(
        f'connect-to = "{NAME}:443:127.0.0.1:{nginx.port}"\ncacert = "{nginx.certificate}"\n'
    )
    [block] = blocks("$ curl")
    for _, command, expected in commands_of(block.text):
        done = subprocess.run(
            command, shell=True, env={**os.environ, "CURL_HOME": str(tmp_path)}, capture_output=True, text=True,
            timeout=PATIENCE,
        )  # fmt: skip
        compare(expected, done.stdout, command)


def test_a_browser_signs_in_submits_and_reads(nginx: Nginx, tmp_path: Path) -> None:
    with client_of(nginx) as stranger:
        assert "<html" in stranger.get("/").text
        assert stranger.get("/api/v1/about").status_code == 401
        foreign = {**PAGE, "Origin": f"http://{NAME}"}
        assert stranger.post("/api/v1/session", json={"token": TOKEN}, headers=foreign).status_code == 403
        # What the client claims is replaced, or its page could not sign in.
        spoofed = {**PAGE, "X-Forwarded-Proto": "http", "X-Forwarded-Host": "evil.example"}
        cookie = stranger.post("/api/v1/session", json={"token": TOKEN}, headers=spoofed).headers["set-cookie"]
    assert re.match(r"agent_runtime_session=\S+; HttpOnly; Max-Age=\d+; Path=/; SameSite=strict; Secure$", cookie)
    with signed_in(nginx) as client:
        assert client.get("/api/v1/about").json()["signed_in"] is True
        run_id, gate = gated(client, tmp_path, run_id="a/b")
        assert client.get("/api/v1/runs/a%2Fb").json()["run_id"] == run_id
        gate.touch()
        result = client.get(f"/api/v1/runs/{run_id}/result", params={"wait": 30})
        assert (result.status_code, result.json()["result"]) == (200, {"value": {"done": True}})
        media = {"Content-Type": "application/json"}
        most = b'{"agent": "gated"}'.ljust(ServerSettings().max_body_bytes)
        sizes = [client.post("/api/v1/runs", content=each, headers=media) for each in (most, most + b" ")]
        assert [each.status_code for each in sizes] == [201, 413]
        assert client.delete("/api/v1/session").status_code == 204
        assert client.get("/api/v1/about").status_code == 401


def test_events_arrive_when_they_happen_and_the_server_sees_that_a_client_is_gone(
    nginx: Nginx, served: Served, tmp_path: Path
) -> None:
    with signed_in(nginx) as client, served.client() as direct:
        run_id, gate = gated(client, tmp_path)
        path = f"/api/v1/runs/{run_id}/events"
        with client.stream("GET", path) as gone:
            parts = gone.iter_text()
            while "run.started" not in next(parts):
                pass
            assert direct.get("/api/v1/health").json()["streams"] == 1
        until(lambda: direct.get("/api/v1/health").json()["streams"] == 0, "the server has ended the stream")
        with client.stream("GET", path) as response:
            parts = response.iter_text()
            text = ""
            while "run.started" not in text:
                text += next(parts)
            gate.touch()  # nothing was held back: the run could not end before
            text += "".join(parts)
    assert [Frame.of(each).get("type") for each in text.strip().split("\n\n")][-2:] == ["run.succeeded", "end"]


def test_a_socket_follows_a_run(nginx: Nginx, tmp_path: Path) -> None:
    with signed_in(nginx) as client:
        run_id, gate = gated(client, tmp_path)
        cookie = {"Cookie": "; ".join(f"{name}={value}" for name, value in client.cookies.items())}
    offered = [Subprotocol("agent-runtime"), Subprotocol(f"bearer.{TOKEN}")]
    for headers, protocols in ((cookie, None), ({}, offered)):
        with connect(
            f"wss://{NAME}/api/v1/socket", sock=nginx.connected(), ssl=nginx.trusted(), origin=Origin(ORIGIN),
            additional_headers=headers, subprotocols=protocols, open_timeout=PATIENCE,
        ) as socket:  # fmt: skip
            socket.send(json.dumps({"type": "follow", "run_id": run_id, "ref": 1}))
            kinds = [json.loads(socket.recv(PATIENCE))["type"] for _ in range(2)]
            assert "ack" in kinds
            gate.touch()
            while json.loads(socket.recv(PATIENCE))["type"] != "done":
                pass


def test_wrong_tokens_are_counted_for_the_client_and_not_for_the_proxy(nginx: Nginx) -> None:
    with client_of(nginx, "127.0.0.2", Authorization="Bearer wrong") as guesser:
        spoofed = [{"X-Forwarded-For": f"192.0.2.{number}"} for number in range(11)]
        statuses = [guesser.get("/api/v1/about", headers=each).status_code for each in spoofed]
    assert statuses == [401] * 10 + [429]
    with client_of(nginx, Authorization="Bearer wrong") as other:
        assert other.get("/api/v1/about").status_code == 401


def test_a_long_stream_without_events_stays_open(
    behind: Callable[[int], Nginx],
    make_app: Callable[..., Any],
    live_server: Callable[..., LiveServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Comments pass the proxy one by one, and its time limit is longer than the time between two of them."""
    [seconds] = re.findall(r"proxy_read_timeout (\d+)s;", configuration())
    assert int(seconds) > max(MAX_WAIT, 2 * ServerSettings().keep_alive_seconds)
    monkeypatch.setattr("agent_runtime_core.server.open_streams.TICK", 0.01)
    settings = ServerSettings(keep_alive_seconds=0.05, trusted_hosts=[NAME], trusted_proxies=["127.0.0.1"])
    nginx = behind(live_server(make_app(settings=settings)).port)
    with client_of(nginx, **BEARER) as client:
        run_id = client.post("/api/v1/runs", json={"agent": "echo"}).json()["run_id"]
        with client.stream("GET", f"/api/v1/runs/{run_id}/events") as response:
            lines = response.iter_lines()
            comments = [next(each for each in lines if each.startswith(":")) for _ in range(5)]
    assert len(comments) == 5
