"""Open the store of a command, and read runs from it."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import shlex
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, Final
from urllib.parse import unquote

from .._core.validation import redacted, redacted_url
from .._engines.memory import MemoryEngine
from .._engines.payloads import ReadingCodec
from ..config import get_config, place_of, use
from ..errors import AgentRuntimeError, InvalidArgument, LimitExceeded, UnknownRun, brief
from ..limits import RunLimits
from ..queue.records import RunFilter, RunRow
from ..registry import Registry
from ..runner.runner import AgentRunner
from ..runner.settings import RunnerConfig

_PAGE = 500  # rows read at once
_COMPARED: Final = 5000  # runs that are compared with an unknown run id, the newest ones
_PREFIX: Final = 4  # characters of a run id that may stand for all of it in a message
_SHOWN: Final = 5  # runs that a message names


def open_store(
    url: str | None, registry: Registry, config: RunnerConfig | None = None, *, read_only: bool = False
) -> AgentRunner:
    """Return a runner on `url`, or on the configured store. Raise InvalidArgument if the store is in memory."""
    settings = get_config()
    url = url or settings.backend_url
    if settings.queue_backend == "memory" if url is None else url.startswith("memory:"):
        problem = "no store was named" if url is None else "other processes cannot see the runs of a store in memory"
        raise InvalidArgument(f"{problem}. Pass --url agents.db, or set AGENT_RUNTIME_BACKEND_URL")
    if url is None:
        return AgentRunner(config=config, registry=registry)
    return AgentRunner.open(url, config=config, registry=registry, read_only=read_only)


def refuse_url(args: Namespace) -> None:
    """Raise InvalidArgument if there is a `--url` for the runner `args.target`."""
    given = next((name for name in ("url", "db") if getattr(args, name, None) is not None), None)
    if given is not None:
        raise InvalidArgument(f"--{given} must not be used with the runner {args.target}, which has its own store")


def is_in_memory(runner: AgentRunner) -> bool:
    return isinstance(runner.queue.commits, MemoryEngine)


def display_name(runner: AgentRunner, url: str | None = None) -> str:
    """Return the location of the store for messages, without secrets."""
    url = url or get_config().backend_url
    return (
        _readable(url) if url is not None else str(getattr(runner.queue.commits, "path", type(runner.queue).__name__))
    )


def _readable(url: str) -> str:
    """Return the URL without its secrets. A text like `user:password@host` counts as a URL without its scheme."""
    return redacted_url(url) if "@" in url else redacted(url)


@asynccontextmanager
async def existing_store(args: Namespace, *, reads: bool = False) -> AsyncIterator[AgentRunner]:
    """Open the store of a command that needs an existing store.

    A command that only `reads` opens a PostgreSQL store read-only, and a SQLite file that this user may not write. It
    marks contents that it cannot decrypt.
    """
    url = args.url or get_config().backend_url or ""
    require_file(url)
    read_only = reads and (is_postgres(url) or not _may_write(file_of(url)))
    with contents_only_shown() if reads else nullcontext():
        async with open_store(args.url, Registry(), read_only=read_only) as runner:
            yield runner


@contextmanager
def contents_only_shown() -> Iterator[None]:
    """Make stores that are opened inside the block mark contents that they cannot decrypt, and refuse writes."""
    before = get_config()
    use(dataclasses.replace(before, payload_codec=ReadingCodec(before.codec())))
    try:
        yield
    finally:
        use(before)


def file_of(url: str) -> str:
    """Return the path of a SQLite file, "" for a store that is none."""
    scheme, found, rest = url.partition("://")
    return url if not found else unquote(rest[1:]) if scheme == "sqlite" else ""


def is_postgres(url: str | None) -> bool:
    """Return whether the store is in PostgreSQL. Opened read-only it needs no right to write, and creates no schema."""
    with suppress(AgentRuntimeError):
        return bool(url) and place_of(url or "")[0] == "postgres"
    return False


def _may_write(path: str) -> bool:
    return not path or all(os.access(each, os.W_OK) for each in (path, os.path.dirname(os.path.realpath(path))))


def require_file(url: str, fix: str = "Use --url to name an existing file") -> None:
    """Raise InvalidArgument for a missing SQLite file: opening it would create it."""
    path = file_of(url)
    if path and not os.path.exists(path):
        raise InvalidArgument(f"store {brief(_readable(path), 500)} not found. {fix}")


async def require_run(runner: AgentRunner, run_id: str, tenant: str | None) -> RunRow:
    """Return the run with that id or run key, of `tenant` if it is not None. Raise UnknownRun if there is none."""
    try:
        return await runner.queue.require(run_id, tenant)
    except UnknownRun:
        raise UnknownRun(f"run {run_id!r} not found. {await _known_runs(runner, run_id, tenant)}") from None


async def _known_runs(runner: AgentRunner, run_id: str, tenant: str | None) -> str:
    """Return a sentence with the run that was probably meant, or with the newest runs."""
    wanted = RunFilter(tenant=tenant, light=True)
    names = [row.run_key or row.run_id async for row in newest_rows(runner, wanted, _COMPARED)]
    if not names:
        return "The store has no runs." if tenant is None else f"Tenant {tenant!r} has no runs."
    begins = [each for each in names if len(run_id) >= _PREFIX and each.startswith(run_id)]
    if near := begins[:1] or difflib.get_close_matches(run_id[:100], names, n=1):
        return f"Did you mean {near[0]!r}?"
    newest = ", ".join(map(repr, reversed(names[:_SHOWN])))
    return f"The newest {'run is' if len(names) == 1 else 'runs are'} {newest}."


async def similar_agent(runner: AgentRunner, key: str) -> str | None:
    """Return the key of the agent that was probably meant, if no run belongs to the agent `key`."""
    if await runner.queue.find(RunFilter(agent=key, limit=1)):
        return None
    keys = {agent for _, agent in (await runner.queue.counts()).runs}
    return next(iter(difflib.get_close_matches(key[:100], sorted(keys), n=1)), None)


#: The command that answers each kind of wait, and its argument after the name.
_ANSWERS = {"approval": ("approve", ()), "review": ("approve", ("ANSWER",)), "signal": ("signal", ("PAYLOAD",))}


def answer_command(args: Namespace, wait: Mapping[str, str], request_id: str | None = None) -> str:
    """Return the command that answers a wait of the run `args.id`, as the user would type it."""
    verb, payload = _ANSWERS[wait["kind"]]
    option = "" if request_id is None else f" --request-id {shlex.quote(request_id)}"
    return _command(args, verb, args.id, wait["name"], *payload, option=option)


def resume_command(args: Namespace, error: Mapping[str, Any]) -> str | None:
    """Return the command that raises the limit that ended the run `args.id`; None if no limit did."""
    limit = (error.get("details") or {}).get("limit")
    if error.get("type") != LimitExceeded.__name__ or limit not in RunLimits.__dataclass_fields__:
        return None
    return _command(args, f"resume --{limit.replace('_', '-')} HIGHER", args.id)


def _command(args: Namespace, verb: str, *names: str, option: str = "") -> str:
    if args.tenant is not None:
        option += f" --tenant {shlex.quote(args.tenant)}"
    options = option if args.url is None else f"{option} --url {shlex.quote(_readable(args.url))}"
    quoted = " ".join(map(shlex.quote, names))
    if any(name.startswith("-") for name in names):  # else it would be read as an option
        return f"agent-runtime {verb}{options} -- {quoted}"
    return f"agent-runtime {verb} {quoted}{options}"


def limits_from(args: Namespace) -> dict[str, Any]:
    """Return the limits in the arguments of a command."""
    names = (field.name for field in dataclasses.fields(RunLimits))
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def wanted_runs(args: Namespace) -> RunFilter:
    """Return the filter that the arguments of a command are."""
    return RunFilter(
        args.status and tuple(dict.fromkeys(args.status)), args.agent, args.since or 0.0, until=args.until,
        prefix=args.prefix, conversation=args.conversation, concurrency_key=args.concurrency_key, tenant=args.tenant,
        light=True,
    )  # fmt: skip


async def newest_rows(runner: AgentRunner, wanted: RunFilter, limit: int) -> AsyncIterator[RunRow]:
    """Yield the rows of at most `limit` runs, the newest first."""
    wanted = wanted._replace(newest_first=True)
    while limit > 0 and (rows := await runner.queue.find(wanted._replace(limit=min(limit, _PAGE)))):
        for row in rows:
            yield row
        limit -= len(rows)
        wanted = wanted._replace(before=(rows[-1].created_at, rows[-1].arrival))


async def rows_of(
    runner: AgentRunner, status: str | None = None, agent: str | None = None, *, since: float = 0.0,
    limit: float = math.inf, tenant: str | None = None,
) -> AsyncIterator[RunRow]:  # fmt: skip
    """Yield the rows of at most `limit` runs with that status, agent and tenant, in order of arrival."""
    after, wanted = 0, RunFilter(None if status is None else (status,), agent, since, limit=_PAGE, tenant=tenant)
    while limit > 0 and (rows := await runner.queue.find(wanted._replace(after=after))):
        for row in rows:
            yield row
        after, limit = rows[-1].arrival, limit - len(rows)
