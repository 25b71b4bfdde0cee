"""What the local server answers: the paths below `/api/v1/`, and the function and parameters of each.

The data is that of the HTTP API. Its functions in `_views` make both.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, Final, NamedTuple

from .._core.context_vars import start_helper
from .._core.lazy_import import load
from .._views.about import about_view
from .._views.agents import agents_view
from .._views.compare import compare_view
from .._views.cursors import cursor_of
from .._views.events import Chosen, events_page, sequence_of, type_filter
from .._views.journal import journal_view
from .._views.list_query import MAX_LIMIT, STATES, check_order, filters_of, newest_of, page_start, position_in
from .._views.messages import messages_view
from .._views.plain import json_bytes
from .._views.queue import queue_view, workers_view
from .._views.runs import list_items, result_view, row_named, run_view
from .._views.steps import step_views
from .._views.timeline import MAX_ROWS, step_detail, timeline_view
from .._views.usage import BY, usage_view
from .._views.waits import question_view
from ..errors import AgentRuntimeError
from ..queue.records import LIVE, RunRow
from ..runner.run_client import RunClient
from .query_parameters import BOOLEAN, STRINGS, TENANT, TIME, Parameter, choice, integer, number, string

MAX_WAIT: Final = 60  # seconds
STORE_SECONDS: Final = 2.0  # for the store to answer
RETRY_SECONDS: Final = 1


class Asked(NamedTuple):
    """A request.

    Attributes:
        runner: The runner on the store.
        ids: The parts of the path that its pattern leaves open, decoded.
        query: The values of the parameters.
        client: The connection, which nobody reads while the request is answered.
    """

    runner: RunClient
    ids: tuple[str, ...]
    query: Mapping[str, Any]
    client: socket.socket


class Reply(NamedTuple):
    """A JSON response."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}


class Route(NamedTuple):
    """A path, with {} for a part that is open, and what answers a request for it."""

    path: str
    read: Callable[[Asked], Coroutine[Any, Any, Reply]]
    parameters: Mapping[str, Parameter] = {}

    def ids_in(self, parts: list[str]) -> tuple[str, ...] | None:
        """Return the open parts of a path, None if the path is another one."""
        pattern = self.path.split("/")
        if len(parts) != len(pattern) or any(
            each not in ("{}", part) for each, part in zip(pattern, parts, strict=True)
        ):
            return None
        ids = tuple(part for each, part in zip(pattern, parts, strict=True) if each == "{}")
        return ids if all(ids) else None


async def _about(asked: Asked) -> Reply:
    return _json(about_view(asked.runner, ["read"], "poll"))


async def _runs(asked: Asked) -> Reply:
    bound = {name: value for name, value in asked.query.items() if name not in ("cursor", "limit")}
    before, limit = page_start(asked.query["cursor"], bound), asked.query["limit"]
    rows = await newest_of(asked.runner.queue, filters_of(bound), before, limit + 1)
    page = rows[:limit]
    more = cursor_of((page[-1].created_at, page[-1].arrival), bound) if len(rows) > limit else None
    return _page(await list_items(asked.runner, page), more)


async def _run(asked: Asked) -> Reply:
    return _json(await run_view(asked.runner, await _row(asked)))


async def _result(asked: Asked) -> Reply:
    row = await _row(asked)
    if row.status in LIVE and asked.query["wait"]:
        await _until(asked, asked.runner.watcher.until_ended(row.run_id, asked.query["wait"]))
        row = await _row(asked)
    outcome = await result_view(asked.runner, row)
    if row.status in LIVE:
        return Reply(json_bytes(outcome), 202, {"Retry-After": str(RETRY_SECONDS)})
    return _json(outcome)


async def _steps(asked: Asked) -> Reply:
    row = await _row(asked)
    records = await asked.runner.state_store.records(row.run_id)
    return _json(step_views(row, records, asked.query["after"], asked.query["limit"]))


async def _step(asked: Asked) -> Reply:
    row = await _row(asked)
    return _json(step_detail(row, await asked.runner.state_store.records(row.run_id), asked.ids[1]))


async def _timeline(asked: Asked) -> Reply:
    row = await _row(asked)
    records = await asked.runner.state_store.records(row.run_id)
    after, limit, newest_first = (asked.query[name] for name in ("after", "limit", "newest_first"))
    return _json(timeline_view(row, records, after, limit, newest_first))


async def _journal(asked: Asked) -> Reply:
    row = await _row(asked)
    records = await asked.runner.state_store.records(row.run_id)
    return _json(journal_view(records, asked.query["after"], asked.query["limit"]))


async def _messages(asked: Asked) -> Reply:
    row = await _row(asked)
    return _json(await messages_view(asked.runner, row, asked.query["after"], asked.query["limit"]))


async def _plan(asked: Asked) -> Reply:
    # By name: it imports all of `planning`, which a start does not have to wait for.
    plan_view: Any = load(".._views.plan:plan_view", package=__package__)
    return _json(await plan_view(asked.runner, await _row(asked)))


async def _compare(asked: Asked) -> Reply:
    return _json(await compare_view(asked.runner, await _row(asked), await _row(asked, 1)))


async def _events(asked: Asked) -> Reply:
    """Return a page of events. With `wait` it has at least one event, unless the run has finished or time is over."""
    position = sequence_of("after", asked.query["after"])
    start = 0 if position is None else position + 1
    chosen = type_filter(asked.query["types"])
    row = await _row(asked)
    if asked.query["wait"]:
        await _until(asked, _next_event(asked.runner, row.run_id, start, chosen, asked.query["wait"]))
    return Reply(await events_page(asked.runner.event_bus, row.run_id, start, chosen))


async def _approvals(asked: Asked) -> Reply:
    bound = {"agent": asked.query["agent"], "tenant": asked.query["tenant"], "list": "approvals"}
    cursor, limit = asked.query["cursor"], asked.query["limit"]
    after = None if cursor is None else position_in(cursor, bound, str)[0]
    agent, tenant = asked.query["agent"], asked.query["tenant"]
    found = await asked.runner.approvals(limit + 1, after, agent=agent, tenant=tenant)
    more = cursor_of([found[limit - 1].cursor], bound) if len(found) > limit else None
    return _page([question_view(each) for each in found[:limit]], more)


async def _queue(asked: Asked) -> Reply:
    return _json(await queue_view(asked.runner, asked.query["tenant"]))


async def _workers(asked: Asked) -> Reply:
    return _page(await workers_view(asked.runner), None)


async def _agents(asked: Asked) -> Reply:
    return _page(await agents_view(asked.runner, asked.runner.registry, asked.query["tenant"]), None)


async def _usage(asked: Asked) -> Reply:
    by, since, until = (asked.query[name] for name in ("by", "since", "until"))
    check_order(since, until)
    return _json(await usage_view(asked.runner, by, since, until, asked.query["tenant"]))


async def _live(asked: Asked) -> Reply:
    return _json({"status": "ok"})


async def _ready(asked: Asked) -> Reply:
    return _health_of(await _problems(asked.runner), {})


async def _health(asked: Asked) -> Reply:
    problems = await _problems(asked.runner)
    return _health_of(problems, {
        "version": load("agent_runtime_core:__version__"), "python": platform.python_version(),
        "worker": asked.runner.config.worker_id, "queue": type(asked.runner.queue).__name__,
        "agents": len(asked.runner.registry.keys()), "streams": 0, "problems": problems,
    })  # fmt: skip


def _health_of(problems: list[str], details: dict[str, Any]) -> Reply:
    if problems:
        return Reply(json_bytes({"status": "unavailable", **details}), 503, {"Retry-After": "5"})
    return _json({"status": "ok", **details})


async def _problems(runner: RunClient) -> list[str]:
    try:
        async with asyncio.timeout(STORE_SECONDS):
            await runner.queue.next_due()
    except (AgentRuntimeError, TimeoutError) as error:
        return [f"the store does not answer: {type(error).__name__}"]
    return []


def _json(value: Any) -> Reply:
    return Reply(json_bytes(value))


def _page(items: list[dict[str, Any]], following: str | None) -> Reply:
    return _json({"items": items, "next": following})


async def _row(asked: Asked, position: int = 0) -> RunRow:
    """Return the run with the id or run key in the path."""
    return await row_named(asked.runner.queue, asked.ids[position], asked.query["tenant"])


async def _next_event(runner: RunClient, run_id: str, start: int, chosen: Chosen | None, seconds: float) -> None:
    """Return when the run has such an event from `start` on, when it has finished, or when the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), contextlib.aclosing(runner.event_pages(run_id, start)) as pages:
            async for page in pages:
                if chosen is None or any(map(chosen, page)):
                    return


async def _until(asked: Asked, work: Coroutine[Any, Any, object]) -> None:
    """Wait for something, or until the client has closed its connection."""
    with _leaving(asked.client) as gone:
        waiting = start_helper(work)
        others: list[Awaitable[Any]] = [waiting, gone]
        try:
            await asyncio.wait(map(asyncio.ensure_future, others), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@contextlib.contextmanager
def _leaving(client: socket.socket) -> Iterator[asyncio.Future[None]]:
    """Yield a future that is done when the client closes its connection, or sends the next request already."""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(client, lambda: None if gone.done() else gone.set_result(None))
    try:
        yield gone
    finally:
        loop.remove_reader(client)


_PART: Final = {"after": integer(-1, -1, 2**53), "limit": integer(100, 1, 1000)}
_LIST: Final = {"cursor": string(), "limit": integer(50, 1, MAX_LIMIT)}
_WAIT: Final = number(0, 0, MAX_WAIT)
_KEY: Final = string(1, 512)

_ROUTES: Final[tuple[Route, ...]] = (
    Route("about", _about),
    Route("runs", _runs, {
        "state": choice(*STATES, many=True), "agent": string(), "since": TIME, "until": TIME, "q": string(0, 512),
        "parent": _KEY, "conversation": _KEY, **_LIST,
    }),
    Route("runs/{}", _run),
    Route("runs/{}/result", _result, {"wait": _WAIT}),
    Route("runs/{}/steps", _steps, _PART),
    Route("runs/{}/steps/{}", _step),
    Route("runs/{}/timeline", _timeline, {**_PART, "limit": integer(100, 1, MAX_ROWS), "newest_first": BOOLEAN}),
    Route("runs/{}/journal", _journal, _PART),
    Route("runs/{}/messages", _messages, _PART),
    Route("runs/{}/plan", _plan),
    Route("runs/{}/compare/{}", _compare),
    Route("runs/{}/events", _events, {"after": string(), "types": STRINGS, "wait": _WAIT}),
    Route("approvals", _approvals, {"agent": string(), **_LIST}),
    Route("queue", _queue),
    Route("workers", _workers),
    Route("agents", _agents),
    Route("usage", _usage, {"by": choice(*BY, default="agent"), "since": TIME, "until": TIME}),
    Route("health", _health),
    Route("health/live", _live),
    Route("health/ready", _ready),
)  # fmt: skip
ROUTES: Final = tuple(each._replace(parameters={**each.parameters, "tenant": TENANT}) for each in _ROUTES)
