"""The example of MCP as a reader starts it: as a client of a server, and as a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters
from mcp_types import TextContent

from tests.support.processes import ROOT

EXAMPLE = ROOT / "examples" / "mcp_tools.py"


def start(folder: Path) -> tuple[str, str]:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_the_second_start_calls_no_tool(tmp_path: Path) -> None:
    said, log = start(tmp_path)
    assert said == "Tea and cake are 650 cents.\n"
    assert [line.partition(" runs")[0] for line in log.splitlines()] == ["price('tea')", "price('cake')"]
    assert start(tmp_path) == (said, "")


@pytest.mark.slow
async def test_the_agent_is_a_tool(tmp_path: Path) -> None:
    server = StdioServerParameters(
        command=sys.executable, args=[str(EXAMPLE), "--serve"], cwd=tmp_path, env=dict(os.environ)
    )
    async with Client(server) as client:
        (tool,) = (await client.list_tools()).tools
        assert (tool.name, tool.description) == ("shopper", "Answers questions about prices.")
        result = await client.call_tool("shopper", {"message": "How much are tea and cake?"})
        assert result.content == [TextContent(text="Tea and cake are 650 cents.")]
