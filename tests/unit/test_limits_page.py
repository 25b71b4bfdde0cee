"""Every number in the tables of docs/limits.md is that of the code."""

from __future__ import annotations

import inspect
import re
from typing import Final

from agent_runtime_core import AgentRunner, RunnerConfig, StepExecutor, ToolCallingAgent, errors
from agent_runtime_core._core import clock, ids, validation
from agent_runtime_core._core.codec import json, tagged
from agent_runtime_core._engines import commit_request, threaded
from agent_runtime_core._engines.postgres.user_transaction import STATEMENT_SECONDS
from agent_runtime_core._engines.redis import engine as redis
from agent_runtime_core._engines.redis import url
from agent_runtime_core._engines.sqlite import engine as sqlite
from agent_runtime_core._engines.sqlite import group_commit, user_transaction, writer
from agent_runtime_core.config import RuntimeConfig
from agent_runtime_core.events import base as events
from agent_runtime_core.llm import Retries, Timeouts
from agent_runtime_core.loop import tool_calls, turn_loop
from agent_runtime_core.orchestrator import RunCreate
from agent_runtime_core.persistence.document_stores import base as stores
from agent_runtime_core.persistence.document_stores import knowledge
from agent_runtime_core.persistence.documents import base, files
from agent_runtime_core.planning import plan, rule_planner
from agent_runtime_core.queue import RunRow
from agent_runtime_core.runner import claim, heartbeat, settings, worker
from agent_runtime_core.tools import invocation, names
from agent_runtime_core.tracing import langfuse, tracer
from agent_runtime_core.turns import personality
from tests.support.cases import for_each
from tests.support.pages import ROOT

UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "days": 86_400}
PAGE: Final = (ROOT / "docs" / "limits.md").read_text("utf-8")
ROWS: Final = re.findall(r"^\| (?!Limit \|)([^|-][^|]*) \| ([\d,]+)(?: (\w+))? \|", PAGE, re.MULTILINE)

CODE: Final[dict[str, float]] = {
    "Result of a step": json.MAX_RESULT,
    "Result of a step, with `max_result_bytes=`": json.MAX_BYTES,
    "Input or metadata of a run": json.MAX_BYTES,
    "Payload of an event, checkpoint, signal or message": json.MAX_BYTES,
    "Result of a run": json.MAX_WHOLE,
    "Value in a memory store": json.MAX_WHOLE,
    "Preference, or a stored message, task or fact": json.MAX_BYTES,
    "Result of a tool": invocation._LARGEST,
    "Arguments of a tool call, and a structured answer of a model": json.MAX_PARSED,
    "Error of a tool that the model gets": invocation._LONGEST,
    "Message or traceback of an error that is saved": errors.LONGEST,
    "Depth of nested values": validation.MAX_DEPTH,
    "Integer in a value": tagged.MAX_DIGITS,
    "Text that full-text search finds": base.LONGEST,
    "Configuration file or pack": personality.MAX_FILE_BYTES,
    "Input or output sent to Langfuse": langfuse.LONGEST,
    "Lag of a reader with `backpressure=True`": RuntimeConfig.max_unsent_bytes,
    "Run id that is a string": ids._MAX_KEY,
    "Agent key, idempotency key, concurrency key, worker id": ids._MAX_KEY,
    "Type of an event": events._LONGEST_NAME,
    "Name of a tool": names._LONGEST,
    "Prefix of Redis keys": int(url._NAME.pattern.partition("{1,")[2].rstrip("}")),
    "Part of the path of a SQLite file": ids._MAX_NAME,
    "Attempts of a run that may fail": RuntimeConfig.max_retries,
    "Crashes in a row without progress before a run is `dead`": RuntimeConfig.max_crashes,
    "Requests for one model call": Retries.max_attempts,
    "Retries of model calls in one agent loop": turn_loop.RETRIES,
    "Model calls of a `ToolCallingAgent` in one run": ToolCallingAgent.max_iterations,
    "Corrections of an answer of the wrong type": turn_loop.REPAIRS,
    "Model calls in a row with only malformed tool calls": tool_calls.MALFORMED,
    "Active runs of a concurrency key": RunRow._field_defaults["concurrency_limit"],
    "Items of a `map`, or steps of a DAG, that run concurrently": (
        inspect.signature(StepExecutor).parameters["max_concurrency"].default
    ),
    "Steps of a plan": plan.MOST_STEPS,
    "Steps of a prompt's plan that are executed": RunCreate("").max_steps,
    "Prompt of `RuleBasedPlanner`": rule_planner._MAX_CHARACTERS,
    "Embeddings in one scope": knowledge.MAX_VECTORS,
    "Commits in flight of one event loop": commit_request.MAX_IN_FLIGHT,
    "Runs in one claim of a worker": worker.MAX_CLAIM,
    "Runs that `runner.runs` returns": inspect.signature(AgentRunner.runs).parameters["limit"].default,
    "Traces that wait for the sinks": tracer.MAX_WAITING,
    "Errors of a group whose message is saved": errors.MOST_NAMED,
    "One attempt of a run, without its waits": RuntimeConfig.run_timeout_seconds,
    "Lease of a claim": RuntimeConfig.lease_ttl_seconds,
    "Blocked event loop after which leases are not renewed": heartbeat.LOOP_STALL_SECONDS,
    "Longest delay before the next attempt of a run": RuntimeConfig.retry_backoff_max,
    "Wait in memory before a run is parked": RuntimeConfig.park_after,
    "Grace time of active runs on SIGTERM": RunnerConfig.grace_seconds,
    "Time to stop after the grace time": settings.SHUTDOWN_SECONDS,
    "Time in which a suspected poison run is alone in its worker": claim.ISOLATION_TIMEOUT,
    "Wait of a resumed run for a free slot": worker.REGAIN_TIMEOUT,
    "Commit on SQLite": group_commit.COMMIT_TIMEOUT,
    "Wait for another program that locked the SQLite file": group_commit.COMMIT_TIMEOUT / 2,
    "Commit on Redis": redis.COMMIT_TIMEOUT,
    "Commit on PostgreSQL": threaded.COMMIT_TIMEOUT,
    "Read or write of a store in plain files": files.PATIENCE,
    "SQL of one `ctx.transaction` on SQLite": user_transaction.SQL_LIMIT,
    "One statement of a `ctx.transaction` on PostgreSQL": STATEMENT_SECONDS,
    "Call of a trace sink": tracer.CALL_TIMEOUT,
    "Connection to a model provider": Timeouts.connect,
    "Begin of a model's answer": Timeouts.first_byte,
    "Between two parts of a streamed answer": Timeouts.between_chunks,
    "One model call with all its retries": Timeouts.total,
    "Longest `Retry-After` that a client obeys": Retries.retry_after_cap,
    "Stored data of a session, on SQLite, Redis and PostgreSQL": stores.SESSION_TTL,
    "Delay, deadline or wait, at most": clock.TOO_LATE,
    "Size of the WAL at which it is checkpointed": writer.WAL_SIZE,
    "Size of a SQLite file that `vacuum` compacts": sqlite.LARGE,
}


def test_each_row_is_compared() -> None:
    assert [name for name, _, _ in ROWS] == list(CODE)


@for_each(("name", "number", "unit"), ROWS, ids=[name for name, _, _ in ROWS])
def test_a_limit_is_that_of_the_code(name: str, number: str, unit: str) -> None:
    assert int(number.replace(",", "")) * UNITS.get(unit, 1) == CODE[name]
