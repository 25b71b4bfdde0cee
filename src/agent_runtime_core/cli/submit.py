"""`agent-runtime submit`: store a run for a worker, and wait for it if asked."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from .._core.validation import unknown
from .._views.runs import summary
from ..errors import IdempotencyConflict, InvalidArgument, brief
from ..interfaces import RunResult
from ..queue.records import RunRow
from ..registry import Registry
from ..runner.runner import AgentRunner
from .app_loader import agents_of
from .output import print_json, print_line, prints_on_stderr, warn
from .store import is_in_memory, limits_from, open_store, refuse_url, require_run, similar_agent

T = TypeVar("T", dict[str, Any], list[Any])

_MODULE_ATTR = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


async def submit(args: Namespace) -> int:
    async with _target(args) as (runner, agent_key):
        if (meant := await similar_agent(runner, agent_key)) is not None:
            warn(f"no other run has agent {agent_key!r}. Did you mean {meant!r}?")
        try:
            row, is_new = await runner.insert_run(runner.new_run(
                agent_key, _input(args), run_id=args.run_id, idempotency_key=args.idempotency_key,
                priority=args.priority, delay=args.delay, deadline=args.deadline,
                concurrency_key=args.concurrency_key, concurrency_limit=args.concurrency_limit, tenant=args.tenant,
                tags=args.tag,
            ))  # fmt: skip
        except IdempotencyConflict as error:
            warn(str(error))
            return 1
        if not args.json:
            done = "submitted" if is_new else f"exists already and is {row.status}"
            print_line(f"run {row.run_key or row.run_id} of agent {row.agent} {done}")
            sys.stdout.flush()
        elif not args.wait:
            print_json({
                "run_id": row.run_id, "run_key": row.run_key, "tenant": row.tenant or None, "agent_key": row.agent,
                "status": row.status, "existed": not is_new,
            })  # fmt: skip
        if not args.wait:
            return 0
        result = await runner.wait(row.run_id)
        return await _report(args, runner, await require_run(runner, row.run_id, None), result)


@asynccontextmanager
async def _target(args: Namespace) -> AsyncIterator[tuple[AgentRunner, str]]:
    """Open the store, and yield it with the key of the agent."""
    if not args.target and not args.agent:
        raise InvalidArgument(
            "AGENT must be an agent key or module:attr, got none. Example: agent-runtime submit greeter"
        )
    if args.target is None or _MODULE_ATTR.fullmatch(args.target) is None:
        if args.target is not None and args.agent is not None:
            raise InvalidArgument("--agent must be used with module:attr only, got it with an agent key. Leave it out")
        async with open_store(args.url, Registry()) as runner:
            yield runner, args.target or args.agent
        return
    with prints_on_stderr():
        found = agents_of(args.target, args.agent_path)
    if isinstance(found, AgentRunner):
        refuse_url(args)
        if is_in_memory(found):
            raise InvalidArgument(f"the runner {args.target} must not store runs in memory, where no worker finds them")
        async with found:
            yield found, _key_in(found.registry, args)
        return
    key = _key_in(found, args)
    async with open_store(args.url, found) as runner:
        yield runner, key


def _key_in(registry: Registry, args: Namespace) -> str:
    keys = registry.keys()
    if args.agent is not None:
        if args.agent not in keys:
            raise InvalidArgument(unknown("agent", args.agent, keys))
        return str(args.agent)
    if len(keys) > 1:
        shown = ", ".join(keys[:5]) + (", …" if len(keys) > 5 else "")
        raise InvalidArgument(f"{args.target} must have one agent, got {len(keys)}. Use --agent KEY: {shown}")
    return keys[0]


def _input(args: Namespace) -> dict[str, Any]:
    """Return the input of the run."""
    given = dict(args.input)
    if args.params is not None:
        given["params"] = {**_part(given, "params", dict), **args.params}
    if args.message is not None:
        given["messages"] = [*_part(given, "messages", list), {"role": "user", "content": args.message}]
    if limits := limits_from(args):
        given["limits"] = {**_part(given, "limits", dict), **limits}
    return given


def _part(given: dict[str, Any], name: str, kind: type[T]) -> T:
    """Return the part of the input that an option adds to."""
    part = given.get(name)
    if part is not None and not isinstance(part, kind):
        wanted = "a JSON array" if kind is list else "a JSON object"
        raise InvalidArgument(f'"{name}" in --input must be {wanted}, got {brief(part)}. Correct it or leave it out')
    return kind() if part is None else part


async def _report(args: Namespace, runner: AgentRunner, row: RunRow, result: RunResult) -> int:
    succeeded = row.status == "succeeded"
    if args.json:
        print_json({**await summary(runner, row, end=True), "final_output": result.final_output})
    elif succeeded:
        output = json.dumps(result.final_output, ensure_ascii=False, default=str)
        print_line(f"run {row.run_key or row.run_id} succeeded: {output}")
    if not succeeded:
        error = "" if result.error is None else f": {result.error.type}: {result.error.message}"
        warn(f"run {row.run_key or row.run_id!r} is {row.status}{error}")
    return 0 if succeeded else 1
