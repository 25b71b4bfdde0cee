"""Which store a manager gives, and when it makes it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import InvalidArgument, NotSupported, UnknownSetting
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.persistence import (
    AuditStore,
    Conversation,
    ConversationMessage,
    ConversationStore,
    FileKnowledgeStore,
    FileMemoryStore,
    InMemoryMemoryStore,
    KnowledgeStore,
    MemoryStore,
    PersistenceConfig,
    PersistenceManager,
    PreferencesStore,
    Scope,
    SQLiteMemoryStore,
    TaskList,
    TaskState,
    TaskStore,
    configure_persistence,
    get_persistence_manager,
)
from agent_runtime_core.portal import call
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from tests.contract.third_party.plain_records import PlainAudit
from tests.support.fault_runs import Agent, settings

KINDS = ("memory", "conversations", "tasks", "preferences", "knowledge", "audit")
ABSTRACT = {
    MemoryStore: "get set delete list_keys clear",
    ConversationStore: "save get delete list_conversations add_message get_messages",
    TaskStore: "save get delete get_by_conversation update_task",
    PreferencesStore: "get set delete get_all",
    KnowledgeStore: "save_fact get_fact get_fact_by_key list_facts delete_fact save_summary get_summary "
    "get_summaries_for_conversation delete_summary",
    AuditStore: "log_event get_events log_error get_errors resolve_error record_metric get_metrics get_metric_summary",
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    reset_config()
    configure_persistence()
    yield
    configure_persistence()
    reset_config()


@pytest.mark.parametrize("contract", ABSTRACT, ids=lambda each: each.__name__)
def test_the_contracts_ask_for_no_more_than_they_did(contract: Any) -> None:
    assert contract.__abstractmethods__ == set(ABSTRACT[contract].split())


class Theirs(MemoryStore):
    """Somebody else's store, with a constructor of its own."""

    def __init__(self, user: str) -> None:
        self.user, self.closed, self.rows = user, 0, dict[str, Any]()

    async def get(self, key: str, scope: Scope = Scope.PROJECT) -> Any:
        return self.rows.get(key)

    async def set(self, key: str, value: Any, scope: Scope = Scope.PROJECT) -> None:
        self.rows[key] = value

    async def delete(self, key: str, scope: Scope = Scope.PROJECT) -> bool:
        return self.rows.pop(key, None) is not None

    async def list_keys(self, scope: Scope = Scope.PROJECT, prefix: str | None = None) -> list[str]:
        return sorted(key for key in self.rows if key.startswith(prefix or ""))

    async def clear(self, scope: Scope = Scope.PROJECT) -> None:
        self.rows.clear()

    async def close(self) -> None:
        self.closed += 1


class TheirConversations(ConversationStore):
    """The six methods and nothing else, over a dict."""

    def __init__(self, user: str) -> None:
        self.user, self.rows = user, dict[UUID, Conversation]()

    async def save(self, conversation: Conversation, scope: Scope = Scope.PROJECT) -> None:
        self.rows[conversation.id] = conversation

    async def get(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> Conversation | None:
        return self.rows.get(conversation_id)

    async def delete(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        return self.rows.pop(conversation_id, None) is not None

    async def list_conversations(
        self, scope: Scope = Scope.PROJECT, limit: int = 100, offset: int = 0, agent_key: str | None = None
    ) -> list[Conversation]:
        return list(self.rows.values())[offset:][:limit]

    async def add_message(
        self, conversation_id: UUID, message: ConversationMessage, scope: Scope = Scope.PROJECT
    ) -> None:
        self.rows[conversation_id].messages.append(message)

    async def get_messages(
        self,
        conversation_id: UUID,
        scope: Scope = Scope.PROJECT,
        limit: int | None = None,
        before: dt.datetime | None = None,
    ) -> list[ConversationMessage]:
        return self.rows[conversation_id].messages[:limit] if conversation_id in self.rows else []


class TheirTasks(TaskStore):
    def __init__(self, user: str) -> None:
        self.user, self.lists = user, dict[UUID, TaskList]()

    async def save(self, task_list: TaskList, scope: Scope = Scope.PROJECT) -> None:
        self.lists[task_list.id] = task_list

    async def get(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        return self.lists.get(task_list_id)

    async def delete(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        return self.lists.pop(task_list_id, None) is not None

    async def get_by_conversation(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        return next((each for each in self.lists.values() if each.conversation_id == conversation_id), None)

    async def update_task(
        self, task_list_id: UUID, task_id: UUID, state: TaskState | None = None, name: str | None = None,
        description: str | None = None, scope: Scope = Scope.PROJECT,
    ) -> None:  # fmt: skip
        [task] = [each for each in self.lists[task_list_id].tasks if each.id == task_id]
        task.state = state or task.state


def test_by_default_four_kinds_are_files_and_two_are_none() -> None:
    manager = PersistenceManager()
    assert isinstance(manager.memory, FileMemoryStore)
    assert manager.knowledge is None
    assert manager.audit is None
    assert not manager.has_knowledge()
    assert not manager.has_audit()
    assert list(Path.cwd().iterdir()) == [], "nothing is made before the first write"


async def test_an_instance_before_a_factory_before_a_class() -> None:
    mine, made = Theirs("a"), Theirs("b")
    config = PersistenceConfig(
        memory_store=mine, memory_store_factory=lambda: made, memory_store_class=Theirs,
        memory_store_kwargs={"user": "c"}, project_dir="project",
    )  # fmt: skip
    assert PersistenceManager(config).memory is mine
    config.memory_store = None
    assert PersistenceManager(config).memory is made
    config.memory_store_factory = None
    store = PersistenceManager(config).memory
    assert isinstance(store, Theirs)
    assert store.user == "c", "and no keyword of ours"


def test_a_factory_runs_once_and_when_it_is_asked_for() -> None:
    made: list[Theirs] = []

    def make() -> Theirs:
        made.append(Theirs("a"))
        return made[-1]

    manager = PersistenceManager(PersistenceConfig(memory_store_factory=make))
    assert made == []
    assert manager.memory is manager.memory is made[0]
    assert len(made) == 1


@pytest.mark.parametrize("wrong", ["agents.db", PersistenceConfig()])
def test_a_runner_takes_a_manager(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"PersistenceManager\.open"):
        AgentRunner(persistence=wrong)


async def test_close_closes_what_there_is_once() -> None:
    both = Theirs("a")
    manager = PersistenceManager(PersistenceConfig(memory_store=both, preferences_store=both))
    await manager.close()
    assert both.closed == 1


async def test_a_store_that_does_not_close_leaves_none_of_the_others_open() -> None:
    class Stuck(Theirs):
        async def close(self) -> None:
            raise OSError("no")

    first, last = Theirs("a"), Theirs("b")
    manager = PersistenceManager(
        PersistenceConfig(memory_store=first, conversation_store=Stuck("c"), preferences_store=last)
    )
    with pytest.raises(OSError, match="no"):
        await manager.close()
    assert (first.closed, last.closed) == (1, 1)


async def test_files_go_where_the_project_is(tmp_path: Path) -> None:
    config = PersistenceConfig(project_dir=tmp_path / "project", knowledge_store_class=FileKnowledgeStore)
    async with PersistenceManager(config) as manager:
        await manager.memory.set("a", 1)
        assert (tmp_path / "project" / ".agent_runtime").is_dir()
        assert not (tmp_path / "home").exists()
        await manager.preferences.set("theme", "dark")
        assert (tmp_path / "home" / ".agent_runtime").is_dir()


@pytest.mark.parametrize("where", ["memory://", "all.db", "sqlite:///all.db"])
async def test_all_six_in_one_place(where: str) -> None:
    async with PersistenceManager.open(where) as manager:
        assert manager.has_knowledge()
        assert manager.has_audit()
        for kind in KINDS:
            assert getattr(manager, kind) is getattr(manager, kind) is not None
        await manager.memory.set("a", 1)
        assert await manager.memory.get("a") == 1
    assert Path("all.db").exists() is (where != "memory://")


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="store URL must be memory://, sqlite:///path, redis://host:port/db,"):
        PersistenceManager.open("ftp://user:secret@host")
    with pytest.raises(InvalidArgument, match="relative"):
        PersistenceManager.open("sqlite://all.db")


# -- sessions


@pytest.mark.parametrize("where", ["files", "memory://", "all.db"])
async def test_a_session_ends_with_its_manager(where: str) -> None:
    def opened() -> PersistenceManager:
        return PersistenceManager() if where == "files" else PersistenceManager.open(where)

    first, second = opened(), opened()
    await first.memory.set("a", 1, Scope.SESSION)
    assert await first.memory.get("a", Scope.SESSION) == 1
    assert await second.memory.get("a", Scope.SESSION) is None
    assert await first.memory.get("a") is None
    await first.close()
    third = opened()
    third.session_id = third.config.session_id = first.session_id
    assert await third.memory.get("a", Scope.SESSION) is None
    await second.close()
    await third.close()


async def test_a_session_with_a_name_outlives_its_manager_where_others_can_see_it() -> None:
    async with PersistenceManager.open("all.db", session_id="alice") as manager:
        await manager.memory.set("a", 1, Scope.SESSION)
        await manager.preferences.set("b", 2, Scope.SESSION)
    async with PersistenceManager.open("all.db", session_id="bob") as manager:
        assert await manager.memory.get("a", Scope.SESSION) is None
    async with PersistenceManager.open("all.db", session_id="alice") as manager:
        assert await manager.memory.get("a", Scope.SESSION) == 1
        assert await manager.preferences.get("b", Scope.SESSION) == 2


# -- the one of this process


def test_the_process_has_one() -> None:
    assert get_persistence_manager() is get_persistence_manager()
    before = get_persistence_manager()
    config = configure_persistence(memory_store_class=InMemoryMemoryStore)
    assert config.memory_store_class is InMemoryMemoryStore
    assert get_persistence_manager() is not before
    assert isinstance(get_persistence_manager().memory, InMemoryMemoryStore)


def test_a_setting_nobody_reads_is_refused() -> None:
    with pytest.raises(UnknownSetting, match="memory_store_class"):
        configure_persistence(memory_store_clas=Theirs)
    with pytest.raises(UnknownSetting, match=r"PersistenceConfig: unknown setting 'nonsense'\. Known: audit_store, "):
        configure_persistence(nonsense=1)


async def test_it_is_where_backend_url_says() -> None:
    configure(backend_url="sqlite:///runs.db")
    import agent_runtime_core.persistence.manager as module

    module._default.config = module._default.manager = None
    manager = get_persistence_manager()
    assert isinstance(manager.memory, SQLiteMemoryStore)
    await manager.memory.set("a", 1)
    await manager.close()
    assert Path("runs.db").exists()


# -- in a run


async def test_a_runner_opened_in_one_place_has_its_stores_there() -> None:
    agents = Registry()

    async def code(ctx: Any) -> RunResult:
        await ctx.step("note", ctx.persistence.memory.set, "seen", str(ctx.run_id))
        return RunResult()

    agents.register(Agent("a", code))
    runner = AgentRunner.open("runs.db", config=settings(), registry=agents)
    result = await runner.execute("a", None, {})
    assert result.error is None
    await runner.close()
    async with PersistenceManager.open("runs.db") as manager:
        assert await manager.memory.get("seen") == str(result.run_id)


async def test_somebody_elses_stores_keep_a_runs_conversation() -> None:
    """Six methods are enough, and their constructors are theirs."""
    stores = PersistenceManager(
        PersistenceConfig(
            memory_store_class=Theirs,
            memory_store_kwargs={"user": "a"},
            conversation_store_factory=lambda: TheirConversations("a"),
            task_store=TheirTasks("a"),
        )
    )
    agents, chat = Registry(), uuid4()

    async def code(ctx: Any) -> RunResult:
        await ctx.persistence.memory.set("n", len(ctx.input_messages))
        return RunResult({"response": "yes"}, [*ctx.input_messages, {"role": "assistant", "content": "yes"}])

    agents.register(Agent("a", code))
    runner = AgentRunner.open("runs.db", config=settings(), registry=agents, persistence=stores)
    for _ in range(2):
        said = {"messages": [{"role": "user", "content": "well?"}], "conversation_id": str(chat)}
        assert (await runner.execute("a", None, said)).error is None
    assert await stores.memory.get("n") == 3
    kept = await stores.conversations.history(chat)
    assert [each.role for each in kept] == ["user", "assistant"] * 2
    edited = await stores.conversations.edit_message(chat, kept[0].id, "well then?")
    assert [each.content for each in await stores.conversations.history(chat)] == ["well then?"]
    assert edited.parent_message_id == kept[0].id
    await runner.close()


def test_what_somebody_elses_store_cannot_do_is_said() -> None:
    for what in (lambda: PlainAudit().export(), lambda: call(PlainAudit().prune, keep=1)):
        with pytest.raises(NotSupported, match="PlainAudit"):
            what()


def test_a_store_of_theirs_that_fails_fails_the_run_and_says_so() -> None:
    class Broken(TheirConversations):
        async def get(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("no such table")

    stores = PersistenceManager(PersistenceConfig(conversation_store=Broken("a")))
    agents = Registry()

    async def code(ctx: Any) -> RunResult:
        return RunResult()

    agents.register(Agent("a", code))
    runner = AgentRunner.open("runs.db", config=settings(max_retries=1), registry=agents, persistence=stores)
    result = runner.execute_sync("a", None, {"conversation_id": str(uuid4())})
    assert result.error is not None
    assert (result.error.type, result.error.message) == ("OSError", "no such table")
    call(runner.close)


@pytest.mark.parametrize("wrong", [{"project_dir": "x"}, "a.db", 5])
def test_a_configuration_is_one(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"config must be a PersistenceConfig, got .*PersistenceManager\.open"):
        PersistenceManager(wrong)


# -- durability


async def test_a_manager_uses_the_configured_durability_or_its_own(tmp_path: Path) -> None:
    import agent_runtime_core.persistence.manager as module

    module._default.config = module._default.manager = None
    configure(durability="normal")
    try:
        for options, wanted in (({}, "normal"), ({"durability": "full"}, "full")):
            path = tmp_path / f"{wanted}.db"
            async with PersistenceManager.open(path, **options) as manager:
                await manager.memory.set("a", 1)
                found = {each.engine.durability for each in manager.document_stores()}  # type: ignore[attr-defined]
                assert found == {wanted}
        async with AgentRunner.open(tmp_path / "normal.db"), PersistenceManager.open(tmp_path / "normal.db") as manager:
            assert await manager.memory.get("a") == 1
        configure(durability="normal", backend_url=str(tmp_path / "normal.db"))
        async with AgentRunner(), get_persistence_manager() as manager:
            assert await manager.memory.get("a") == 1
    finally:
        reset_config()
    async with PersistenceManager.open("memory://", durability="normal") as manager:
        await manager.memory.set("a", 1)


async def test_two_durabilities_of_one_file_are_rejected_at_open(tmp_path: Path) -> None:
    path = tmp_path / "one.db"
    said = "^durability of .*one.db must be the same .*, got 'normal' while it is open with 'full'. Set it once"
    async with AgentRunner.open(path):
        for url in (path, f"sqlite:///{path}"):
            with pytest.raises(InvalidArgument, match=said):
                PersistenceManager.open(url, durability="normal")
    with pytest.raises(InvalidArgument, match=r"^durability must be 'full' or 'normal', got 'most'"):
        PersistenceManager.open(path, durability="most")
    async with PersistenceManager.open(path, durability="normal") as manager:
        await manager.memory.set("a", 1)
        with pytest.raises(InvalidArgument, match="got 'full' while it is open with 'normal'"):
            AgentRunner.open(path)
