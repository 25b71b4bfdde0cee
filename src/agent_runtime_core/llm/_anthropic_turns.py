"""Arrange turns as Anthropic demands: alternating roles, and each tool call directly followed by its result."""

from __future__ import annotations

from typing import Any

from ._anthropic_content import Block, plain_or_blocks

_UNANSWERED = "No result: the call was interrupted."


def arranged(turns: list[Block]) -> list[Block]:
    """Return the turns, each with a list of blocks, as Anthropic accepts them.

    1. Every tool call has a unique id.
    2. The results of an answer's calls directly follow it. A call without a result gets an error as result, for
       example after an interrupted run. A result without a call is dropped, for example after the history was trimmed.
    3. Consecutive turns of one role are merged, because some servers reject them.
    4. A final assistant turn has no whitespace at its end.
    """
    merged = _merged(_paired(_distinct(turns)))
    if merged and merged[-1]["role"] == "assistant":
        last = merged[-1]["content"][-1]
        if last.get("type") == "text":
            merged[-1]["content"][-1] = {**last, "text": last["text"].rstrip()}
    return [{**turn, "content": plain_or_blocks(turn["content"])} for turn in merged]


def _distinct(turns: list[Block]) -> list[Block]:
    """Return the turns with unique ids of tool calls.

    Some servers number the calls of each answer from the beginning. Anthropic would reject a repeated id in every later
    request.
    """
    seen: set[Any] = set()
    renamed: dict[Any, str] = {}  # new ids by old ones, of the last answer that called tools
    for turn in turns:
        blocks = turn["content"]
        if turn["role"] == "assistant" and any(block.get("type") == "tool_use" for block in blocks):
            renamed = {}
        for index, block in enumerate(blocks):
            if block.get("type") == "tool_use":
                id_ = str(block.get("id"))
                while id_ in seen:
                    id_ += "_"
                seen.add(id_)
                renamed[block.get("id")] = id_
                blocks[index] = {**block, "id": id_}
            elif block.get("type") == "tool_result" and block.get("tool_use_id") in renamed:
                blocks[index] = {**block, "tool_use_id": renamed[block["tool_use_id"]]}
    return turns


def _paired(turns: list[Block]) -> list[Block]:
    """Return the turns with the results of each answer's calls in the turn after it."""
    # Of several results of one call the last one counts.
    results = {
        block.get("tool_use_id"): block
        for turn in turns
        for block in turn["content"]
        if block.get("type") == "tool_result"
    }
    found: list[Block] = []
    for turn in turns:
        rest = [block for block in turn["content"] if block.get("type") != "tool_result"]
        if rest:
            found.append({**turn, "content": rest})
        called = [block["id"] for block in rest if block.get("type") == "tool_use"]
        if called:
            found.append({"role": "user", "content": [results.get(id_) or _unanswered(id_) for id_ in called]})
    return found


def _unanswered(id_: str) -> Block:
    return {"type": "tool_result", "tool_use_id": id_, "content": _UNANSWERED, "is_error": True}


def _merged(turns: list[Block]) -> list[Block]:
    found: list[Block] = []
    for turn in turns:
        if found and found[-1]["role"] == turn["role"]:
            found[-1] = {**turn, "content": [*found[-1]["content"], *turn["content"]]}
        else:
            found.append(turn)
    return found
