"""`agent-runtime serve` as a real process."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.registry import Registry
from tests.server.conftest import TOKEN, Served
from tests.support.command_line import Commands
from tests.support.processes import PATIENCE, ROOT, until

AGENTS = "tests.server.agents"
PROMPT = {"messages": [{"role": "user", "content": "add 12 and 30"}], "params": {"max_steps": 5}}

Serve = Callable[..., Served]


def opened(tmp_path: Path) -> AgentRunner:
    return AgentRunner.open(tmp_path / "agents.db", registry=Registry(), persistence=None)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refused(*arguments)`: the one line of a command that exits with 2, executed in this process."""
    command = Commands(capsys)

    def refusal(*args: object) -> str:
        code, out, err = command("serve", *map(str, args))
        assert (code, out) == (2, ""), err
        (line,) = err.splitlines()
        return line

    return refusal


async def test_without_a_target_it_plans_and_executes_prompts(serve: Serve, tmp_path: Path) -> None:
    served = await asyncio.to_thread(serve)
    assert served.ready["agents"] == ["orchestrator", "turn", "turn.step"]
    async with opened(tmp_path) as runner:
        result = await runner.wait(await runner.submit("orchestrator", PROMPT), PATIENCE)
    assert result.final_output["result"] == 42
    served.send(signal.SIGTERM)
    assert await served.aended() == 0


def test_it_answers_with_the_token_on_the_printed_url(serve: Serve, tmp_path: Path) -> None:
    served = serve()
    assert served.url == f"http://127.0.0.1:{served.port}"
    assert served.ready["token_file"] is None
    with served.client() as client, served.client(None) as other:
        assert client.get("/openapi.json").status_code == 200
        assert other.get("/openapi.json").status_code == 401
        code = served.ready["sign_in"].removeprefix(f"{served.url}/#code=")
        page = {"Origin": served.url, "Sec-Fetch-Site": "same-origin", "X-Agent-Runtime": "1"}
        assert other.post("/api/v1/session", json={"code": code}, headers=page).status_code == 200
        assert other.get("/openapi.json").status_code == 200
    assert not (tmp_path / "agents.db.token").exists()


def test_it_serves_metrics_of_its_runs_and_requests(serve: Serve, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    served = serve("--metrics", "open")
    with served.client() as client, served.client(None) as scraper:
        body = {"agent": "orchestrator", "input": PROMPT}
        run = client.post("/api/v1/runs", json=body).json()["run_id"]
        assert client.get(f"/api/v1/runs/{run}/result?wait=30").status_code == 200
        expected = 'agent_runtime_runs_total{agent="orchestrator",state="succeeded"} 1.0'
        until(lambda: expected in scraper.get("/metrics").text, "the run is counted")
        text = scraper.get("/metrics").text
    assert 'agent_runtime_http_requests_total{method="POST",route="/api/v1/runs",status="201"} 1.0' in text


def test_in_a_terminal_it_prints_a_url_that_signs_in(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "agent_runtime_core", "serve", "--port", "0", "--db", str(tmp_path / "agents.db")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    with open(terminal, encoding="utf-8") as lines:
        try:
            shown = [next(lines).split() for _ in range(3)]
            url = shown[1][-1]
            assert shown[2][0] == "open"
            assert shown[2][1].startswith(f"{url}/#code=")
        finally:
            process.terminate()
            assert process.wait(PATIENCE) == 0


def test_by_default_the_token_is_in_a_file_beside_the_store(serve: Serve, tmp_path: Path) -> None:
    served = serve("--token-file", tmp_path / "other.token", "--log-level", "warning")
    assert served.ready["token_file"] == str(tmp_path / "other.token")
    with served.client((tmp_path / "other.token").read_text().strip()) as client:
        assert client.get("/openapi.json").status_code == 200


def test_a_token_of_the_environment_is_used_without_a_warning(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_TOKEN", "from-the-environment")
    with Served("--db", tmp_path / "a.db") as served:
        with served.client("from-the-environment") as client:
            assert client.get("/openapi.json").status_code == 200
        assert "warning" not in capfd.readouterr().err
        assert not (tmp_path / "a.db.token").exists()
    warned = serve("--token", TOKEN)
    warned.send(signal.SIGTERM)
    assert warned.ended() == 0
    text = capfd.readouterr().err
    assert "can read --token in the list of processes" in text
    assert TOKEN not in text


def test_without_auth_it_answers_everybody_on_this_machine_but_no_foreign_page(serve: Serve) -> None:
    served = serve("--no-auth")
    assert served.ready["sign_in"] == served.url
    with served.client(None) as client:
        assert client.get("/openapi.json").status_code == 200
        assert client.get("/openapi.json", headers={"Origin": "https://evil.example"}).status_code == 403
        assert client.get("/openapi.json", headers={"Host": "evil.example"}).status_code == 421


def test_options_trust_hosts_origins_and_proxies(serve: Serve) -> None:
    served = serve(
        "--trusted-host", "agents.example.com", "--cors", "https://app.example", "--trusted-proxy", "127.0.0.1"
    )
    with served.client() as client:
        answered = client.get("/openapi.json", headers={"Host": "agents.example.com", "Origin": "https://app.example"})
        assert answered.headers["access-control-allow-origin"] == "https://app.example"
        page = {"Origin": "https://agents.example.com", "X-Agent-Runtime": "1", "Host": "agents.example.com",
                "X-Forwarded-Proto": "https"}  # fmt: skip
        cookie = client.post("/api/v1/session", json={"token": TOKEN}, headers=page).headers["set-cookie"]
    assert "Secure" in cookie


def test_options_limit_bodies_and_pending_runs(serve: Serve) -> None:
    served = serve("--max-body", "100", "--max-pending", "1", "--no-worker")
    with served.client() as client:
        large = client.post("/api/v1/runs", json={"prompt": "x" * 100})
        first, second = (client.post("/api/v1/runs", json={"prompt": "add 1 and 2"}) for _ in range(2))
    assert [each.status_code for each in (large, first, second)] == [413, 201, 429]


def test_a_server_on_all_addresses_without_a_trusted_host_warns(
    serve: Serve, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve("--host", "0.0.0.0").client() as client:
        assert client.get("/api/v1/health", headers={"Host": "10.0.0.3"}).status_code == 421
    assert "Add --trusted-host NAME" in capfd.readouterr().err
    with serve("--host", "0.0.0.0", "--trusted-host", "10.0.0.3").client() as client:
        assert client.get("/api/v1/health", headers={"Host": "10.0.0.3"}).status_code == 200
    assert "--trusted-host" not in capfd.readouterr().err


def test_forwarded_headers_of_others_do_not_count(serve: Serve) -> None:
    served = serve()
    with served.client("wrong") as client:
        statuses = [
            client.get("/openapi.json", headers={"X-Forwarded-For": f"10.0.0.{n}"}).status_code for n in range(11)
        ]
    assert statuses == [401] * 10 + [429]


async def test_on_sigterm_it_rejects_requests_finishes_runs_and_exits_with_0(serve: Serve, tmp_path: Path) -> None:
    served = await asyncio.to_thread(serve, f"{AGENTS}:registry", "--db", tmp_path / "agents.db")
    params = {"started": str(tmp_path / "started"), "gate": str(tmp_path / "gate")}
    async with opened(tmp_path) as runner:
        run = await runner.submit("gated", {"params": params})
        await asyncio.to_thread(until, (tmp_path / "started").exists, "the run has started")
        pending = await runner.submit("gated", {"params": params}, delay=3600)

        def stop() -> Any:
            with served.client() as client:
                assert client.get("/openapi.json").status_code == 200
                served.send(signal.SIGTERM)
                until(lambda: client.get("/openapi.json").status_code == 503, "it rejects requests")
                return client.get("/openapi.json")

        response = await asyncio.to_thread(stop)
        assert response.headers["retry-after"] == "5"
        assert response.json()["type"] == "urn:agent-runtime:not-available"
        (tmp_path / "gate").touch()
        assert await served.aended() == 0
        assert (await runner.get_run(run)).status is RunStatus.SUCCEEDED
        assert (await runner.get_run(pending)).status is RunStatus.PENDING


async def test_a_second_signal_does_not_wait(serve: Serve, tmp_path: Path) -> None:
    served = await asyncio.to_thread(serve, f"{AGENTS}:registry", "--db", tmp_path / "agents.db", "--grace", "600")
    params = {"started": str(tmp_path / "started"), "gate": str(tmp_path / "gate")}
    async with opened(tmp_path) as runner:
        run = await runner.submit("gated", {"params": params})
        await asyncio.to_thread(until, (tmp_path / "started").exists, "the run has started")
        served.send(signal.SIGTERM)
        with served.client() as client:  # two signals at once would be one
            drains = lambda: client.get("/api/v1/health/ready").status_code == 503  # noqa: E731
            await asyncio.to_thread(until, drains, "the server drains")
        assert await asyncio.to_thread(served.hurry) == 0
        assert (await runner.get_run(run)).status is RunStatus.PENDING


def test_the_flow_of_a_client_over_http(serve: Serve) -> None:
    served = serve()
    with served.client() as client:
        created = client.post("/api/v1/runs", json={"prompt": "add 12 and 30", "max_steps": 5})
        assert created.status_code == 201
        run = created.json()
        assert (run["status"], run["result"]) == ("pending", None)
        until(lambda: client.get(created.headers["location"]).json()["status"] == "completed", "the run has completed")
        done = client.get(f"/api/v1/runs/{run['run_id']}").json()
        assert (done["result"], done["error"]) == (42, None)
        assert done["steps"]
        assert client.get("/api/v1/runs/00000000-0000-0000-0000-000000000000").status_code == 404
        assert client.post("/api/v1/runs", json={"prompt": 5}).status_code == 422
        assert client.post("/api/v1/runs", json={"prompt": "a", "max_steps": 0}).status_code == 422


async def test_on_sigterm_streams_end_and_reconnect(serve: Serve, tmp_path: Path) -> None:
    served = await asyncio.to_thread(serve, f"{AGENTS}:registry", "--db", tmp_path / "agents.db", "--no-worker")
    async with opened(tmp_path) as runner:
        run = await runner.submit("gated", {"params": {}})

    def read() -> str:
        with served.client() as client, client.stream("GET", f"/api/v1/runs/{run}/events") as response:
            chunks = response.iter_text()
            text = next(chunks)
            served.send(signal.SIGTERM)
            return text + "".join(chunks)

    text = await asyncio.to_thread(read)
    assert text.startswith("retry: ")
    assert "event: bye" in text
    assert await served.aended() == 0


async def test_without_a_worker_it_executes_nothing(serve: Serve, tmp_path: Path) -> None:
    served = await asyncio.to_thread(serve, "--no-worker")
    assert served.ready["concurrency"] == 0
    async with opened(tmp_path) as runner:
        run = await runner.submit("orchestrator", PROMPT)
        served.send(signal.SIGTERM)
        assert await served.aended() == 0
        assert (await runner.get_run(run)).status is RunStatus.PENDING


@pytest.mark.parametrize(("target", "agents"), [("orchestrator", ["planner"]), ("turns", ["turn", "turn.step"])])
def test_a_target_may_be_an_orchestrator_or_a_turn_manager(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, agents: list[str]
) -> None:
    monkeypatch.setenv("TEST_STORE", str(tmp_path / "agents.db"))
    served = serve(f"{AGENTS}:{target}")
    assert served.ready["agents"] == agents
    with served.client() as client:
        assert client.get("/api/v1/health").json()["agents"] == len(agents)


# -- bad use


def test_a_used_port_is_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        line = refused("--db", tmp_path / "a.db", "--port", port)
    assert f"port {port} of '127.0.0.1' cannot be used: Address already in use" in line
    assert not (tmp_path / "a.db").exists()


def test_a_store_that_is_too_new_is_one_line(serve: Serve, refused: Callable[..., str], tmp_path: Path) -> None:
    served = serve()
    served.send(signal.SIGTERM)
    assert served.ended() == 0
    with sqlite3.connect(tmp_path / "agents.db") as db:
        (table,) = [name for (name,) in db.execute("SELECT name FROM sqlite_master") if "schema" in name][:1]
        db.execute(f"UPDATE {table} SET version = 999")
    db.close()
    assert "this library knows" in refused("--db", tmp_path / "agents.db", "--port", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_no_auth_needs_a_loopback_host(refused: Callable[..., str], tmp_path: Path, host: str) -> None:
    line = refused("--db", tmp_path / "a.db", "--no-auth", "--host", host, "--port", 0)
    assert f"--no-auth must not be used with --host {host}" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([f"{AGENTS}:empty"], "must have at least one agent, got none"),
        ([f"{AGENTS}:nothing"], "has no 'nothing'"),
        (["--port", "70000"], "must be a port from 0 to 65535"),
        (["--host", "no such host"], "cannot be used"),
        (["--token", "a b"], "a token must have 1 to 512 visible ASCII characters"),
        (["--token", "a", "--no-auth"], "not allowed with argument --token"),
        (["--token-file", "{db}"], "--token-file must not be the file of the store"),
        (["--cors", "*"], "cors must have origins"),
        (["--max-body", "16777217"], "--max-body must be at most 16777216, got 16777217"),
        (["--max-pending", "0"], "--max-pending"),
        (["--token-file", "/nowhere/token"], "cannot be created: No such file or directory"),
        (["--url", "b.db"], "not allowed with argument --db"),
    ],
)
def test_bad_use_is_one_line(refused: Callable[..., str], tmp_path: Path, args: list[str], message: str) -> None:
    args = [each.format(db=tmp_path / "a.db") for each in args]
    assert message in refused("--db", tmp_path / "a.db", *([] if "--port" in args else ["--port", "0"]), *args)


def test_bad_use_exits_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent_runtime_core", "serve", "--db", str(tmp_path / "a.db"), "--port", "70000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "must be a port from 0 to 65535" in done.stderr


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; from agent_runtime_core.cli.main import main; "
        "sys.exit(main(['serve', '--db', 'a.db']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "needs the 'fastapi' package: pip install 'agent-runtime-core[server]'" in done.stderr


def test_the_package_is_imported_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; import agent_runtime_core.server as server\n"
        "try:\n    server.create_app\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert "pip install 'agent-runtime-core[server]'" in done.stdout
