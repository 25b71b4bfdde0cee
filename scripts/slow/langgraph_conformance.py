#!/usr/bin/env python3
"""Run LangGraph's conformance suite for checkpointers: scripts/slow/langgraph_conformance.py [STORE]...

`AgentRuntimeSaver` runs it on memory, SQLite, files, Redis and PostgreSQL, or on the named ones. The servers are
started for it; a store whose server is not installed is skipped. Prints a table. A run on all stores also writes
docs/evidence/suites/langgraph.json, which `scripts/evidence.py` shows. Exits with 1 if a test failed. Needs the
package langgraph-checkpoint-conformance, which the extra `dev` contains.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "evidence" / "suites" / "langgraph.json"
PACKAGE = "langgraph-checkpoint-conformance"
STORES = ("memory", "sqlite", "files", "redis", "postgres")

sys.path.insert(0, str(ROOT))  # the servers of the tests

from langgraph.checkpoint.conformance import checkpointer_test, validate  # noqa: E402
from langgraph.checkpoint.conformance.report import CapabilityResult, ProgressCallbacks  # noqa: E402

from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver  # noqa: E402
from tests.support.postgres_servers import PostgresServer, programs  # noqa: E402
from tests.support.redis_servers import Absent, RedisServer, program  # noqa: E402


def missing(store: str) -> str | None:
    """Return why a store cannot be had here."""
    if store == "postgres" and programs() is None:
        return "initdb is not installed"
    if store == "redis":
        try:
            program()
        except Absent as error:
            return str(error)
    return None


def opened(store: str, folder: Path, stack: ExitStack) -> str:
    """Return the URL of a new store, whose server ends with the stack."""
    servers: dict[str, Callable[[], AbstractContextManager[Any]]] = {"redis": RedisServer, "postgres": PostgresServer}
    if store in servers:
        return str(stack.enter_context(servers[store]()).url)
    return {"memory": "memory://", "sqlite": f"{folder}/graphs.db", "files": f"files:///{folder}/graphs"}[store]


async def results(url: str) -> tuple[dict[str, CapabilityResult], list[str]]:
    """Run the suite on a store; its results by capability, and what failed."""
    failed: list[str] = []

    def on_test(capability: str, test: str, passed: bool, error: str | None) -> None:
        if not passed:
            failed.append(f"{capability} {test}: {(error or 'no error').strip().splitlines()[-1]}")

    @checkpointer_test(name=AgentRuntimeSaver.__name__)
    async def made() -> AsyncIterator[AgentRuntimeSaver]:
        async with AgentRuntimeSaver(url) as saver:
            yield saver

    report = await validate(made, progress=ProgressCallbacks(on_test_result=on_test))
    return report.results, failed


def main(names: list[str]) -> int:
    counts, differences = Counter[str](), []
    print(f"{'store':9} {'capability':20} passed failed skipped")
    for store in names or STORES:
        if why := missing(store):
            differences.append(f"{store}: not run, as {why}")
            print(f"{store:9} {why}")
            continue
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            found, failed = asyncio.run(results(opened(store, folder, stack)))
        for capability, each in found.items():
            numbers = (each.tests_passed, each.tests_failed, each.tests_skipped)
            print(f"{store:9} {capability:20} {numbers[0]:6} {numbers[1]:6} {numbers[2]:7}", flush=True)
            counts.update(passed=numbers[0], failed=numbers[1], skipped=numbers[2])
            if not each.detected:
                differences.append(f"{store}: the capability {capability} is missing")
        differences += [f"{store}: {problem}" for problem in failed]
    print(*differences, sep="\n")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if not names:
        result = {
            "suite": f"`{PACKAGE}`: checkpoints on {', '.join(STORES)}",
            "version": f"{importlib.metadata.version(PACKAGE)}, LangGraph {importlib.metadata.version('langgraph')}",
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            **{name: counts[name] for name in ("passed", "failed", "skipped")},
            "differences": differences,
        }
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
