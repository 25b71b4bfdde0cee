"""The open questions of a run as elicitation requests of MCP, and the answers to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from mcp import MCPError
from mcp_types import INVALID_PARAMS, ElicitRequest, ElicitRequestFormParams, ElicitResult

from .._core.codec.json import encode
from .._core.json_schema import misfit
from ..errors import IllegalTransition, InvalidArgument, UnserialisableResult
from ..queue.records import LIVE, RunRow
from ..runner.approvals import ApprovalRequest, open_requests_of
from ..runner.runner import AgentRunner

_PRIMITIVE: Final = ("string", "number", "integer", "boolean")
_ANSWER: Final = "answer"
_APPROVED: Final = {"type": "boolean", "title": "Approve"}


async def questions_of(runner: AgentRunner, row: RunRow) -> dict[str, ApprovalRequest]:
    """Return the open questions of a run and of its child runs, by request id."""
    if row.status not in LIVE:
        return {}
    found = {each.request_id: each for each in await open_requests_of(runner.queue, row)}
    for child in await runner.queue.children(row.run_id):
        found |= await questions_of(runner, child)
    return found


def elicitation(asked: ApprovalRequest) -> ElicitRequest:
    """Return a question as a form for a person."""
    form = _form_of(asked.schema)
    text = f"Run {asked.run_key or asked.run_id} of agent {asked.agent_key} asks for {asked.name!r}."
    if asked.details is not None:
        text += f"\n{asked.details if isinstance(asked.details, str) else encode(asked.details)}"
    return ElicitRequest(params=ElicitRequestFormParams(message=text, requested_schema=form))


async def answer(runner: AgentRunner, asked: ApprovalRequest, response: ElicitResult) -> None:
    """Answer a question with what a person entered in its form. A dismissed form leaves the question open.

    Raises:
        MCPError: The answer does not match the schema of the question, or the question is closed.
    """
    if response.action == "cancel":
        return
    try:
        given = _answer_of(asked.schema, response)
        await runner.approve(asked.run_id, asked.name, given, request_id=asked.request_id)
    except (IllegalTransition, InvalidArgument, UnserialisableResult, ValueError) as error:
        raise MCPError(INVALID_PARAMS, f"answer to {asked.name!r}: {error}") from error


def _form_of(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a flat schema with primitive properties: MCP allows no others in a form."""
    if schema is not None and _is_flat(schema):
        return dict(schema)
    if schema is None or _takes_yes_or_no(schema):
        field: dict[str, Any] = dict(_APPROVED)
    elif schema.get("type") in _PRIMITIVE:
        field = dict(schema)
    else:
        field = {"type": "string", "title": "Answer as JSON", "description": f"JSON that matches {encode(schema)}"}
    return {"type": "object", "properties": {_ANSWER: field}, "required": [_ANSWER]}


def _takes_yes_or_no(schema: Mapping[str, Any]) -> bool:
    """Return whether true and false are answers that an approval of a call takes."""
    return {"type": "boolean"} in schema.get("anyOf", ())


def _is_flat(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties")
    return (
        schema.get("type") == "object"
        and isinstance(properties, Mapping)
        and all(isinstance(each, Mapping) and each.get("type") in _PRIMITIVE for each in properties.values())
    )


def _answer_of(schema: Mapping[str, Any] | None, response: ElicitResult) -> Any:
    if response.action == "decline":
        if schema is None or misfit(False, schema) is None:
            return False
        raise ValueError("it cannot be declined, because its schema does not allow false. Accept it, or cancel the run")
    content: Any = response.content or {}
    if schema is not None and _is_flat(schema):
        return content
    if _ANSWER not in content:
        raise ValueError(f"the form has no field {_ANSWER!r}")
    if schema is None or _takes_yes_or_no(schema) or schema.get("type") in _PRIMITIVE:
        return content[_ANSWER]
    return json.loads(content[_ANSWER])
