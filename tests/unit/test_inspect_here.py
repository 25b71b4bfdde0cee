"""`agent-runtime inspect` in the process of the test, so that its code is measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.cli.inspect import inspect
from agent_runtime_core.cli.parser import parsed
from tests.support.processes import PATIENCE, until
from tests.support.read_only import write_store
from tests.support.redis_servers import free_port


class Browser(threading.Thread):
    """Reads `about` when the server answers, and ends it then."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.about: dict[str, Any] = {}
        self._url = f"http://127.0.0.1:{port}/api/v1/about"

    def run(self) -> None:
        until(self._answers, "the server answers")
        os.kill(os.getpid(), signal.SIGTERM)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self._url, timeout=PATIENCE) as response:
                self.about = json.load(response)
        except urllib.error.URLError:
            return False
        return True


@pytest.mark.parametrize("options", [[], ["--json", "--open"]], ids=["text", "json"])
def test_it_serves_a_store_until_sigterm(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, port = tmp_path / "agents.db", free_port()
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    asyncio.run(write_store(store))
    capsys.readouterr()
    browser, before = Browser(port), signal.getsignal(signal.SIGTERM)
    browser.start()
    assert asyncio.run(inspect(parsed(["inspect", str(store), "--port", str(port), *options]))) == 0
    browser.join(PATIENCE)
    assert (browser.about["store"], browser.about["read_only"]) == (str(store), True)
    assert signal.getsignal(signal.SIGTERM) is before
    shown, url = capsys.readouterr().out, f"http://127.0.0.1:{port}/"
    if options:
        assert json.loads(shown) == {"ready": True, "url": url, "store": str(store)}
        until(lambda: opened == [url], "the browser is asked to open the page")
    else:
        assert shown == f"inspecting {store} on {url}\n"
        assert opened == []
