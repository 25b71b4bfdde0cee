"""Two owners with the same kinds of marked contents in one store, and all that a store then has of each of them."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from agent_runtime_core import AgentRunner, PersistenceManager, conversation_uuid
from agent_runtime_core.errors import StepExecutionError
from agent_runtime_core.events.base import EventBus
from agent_runtime_core.persistence import (
    AuditEntry,
    AuditEventType,
    Conversation,
    ConversationMessage,
    Embedding,
    ErrorRecord,
    Fact,
    PerformanceMetric,
    Scope,
    Summary,
    Task,
    TaskList,
)
from agent_runtime_core.registry import Registry
from agent_runtime_core.turns.event_topics import EventPublisherSubscriber
from agent_runtime_core.turns.events import AuditEvent, TurnEvent
from tests.support.canaries import bytes_under
from tests.support.postgres_servers import PostgresServer
from tests.support.redis_servers import RedisServer
from tests.support.runs import Script


@dataclass
class Owner:
    """A tenant, a conversation or a run, and the marks of its contents."""

    name: str
    tenant: str | None = None
    made: set[str] = field(default_factory=set)

    def __call__(self, place: str) -> str:
        """Return a text that names its place and its owner. It is one word, also of a full-text index."""
        text = f"{place}of{self.name}canary"
        self.made.add(text)
        return text

    def found_in(self, raw: bytes) -> set[str]:
        return {text for text in self.made if text.encode() in raw}

    @property
    def run(self) -> str:
        return self("runkey")

    @property
    def conversation(self) -> str:
        return self("room")


OWNERS: dict[str, Owner] = {}


async def _told(text: str) -> str:
    return f"{_now('result')} {text}"


_speaking: list[Owner] = []


def _now(place: str) -> str:
    return _speaking[-1](place)


async def speaker(ctx: Any) -> str:
    """Store each kind of content of a run, and wait for its owner in between."""
    mark = OWNERS[ctx.input["owner"]]
    _speaking.append(mark)

    async def long() -> str:
        return mark("longresult") * 200

    async def pay(amount: str) -> str:
        return mark("effect")

    async def break_down() -> None:
        raise ValueError(mark("steperror"))

    await ctx.step("told", _told, mark("argument"), key=mark("stepkey"), description=mark("description"))
    await ctx.step("long", long)
    await ctx.step("pay", pay, mark("amount"), key=mark("effectkey"), on_in_doubt="fail")
    await ctx.step(mark("stepname"), pay, mark("amount"), on_in_doubt="fail")
    with contextlib.suppress(StepExecutionError):
        await ctx.step("broken", break_down, retries=1, retry_delay=0)
    await ctx.checkpoint({"at": mark("checkpoint")})
    await ctx.checkpoint({"at": mark("latercheckpoint")})
    await ctx.emit("my.event", {"text": mark("event")})
    await ctx.call("child", {"owner": mark.name, "text": mark("childinput")})
    await ctx.wait_for_signal("answer")
    await ctx.approve("pay", {"text": mark("question")})
    await ctx.messages(timeout=None)
    return mark("output")


async def child(ctx: Any) -> str:
    mark = OWNERS[ctx.input["owner"]]

    async def pay() -> str:
        return mark("childeffect")

    await ctx.step("pay", pay, key=mark("childkey"), on_in_doubt="fail")
    return mark("childoutput")


async def waiting(ctx: Any) -> None:
    await ctx.wait_for_signal("never")


def _failing() -> Any:
    async def body(ctx: Any) -> str:
        mark = OWNERS[ctx.input["owner"]]
        if mark.name not in repaired:
            raise ValueError(mark("error"))
        return mark("repairedoutput")

    return body


repaired: set[str] = set()  # the owners whose failing run succeeds from now on


def agents() -> Registry:
    registry = Registry()
    for body, key in ((speaker, "speaker"), (child, "child"), (_failing(), "failing"), (waiting, "waiting")):
        registry.register(Script(body, key))
    return registry


async def work(runner: AgentRunner) -> None:
    """Execute what can be executed."""
    while await runner.run_once():
        pass


async def store_runs(runner: AgentRunner, mark: Owner) -> None:
    """Store runs in several states, with children and a fork. All name the conversation of their owner."""
    OWNERS[mark.name] = mark
    about: dict[str, Any] = {"owner": mark.name, "text": mark("input"), "conversation_id": mark.conversation}
    about["messages"] = [{"role": "user", "content": mark("user")}]
    await runner.submit(
        "speaker", about, run_id=mark.run, metadata={"note": mark("metadata")}, tenant=mark.tenant,
        idempotency_key=mark("idempotencykey"), concurrency_key=mark("concurrencykey"),
    )  # fmt: skip
    await work(runner)
    await runner.signal(mark.run, "answer", {"text": mark("signal")}, tenant=mark.tenant)
    await runner.send(mark.run, mark("message"), tenant=mark.tenant)
    await runner.approve(mark.run, "pay", {"text": mark("decision")}, by=mark("person"), tenant=mark.tenant)
    await work(runner)
    (await runner.wait(mark.run, 0, tenant=mark.tenant)).raise_for_status()
    forked = {**about, "text": mark("forkinput")}
    await runner.fork(
        mark.run, new_run_id=mark("forkkey"), input=forked, effects="reuse", by=mark("forker"), tenant=mark.tenant
    )
    await work(runner)
    (await runner.wait(mark("forkkey"), 0, tenant=mark.tenant)).raise_for_status()


async def store_more_runs(runner: AgentRunner, mark: Owner, *, live: bool) -> None:
    """Store a failed run, a run that is not due, and with `live` one that waits."""
    about = {"owner": mark.name, "text": mark("secondinput"), "conversation_id": mark.conversation}
    await runner.submit("failing", about, run_id=mark("failingkey"), concurrency_key="", tenant=mark.tenant)
    await work(runner)
    if live:
        for key in ("waitingkey", "blockedkey"):
            await runner.submit("waiting", about, run_id=mark(key), tenant=mark.tenant)
        await work(runner)


async def store_documents(stores: PersistenceManager, mark: Owner, run_id: UUID | None, *, all_kinds: bool) -> None:
    """Store documents that name the conversation of the owner, or the run; with `all_kinds` also others."""
    named = conversation_uuid(mark.conversation)
    links: dict[str, Any] = {"run_id": run_id} if run_id is not None else {"conversation_id": named}
    which = run_id or named
    await stores.memory.set(f"of {which}", {"text": mark("memory")})
    task = Task(name=mark("taskname"), description=mark("task"), checkpoint_data={"at": mark("taskcheckpoint")})
    await stores.tasks.save(TaskList(name=mark("tasklist"), tasks=[task], **links))
    assert stores.knowledge is not None
    assert stores.audit is not None
    embedding = Embedding(vector=[0.25, 0.5], content=mark("embedding"), source_id=which)
    await stores.knowledge.save_embedding(embedding)
    entry = AuditEntry(event_type=AuditEventType.CUSTOM, action=mark("audit"), details={"n": mark("details")}, **links)
    await stores.audit.log_event(entry)
    await stores.audit.log_error(ErrorRecord(error_type="E", message=mark("errorrecord"), **links))
    await stores.audit.record_metric(PerformanceMetric(name="n", value=1.0, tags={"of": mark("metric")}, **links))
    if run_id is not None:
        return
    conversations = stores.conversations
    found = await conversations.get(named)
    if found is None:
        found = Conversation(id=named, name=mark.conversation)
        await conversations.save(found)
    found.title, found.summary = mark("title"), mark("conversationsummary")
    await conversations.save(found)
    message = ConversationMessage(role="user", content=mark("ownmessage"))
    await conversations.add_message(named, message)
    await conversations.edit_message(named, message.id, mark("edited"))
    assert await conversations.search(mark("edited"))  # makes the full-text index
    await conversations.fork(named, title=mark("forktitle"))
    await conversations.save(Conversation(id=named, title=mark("globaltitle")), Scope.GLOBAL)
    await stores.knowledge.save_summary(Summary(content=mark("summary"), conversation_ids=[named]))
    if all_kinds:
        await stores.preferences.set("theme", mark("preference"))
        await stores.memory.set("session", mark("sessionmemory"), Scope.SESSION)
        await stores.knowledge.save_fact(Fact(key="color", value=mark("fact")))


async def store_topics(runner: AgentRunner, mark: Owner, run_id: UUID) -> None:
    """Publish events about a turn of the owner, which is that run."""
    topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
    turn = TurnEvent(messages=[{"role": "user", "content": mark("turn")}], turn_id=str(run_id), tenant=mark.tenant)
    await topics.tell(turn, turn_id=str(run_id))
    await topics.tell(
        AuditEvent(action="done", details={"text": mark("auditevent")}), turn_id=str(run_id), tenant=mark.tenant
    )


async def topics_of(bus: EventBus, state: Any) -> list[str | None]:
    """Return the turns that the topics have events of."""
    topics = EventPublisherSubscriber(bus, state)
    names = ("agent.turns", "agent.audit")
    return [each.turn_id for name in names async for each in topics.subscribe(name, 0, follow=False)]


# -- all that a store has


def raw_memory(runner: AgentRunner) -> bytes:
    return repr(runner.queue.commits.tables).encode()  # type: ignore[attr-defined]


def raw_file(path: Any) -> bytes:
    """Return the bytes of the file and its log, and what in them is compressed, also in free pages."""
    stored = b"".join(each.read_bytes() for each in sorted(path.parent.glob(f"{path.name}*")) if each.is_file())
    return stored + bytes_under(path.parent) + b"".join(_unpacked(stored))


def _unpacked(stored: bytes) -> Iterator[bytes]:
    for found in re.finditer(rb"x\x9c", stored):
        with contextlib.suppress(zlib.error):
            yield zlib.decompressobj().decompress(stored[found.start() : found.start() + 40_000])


def raw_postgres(server: PostgresServer, url: str) -> bytes:
    """Return all rows of the schema."""
    schema, found = url.partition("schema=")[2], list[str]()
    for (table,) in server.ask("SELECT tablename FROM pg_tables WHERE schemaname = %s", schema):
        found += [row[0] for row in server.ask(f"SELECT t::text FROM {schema}.{table} t")]
    return "\n".join(found).encode()


def raw_redis(server: RedisServer, url: str) -> bytes:
    """Return all keys of the prefix, and their values."""
    reads = {
        b"string": ("GET",), b"hash": ("HGETALL",), b"list": ("LRANGE", 0, -1), b"set": ("SMEMBERS",),
        b"zset": ("ZRANGE", 0, -1), b"stream": ("XRANGE", "-", "+"),
    }  # fmt: skip
    found, prefix = list[bytes](), url.partition("prefix=")[2]
    with server.link() as link:
        for key in link.ask("KEYS", f"*{prefix}*"):
            command, *rest = reads[link.ask("TYPE", key)]
            found += [key, repr(link.ask(command, key, *rest)).encode()]
    return b"\n".join(found)
