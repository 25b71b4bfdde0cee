"""Tasks taken by eight processes at once: each by one of them, all of them done.

The long form, 1,000 tasks: pytest tests/fault/test_task_workers.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_runtime_core.persistence.models import Task, TaskList, TaskState
from tests.fault.jobs.working import task_store
from tests.support.backends import POSTGRES
from tests.support.processes import Child

log = logging.getLogger("fault")
KINDS = ("sqlite", "files", pytest.param("redis", marks=pytest.mark.redis), POSTGRES)


async def shared(kind: str, where: str, count: int, workers: int = 8) -> None:
    store = task_store(kind, where)
    tasks = [Task(name=str(n), priority=n % 3) for n in range(count)]
    task_list = TaskList(name="work", tasks=tasks)
    await store.save(task_list)
    with ExitStack() as stack:
        children = [stack.enter_context(Child("working", kind, where, f"w{n}")) for n in range(workers)]
        for child in children:
            child.expect("ready")
        began = time.monotonic()
        for child in children:
            child.tell("go")
        said = [child.poll_line(240) or "nothing" for child in children]
        seconds = time.monotonic() - began
    took = [json.loads(each.removeprefix("took ")) for each in said]
    done = await store.get(task_list.id)
    await store.close()
    log.info(
        "%d tasks on %s by %d processes in %.1f s: %s", count, kind, workers, seconds, [len(each) for each in took]
    )
    assert sorted(name for each in took for name in each) == sorted(task.name for task in tasks), "each by one"
    assert {(task.state, task.attempts) for task in done.tasks} == {(TaskState.COMPLETE, 1)}
    by = {task.name: task.checkpoint_data["by"] for task in done.tasks}
    assert by == {name: f"w{n}" for n, each in enumerate(took) for name in each}


def place(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match kind:
        case "redis" | "postgres":
            return str(request.getfixturevalue(f"{kind}_url"))
        case "sqlite":
            return str(tmp_path / "tasks.db")
        case _:
            return str(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
async def test_tasks_are_shared_by_processes(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    await shared(kind, place(kind, request, tmp_path), 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_thousand_tasks(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    await shared(kind, place(kind, request, tmp_path), 1000)
