"""`agent-runtime serve` in the process of the test, so that its code is measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime_core.cli.parser import parsed
from agent_runtime_core.cli.serve import serve
from tests.support.processes import PATIENCE, until
from tests.support.redis_servers import free_port


class Client(threading.Thread):
    """Lets the server add 12 and 30 when it answers, and ends it in any case."""

    def __init__(self, port: int, token_file: Path) -> None:
        super().__init__()
        self.run_of_prompt: dict[str, Any] = {}
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._token_file = token_file

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=PATIENCE) as client:
                until(lambda: _is_live(client), "the server answers")
                if not self._token_file.exists():
                    return
                headers = {"Authorization": f"Bearer {self._token_file.read_text().strip()}", "Prefer": "wait=30"}
                answer = client.post("/runs", json={"prompt": "add 12 and 30"}, headers=headers)
                self.run_of_prompt = answer.json()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def _is_live(client: httpx.Client) -> bool:
    try:
        return client.get("/health/live").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_it_serves_and_executes_runs_until_sigterm(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database, port = tmp_path / "agents.db", free_port()
    client = Client(port, Path(f"{database}.token"))
    before = signal.getsignal(signal.SIGTERM)
    client.start()
    assert asyncio.run(serve(parsed(["serve", "--db", str(database), "--port", str(port), *options]))) == 0
    client.join(PATIENCE)
    assert (client.run_of_prompt["status"], client.run_of_prompt["result"]) == ("completed", 42)
    assert signal.getsignal(signal.SIGTERM) is before
    shown = capsys.readouterr().out
    url = f"http://127.0.0.1:{port}"
    if options:
        ready = json.loads(shown.splitlines()[0])
        assert (ready["url"], ready["token_file"]) == (url, f"{database}.token")
    else:
        assert f"listening on {url}\n" in shown


@pytest.mark.parametrize(
    "options",
    [["tests.server.served_turns:turns", "--no-auth", "--no-worker"], ["tests.server.agents:registry", "--token", "t"]],
    ids=["turns", "agents"],
)
def test_it_serves_what_a_target_names(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    database, port = str(tmp_path / "agents.db"), free_port()
    monkeypatch.setenv("ARC_TEST_STORE", database)
    store = [] if "--no-auth" in options else ["--db", database]
    client = Client(port, tmp_path / "missing")  # it ends the server when that answers
    client.start()
    assert asyncio.run(serve(parsed(["serve", *options, *store, "--port", str(port)]))) == 0
    client.join(PATIENCE)
    assert f"listening on http://127.0.0.1:{port}\n" in capsys.readouterr().out
