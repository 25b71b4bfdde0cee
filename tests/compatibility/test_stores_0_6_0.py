"""Stores that version 0.6.0 wrote are read and continued. `make_stores.py` made them at its last commit."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.persistence import PersistenceConfig, PersistenceManager, Scope, TaskState
from tests.compatibility import stored_runs as stored
from tests.support.redis_servers import Absent, RedisServer, missing

FIXTURES = Path(__file__).parent / "stores_0_6_0"


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "agents.db"
    path.write_bytes(gzip.decompress((FIXTURES / "agents.db.gz").read_bytes()))
    return str(path)


@pytest.fixture
def server() -> Iterator[str]:
    from tests.compatibility.redis_keys import write_keys

    try:
        started = RedisServer().__enter__()
    except Absent as reason:
        missing(str(reason))
    try:
        write_keys(started.url, json.loads((FIXTURES / "redis.json").read_text("utf-8")))
        yield started.url
    finally:
        started.__exit__(None, None, None)


@pytest.fixture(params=["database", pytest.param("server", marks=pytest.mark.redis)])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


async def test_runs_are_read(url: str) -> None:
    async with stored.runner_of(url) as runner:
        done = await runner.get_run(stored.DONE)
        assert done.status == RunStatus.SUCCEEDED
        assert (await runner.wait(stored.DONE)).final_output == {"price": 42, "answer": None}
        types = [event.event_type for event in await runner.event_bus.get_events(stored.DONE)]
        assert types[0] == "run.started"
        assert "order.priced" in types
        assert types[-1] == "run.succeeded"
        failed = await runner.get_run(stored.FAILED)
        assert failed.status == RunStatus.FAILED
        assert failed.reason == "ValueError"
        parked = await runner.get_run(stored.PARKED)
        assert (parked.status, parked.metadata) == (RunStatus.WAITING, {"customer": "Ada"})


async def test_runs_are_continued_without_repeating_steps(url: str) -> None:
    async with stored.runner_of(url) as runner:
        await runner.signal(stored.PARKED, "answer", {"ok": True})
        await runner.signal(stored.LISTED, "go", 7)
        while await runner.run_once():
            pass
        assert (await runner.wait(stored.PARKED)).final_output == {"price": 42, "answer": {"ok": True}}
        assert (await runner.wait(stored.PENDING)).final_output == {"price": 42, "answer": None}
        assert (await runner.wait(stored.FORKED)).final_output == {"price": 42, "answer": None}
        listed = (await runner.wait(stored.LISTED)).final_output
        assert listed["go"] == 7
        assert await completed(runner, stored.PARKED) == ["price", "models", "charge"]
        assert await completed(runner, stored.LISTED) == ["first", "second"]


async def completed(runner: AgentRunner, run_id: UUID) -> list[str]:
    """Return the names of the steps that a run completed, once for each time it did."""
    events = await runner.event_bus.get_events(run_id)
    return [event.payload["step_name"] for event in events if event.event_type == "step.completed"]


async def test_documents_are_read_and_changed(url: str) -> None:
    async with PersistenceManager.open(url) as stores:
        await check_documents(stores)
        assert stores.knowledge is not None
        assert stores.audit is not None
        fact = await stores.knowledge.get_fact_by_key("capital")
        assert fact is not None
        assert (fact.id, fact.value) == (stored.FACT, "Bern")
        [(found, _)] = await stores.knowledge.search_similar([0.0, 1.0], limit=1)
        assert found.content == "Bern"
        assert [entry.action for entry in await stores.audit.get_events()] == ["opened"]


async def test_files_are_read_and_changed(tmp_path: Path) -> None:
    for name, text in json.loads((FIXTURES / "files.json").read_text("utf-8")).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    async with PersistenceManager(PersistenceConfig(project_dir=tmp_path)) as stores:
        await check_documents(stores)


async def check_documents(stores: PersistenceManager) -> None:
    assert await stores.memory.get("theme") == {"dark": True}
    assert await stores.memory.get("models") == stored.models()
    await stores.memory.set("theme", {"dark": False})
    assert await stores.memory.get("theme") == {"dark": False}
    assert await stores.preferences.get("language", Scope.PROJECT) == "de"

    history = await stores.conversations.history(stored.CONVERSATION)
    assert [message.content for message in history] == ["Which trains go to Bern?"]
    assert len(await stores.conversations.branches(stored.CONVERSATION)) == 2
    conversation = await stores.conversations.get(stored.CONVERSATION)
    assert conversation is not None
    assert (conversation.title, len(conversation.messages)) == ("Trains", 3)

    tasks = await stores.tasks.get(stored.TASKS)
    assert tasks is not None
    assert [task.name for task in tasks.tasks] == ["buy", "travel"]
    claimed = await stores.tasks.claim("worker", task_list_id=stored.TASKS)
    assert claimed is not None
    assert claimed.name == "buy"
    await stores.tasks.complete(claimed)
    [travel] = await stores.tasks.ready(stored.TASKS)
    assert (travel.name, travel.state) == ("travel", TaskState.NOT_STARTED)
