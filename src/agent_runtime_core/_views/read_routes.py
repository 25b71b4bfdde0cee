"""The routes of the HTTP API that read: their paths, parameters, scopes and answers.

The server of `agent-runtime inspect` and the HTTP API mount the same table, so that both answer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, cast

from .._core.lazy_import import load
from .._journal.record import Record
from ..queue.contents import MAX_TAG
from ..queue.records import LIVE, SCHEDULE, RunFilter, RunRow
from ..runner.approvals import open_requests
from ..runner.finding import MOST_ROWS, SORTS, Finder
from ..runner.run_client import RunClient
from . import queries
from .attempts import step_views
from .compare import compare_view
from .dashboard import WINDOWS, Dashboard
from .events import MOST_TYPES
from .journal import journal_view
from .messages import messages_view
from .overview import about_view, agents_view, pools_view, queue_view, workers_view
from .runs import BY, list_items, question_view, result_view, usage_view
from .schedules import last_runs, schedule_detail, schedule_items
from .timeline import MAX_ROWS, step_detail, timeline_view
from .visibility import (
    Viewer,
    hide_children,
    hide_parents,
    is_visible,
    refuse_limited,
    visible_page,
    visible_row,
    visible_schedule,
    visible_to,
    visible_view,
)

MAX_WAIT: Final = 60  # seconds
RETRY_SECONDS: Final = 1
_MOST_QUESTIONS: Final = 2_000
OF_RESULTS: Final = ("result", "read")  # scopes that allow to read the outcome of a run: one of them is enough


class Asked:
    """A request.

    Attributes:
        runner: The runner on the store.
        caller: Who asks.
        ids: The parts of the path that its pattern leaves open, decoded.
        query: The values of the parameters.
    """

    def __init__(self, runner: RunClient, caller: Viewer, ids: Sequence[str], query: Mapping[str, Any]) -> None:
        self.runner = runner
        self.caller = caller
        self.ids = ids
        self.query = query

    def about(self) -> dict[str, Any]:
        """Return what only this server knows about itself: {"live", ...}."""
        raise NotImplementedError

    async def ended(self, row: RunRow, seconds: float) -> RunRow:
        """Return the run when it has finished, when the time is over, or when the client is gone."""
        raise NotImplementedError

    async def row(self, position: int = 0) -> RunRow:
        """Return the run with the id or run key in the path."""
        return await visible_row(self.runner.queue, self.caller, self.ids[position], "read")

    async def journal(self) -> tuple[RunRow, list[Record]]:
        """Return the run in the path, and its journal."""
        row = await self.row()
        return row, await self.runner.state_store.records(row.run_id)


class Answer(NamedTuple):
    """A JSON response."""

    value: Any
    status: int = 200
    headers: Mapping[str, str] = {}


class Route(NamedTuple):
    """A path with names in braces, and what answers a GET request for it.

    Attributes:
        path: The path below `/api/v1/`.
        read: Returns an `Answer`, or a stream. Its docstring describes the route in the OpenAPI document.
        title: What the route does, in a few words.
        shape: The name of the answer in the OpenAPI document.
        parameters: The query parameters besides `tenant`.
        scopes: A caller needs one of these scopes.
        statuses: The statuses of success.
    """

    path: str
    read: Callable[[Any], Coroutine[Any, Any, Any]]
    title: str = ""
    shape: str = "Page"
    parameters: Mapping[str, queries.Parameter] = {}
    scopes: tuple[str, ...] = ("read",)
    statuses: tuple[int, ...] = (200,)

    def ids_in(self, parts: Sequence[str]) -> tuple[str, ...] | None:
        """Return the open parts of a path, None if the path is another path."""
        pattern = self.path.split("/")
        if len(parts) != len(pattern):
            return None
        pairs = [*zip(pattern, parts, strict=True)]
        ids = tuple(part for each, part in pairs if each[0] == "{")
        return ids if all(ids) and all(each[0] == "{" or each == part for each, part in pairs) else None


async def list_runs(asked: Asked) -> Answer:
    """List runs, newest first or sorted, without their inputs and results.

    Several states select the runs with one of them. `note` says which runs were not read.
    """
    runner, caller = asked.runner, asked.caller
    await runner.search_index.look()
    bound = {name: value for name, value in asked.query.items() if name not in ("cursor", "limit")}
    bound["tenant"] = caller.tenant
    start, limit = queries.page_start(asked.query["cursor"], bound), asked.query["limit"]
    filters, note = queries.filters_of(bound), ""
    if bound["sort"] is not None or filters[0] != filters[0].of_store:
        found = await _finder(asked, filters).find(limit, start)
        rows, following, note = found.rows, found.position, found.note
    else:
        read, start = partial(_newest, asked, filters), cast("queries.Position | None", start)
        rows, following = await visible_page(runner.queue, caller, "read", limit, MOST_ROWS, start, read, limit)
    items = await list_items(runner, rows, visible_to(runner.queue, caller))
    await hide_parents(runner.queue, caller, items)
    page = _page(items, None if following is None else queries.cursor_of(following, bound))
    return page._replace(value={**page.value, "note": note or None})


def _finder(asked: Asked, filters: Sequence[RunFilter]) -> Finder:
    """Return what reads the runs that match one of the filters, and that the caller may see."""
    queue, caller = asked.runner.queue, asked.caller

    async def visible(row: RunRow) -> bool:
        return any(each.of_store.admits(row) for each in filters) and await is_visible(queue, caller, row, "read")

    wanted = filters[0]
    if len(filters) > 1:  # states: no filter of the store has all of them
        wanted = wanted._replace(statuses=None, retrying=False, in_doubt=False)
    return Finder(queue, asked.runner.state_store, wanted, asked.query["sort"], visible)


async def _newest(
    asked: Asked, filters: Sequence[RunFilter], before: queries.Position | None
) -> list[tuple[RunRow, RunRow, queries.Position]]:
    rows = await queries.newest_of(asked.runner.queue, filters, before, asked.query["limit"] + 1)
    return [(row, row, (row.created_at, row.arrival)) for row in rows]


async def read_run(asked: Asked) -> Answer:
    """Return a run with its steps."""
    return Answer(await visible_view(asked.runner, asked.caller, await asked.row()))


async def read_result(asked: Asked) -> Answer:
    """Return the result: 200 once the run has finished, 202 until then."""
    row = await asked.ended(await asked.row(), asked.query["wait"])
    outcome = await result_view(asked.runner, row)
    return Answer(outcome, 202, {"Retry-After": str(RETRY_SECONDS)}) if row.status in LIVE else Answer(outcome)


async def read_steps(asked: Asked) -> Answer:
    """List the steps, waits and calls of a run in the order of their start."""
    return Answer(step_views(*await asked.journal(), asked.query["after"], asked.query["limit"]))


async def read_step(asked: Asked) -> Answer:
    """Return one row of the timeline with its input, output, error and records."""
    row, records = await asked.journal()
    found = step_detail(row, records, asked.ids[1])
    await hide_children(asked.runner.queue, asked.caller, row, [found])
    return Answer(found)


async def read_timeline(asked: Asked) -> Answer:
    """List the steps, model calls, tool calls, waits, approvals, sleeps and child runs with their attempts."""
    row, records = await asked.journal()
    found = timeline_view(row, records, asked.query["after"], asked.query["limit"], asked.query["newest_first"])
    await hide_children(asked.runner.queue, asked.caller, row, found["items"])
    return Answer(found)


async def read_journal(asked: Asked) -> Answer:
    """List the records of the run's journal as they are stored."""
    row, after = await asked.row(), asked.query["after"]
    later = await asked.runner.state_store.records(row.run_id, after)
    return Answer(journal_view(later, after, asked.query["limit"]))


async def read_messages(asked: Asked) -> Answer:
    """List the messages of the run in chat format."""
    return Answer(await messages_view(asked.runner, await asked.row(), asked.query["after"], asked.query["limit"]))


async def read_plan(asked: Asked) -> Answer:
    """Return the steps of the run's plan with their dependencies."""
    return Answer(await _plan_view()(asked.runner, await asked.row()))


@lru_cache(maxsize=1)
def _plan_view() -> Any:
    # By name: it imports all of `planning`, which a start does not have to wait for.
    return load(".plan:plan_view", package=__package__)


async def compare_runs(asked: Asked) -> Answer:
    """Return per step whether its results in two runs are equal, differ, or only one of the runs contains the step."""
    return Answer(await compare_view(asked.runner, await asked.row(), await asked.row(1)))


async def list_approvals(asked: Asked) -> Answer:
    """List the open questions of all runs, oldest first, with the schema and details of each.

    Without the scope read, a caller gets the questions that it may answer.
    """
    caller, queue, query = asked.caller, asked.runner.queue, asked.query
    bound = {"agent": query["agent"], "tenant": caller.tenant, "list": "approvals"}
    start = None if query["cursor"] is None else queries.position_in(query["cursor"], bound, str)[0]
    batch = query["limit"] if caller.may is None else queries.MAX_LIMIT
    verb = "read" if "read" in caller.scopes else "act"
    items, following = await visible_page(
        queue, caller, verb, query["limit"], _MOST_QUESTIONS, start, partial(_questions, asked, batch), batch
    )
    return _page(items, None if following is None else queries.cursor_of([following], bound))


async def _questions(asked: Asked, batch: int, after: str | None) -> list[tuple[RunRow, dict[str, Any], str]]:
    caller = asked.caller
    found = await open_requests(
        asked.runner.queue, batch + 1, after, asked.query["agent"], caller.tenant or "", metadata=caller.may is not None
    )
    return [(row, question_view(each), each.cursor) for row, each in found]


async def read_about(asked: Asked) -> Answer:
    """Return the store, the versions, and what the caller may do."""
    return Answer(about_view(asked.runner, asked.caller.scopes, hide_store=asked.caller.limited) | asked.about())


async def read_queue(asked: Asked) -> Answer:
    """Return how many runs wait, since when, the concurrency keys in use, and the workers."""
    refuse_limited(asked.caller, by_tenant=True)
    return Answer(await queue_view(asked.runner, asked.caller.tenant))


async def list_workers(asked: Asked) -> Answer:
    """List the processes that claim runs, with host, agents, slots, and when each was last seen."""
    refuse_limited(asked.caller)
    return _page(await workers_view(asked.runner))


async def list_pools(asked: Asked) -> Answer:
    """List the pools of runs with what is spent, reserved and left. A tenant sees only its own pools."""
    refuse_limited(asked.caller, by_tenant=True)
    return _page(await pools_view(asked.runner, asked.caller.tenant))


async def list_agents(asked: Asked) -> Answer:
    """List the agents with their descriptions, tools and input schemas."""
    items = await agents_view(asked.runner, asked.runner.registry, asked.caller.tenant)
    if asked.caller.may is not None:  # the numbers are those of all runs, and other agents those of hidden ones
        items = [{**each, "runs": {}} for each in items if each["registered"]]
    return _page(items)


async def list_schedules(asked: Asked) -> Answer:
    """List the schedules with their next and last ticks, in the order in which they were stored or changed."""
    runner, caller, query = asked.runner, asked.caller, asked.query
    bound = {"tenant": caller.tenant, "list": "schedules"}
    start = 0 if query["cursor"] is None else queries.position_in(query["cursor"], bound, int)[0]
    read, limit = partial(_schedules, asked), query["limit"]
    rows, following = await visible_page(runner.queue, caller, "read", limit, MOST_ROWS, start, read, limit)
    items = await schedule_items(runner, rows)
    return _page(items, None if following is None else queries.cursor_of([following], bound))


async def _schedules(asked: Asked, after: int | None) -> list[tuple[RunRow, RunRow, int]]:
    limit, tenant = asked.query["limit"] + 1, asked.caller.tenant
    rows = await asked.runner.queue.find(RunFilter(LIVE, SCHEDULE, after=after or 0, limit=limit, tenant=tenant))
    return [(row, row, row.arrival) for row in rows]


async def read_schedule(asked: Asked) -> Answer:
    """Return a schedule with its next ticks and its last runs. It belongs to the tenant of the request, or to none."""
    runner, caller = asked.runner, asked.caller
    row = await visible_schedule(runner, caller, asked.ids[0], "read")
    runs = [each for each in await last_runs(runner, row) if await is_visible(runner.queue, caller, each, "read")]
    items = await list_items(runner, runs, visible_to(runner.queue, caller))
    return Answer({**await schedule_detail(runner, row), "runs": items})


async def read_usage(asked: Asked) -> Answer:
    """Add up tokens and cost by agent, tenant, model or day."""
    refuse_limited(asked.caller, by_tenant=True)
    by, since, until = (asked.query[name] for name in ("by", "since", "until"))
    queries.check_order(since, until)
    return Answer(await usage_view(asked.runner, by, since, until, asked.caller.tenant))


async def read_dashboard(asked: Asked) -> Answer:
    """Return what the runs of the last hour, day or week did: numbers, latencies, cost and errors."""
    refuse_limited(asked.caller, by_tenant=True)
    dashboard = Dashboard.of(asked.runner, asked.caller.tenant)
    return Answer(await dashboard.view(asked.runner, asked.query["window"]))


def _page(items: list[dict[str, Any]], following: str | None = None) -> Answer:
    return Answer({"items": items, "next": following})


_PART: Final = {"after": queries.integer(-1, -1, 2**53), "limit": queries.integer(100, 1, 1000)}
_LIST: Final = {"cursor": queries.string(), "limit": queries.integer(50, 1, queries.MAX_LIMIT)}
_KEY: Final = queries.string(1, 512, **queries.PRINTABLE)
WAIT: Final = queries.number(0, 0, MAX_WAIT).about("Seconds.")
SEQUENCE: Final = {"pattern": r"^[0-9]{1,15}$"}  # as a schema; the greatest sequence number is 2^53
OF_EVENTS: Final = {
    "after": queries.string().about("Only events after this sequence number.", **SEQUENCE),
    "types": queries.STRINGS.about("Patterns of event types, such as `step.*`.", maxItems=MOST_TYPES),
}
_SINCE: Final = queries.TIME.about("Created at or after this time.")

#: What is read of one run, and the list of runs.
OF_RUNS: Final = (
    Route("runs", list_runs, "List runs", "Runs", {
        "state": queries.choice(*queries.STATES, many=True), "agent": queries.string(), "since": _SINCE,
        "until": queries.TIME.about("Created before."),
        "q": queries.string(0, 512).about("The beginning of a run id or run key."),
        "parent": _KEY.about("Child runs of this run."),
        "conversation": _KEY.about("Runs of the conversation with this id."),
        "search": queries.string(1, 512).about(
            "A text in the id, input, result, errors, messages or metadata of a run. Without `since` and without a "
            "full-text index: of the last day."
        ),
        "metadata": queries.METADATA.about("KEY=VALUE in the metadata of a run."),
        "tag": queries.string(1, MAX_TAG).about("A tag of the run."),
        "min_attempts": queries.integer(1, 1, 2**31).about("At least so many attempts."),
        "error_type": _KEY.about("The type of the last error."),
        "code_version": _KEY.about("The version of the code that began or continues the run."),
        "sort": queries.choice(*SORTS).about("The greatest value first. Without `since`: of the last day."), **_LIST,
    }),
    Route("runs/{id}", read_run, "Read a run", "Run", scopes=OF_RESULTS),
    Route("runs/{id}/result", read_result, "Read the result of a run", "Outcome", {"wait": WAIT}, OF_RESULTS,
          (200, 202)),
    Route("runs/{id}/steps", read_steps, "List the steps of a run", parameters=_PART),
    Route("runs/{id}/steps/{step_id}", read_step, "Read a step of a run", "AnyObject"),
    Route("runs/{id}/timeline", read_timeline, "Read the timeline of a run", "Timeline", {
        **_PART, "limit": queries.integer(100, 1, MAX_ROWS),
        "newest_first": queries.BOOLEAN.about("Whether the last rows come first."),
    }),
    Route("runs/{id}/journal", read_journal, "List the records of a run", parameters=_PART),
    Route("runs/{id}/messages", read_messages, "Read the conversation of a run", parameters=_PART, scopes=OF_RESULTS),
    Route("runs/{id}/plan", read_plan, "Read the plan of a run", "Plan"),
    Route("runs/{id}/compare/{other}", compare_runs, "Compare two runs", "Comparison"),
)  # fmt: skip
#: What is read of a whole store.
OF_STORES: Final = (
    Route("approvals", list_approvals, "List open questions", parameters={"agent": queries.string(), **_LIST},
          scopes=("approve", "read")),
    Route("about", read_about, "Read about the server", "AnyObject"),
    Route("queue", read_queue, "Read the state of the queue", "Queue"),
    Route("workers", list_workers, "List the processes that claim runs"),
    Route("pools", list_pools, "List the pools of runs"),
    Route("agents", list_agents, "List the agents of this server"),
    Route("schedules", list_schedules, "List schedules", parameters=_LIST),
    Route("schedules/{id}", read_schedule, "Read a schedule", "Schedule"),
    Route("dashboard", read_dashboard, "Read the numbers of the last week", "Dashboard",
          {"window": queries.choice(*WINDOWS, default="day")}),
    Route("usage", read_usage, "Add up usage", "Usage",
          {"by": queries.choice(*BY, default="agent"), "since": _SINCE, "until": queries.TIME}),
)  # fmt: skip


def known_parameters(route: Route) -> dict[str, queries.Parameter]:
    """Return the query parameters of a route, `tenant` first."""
    return {"tenant": queries.TENANT, **route.parameters}
