"""The result of a run as the result of an MCP tool."""

from __future__ import annotations

from typing import Any, Final

from mcp_types import CallToolResult, TextContent

from ..errors import UnserialisableResult
from ..interfaces import RunResult
from ..status import RunStatus, status_words
from ..tools.results import as_plain, text_of_result

#: The key in the `_meta` of a result under which the id of the run is.
RUN_ID: Final = "agent-runtime-core/run-id"


def tool_result(run: RunResult) -> CallToolResult:
    """Return the output of a run that succeeded, or why it did not."""
    meta: dict[str, Any] = {RUN_ID: str(run.run_id)}
    if run.status is not RunStatus.SUCCEEDED:
        reason = f": {run.error.type}: {run.error.message}" if run.error else ""
        return failure(f"run {run.run_key or run.run_id} {status_words(str(run.status))}{reason}", meta)
    try:
        output = as_plain(run.final_output)
        text = text_of_result(output.get("response", output))
    except UnserialisableResult as problem:
        return failure(f"run {run.run_key or run.run_id} succeeded, but its output is not JSON: {problem}", meta)
    return CallToolResult(content=[TextContent(text=text)], structured_content=output, _meta=meta)


def failure(text: str, meta: dict[str, Any] | None = None) -> CallToolResult:
    """Return a result that tells the model of the client why the call failed."""
    return CallToolResult(content=[TextContent(text=text)], is_error=True, _meta=meta)
