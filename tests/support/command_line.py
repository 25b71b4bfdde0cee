"""Commands in this process and in another one, and the stores that they look at."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.cli.main import main
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig

ROOT = Path(__file__).parents[2]


class Commands:
    """Executes commands in this process, with `url` for those that take one."""

    def __init__(self, capsys: pytest.CaptureFixture[str], url: str = "", module: str = "") -> None:
        self._capsys = capsys
        self.url = url
        self.module = module  # with agents

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Exit code, output, errors."""
        self._capsys.readouterr()
        try:
            code = main([*args, *(["--url", self.url] if self.url else [])])
        except SystemExit as end:
            code = int(str(end.code))
        out, err = self._capsys.readouterr()
        return code, out, err

    def json(self, *args: str) -> Any:
        """What the command writes with --json."""
        return json.loads(self(*args, "--json")[1])


def on(url: str, act: Callable[[AgentRunner], Awaitable[Any]]) -> Any:
    """Do something with a runner on that store, whose runs wait for nothing in memory and are tried once."""

    async def acted() -> Any:
        config = RunnerConfig(park_after=0, max_retries=1)
        async with AgentRunner.open(url, config=config, registry=Registry(), persistence=None) as runner:
            return await act(runner)

    return asyncio.run(acted())


def process(*args: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Execute a command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    return subprocess.run(
        [sys.executable, "-m", "agent_runtime_core", *args], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
