"""The messages of the stores, of turns and their settings, and of plans: one shape, the value, and the fix."""

# mypy: disable-error-code="arg-type, call-arg, list-item, dict-item"

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core.persistence import (
    Conversation,
    ConversationMessage,
    Embedding,
    Fact,
    InMemoryAuditStore,
    InMemoryConversationStore,
    InMemoryKnowledgeStore,
    InMemoryMemoryStore,
    InMemoryTaskStore,
    PerformanceMetric,
    PersistenceConfig,
    PersistenceManager,
    Task,
    TaskList,
)
from agent_runtime_core.planning import LLMPlanner, Plan, PlanningAgent, PlanStep, RuleBasedPlanner, StepKind, resolve
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.turns import ConfigLoader, TurnManager
from agent_runtime_core.turns.events import EventEnvelope, StepResultChunk, TurnEvent
from agent_runtime_core.turns.hooks import Hooks
from agent_runtime_core.turns.personality import PackSet, PersonalityInstance, PersonalityPackManager
from agent_runtime_core.turns.settings import Subscribers
from tests.support.cases import for_each
from tests.support.messages import VALUE_ERRORS, Triggered, error_of, literal_messages, problems_of

ONE, TWO = UUID(int=1), UUID(int=2)


class Planner:
    async def create_plan(self, prompt: str, tools: object) -> object:
        return {"steps": []}


def user(text: str, number: int = 1) -> ConversationMessage:
    return ConversationMessage(id=UUID(int=number), role="user", content=text)


async def in_conversation(call: Callable[[InMemoryConversationStore], Any]) -> None:
    """Await what `call(store)` returns, on a store with the conversation ONE of one message."""
    store = InMemoryConversationStore()
    await store.save(Conversation(id=ONE, messages=[user("hello")]))
    await call(store)


async def with_claim(call: Callable[[InMemoryTaskStore, Task], Any]) -> None:
    """Await what `call(store, task)` returns; the worker w1 has claimed the task."""
    store = InMemoryTaskStore()
    await store.save(Task(id=ONE, name="index"))
    claimed = await store.claim("w1")
    assert claimed is not None
    await call(store, claimed)


async def with_manager(call: Callable[[TurnManager], Any], **options: Any) -> None:
    """Await what `call(manager)` returns."""
    async with AgentRunner.open("memory://") as runner:
        await call(TurnManager(runner, **options))


def config(text: str, **files: str) -> Callable[[], object]:
    """Return a function that loads a config.toml with this text; `files` has the pack.toml of each personality."""

    def load() -> object:
        for name, content in files.items():
            Path("packs", name).mkdir(parents=True)
            Path("packs", name, "pack.toml").write_text(content)
        Path("config.toml").write_text(text)
        return ConfigLoader(environ={})

    return load


def pack(text: str) -> Callable[[], object]:
    return config("[personality]\nfolder = 'packs'\n", helper=text)


def step(number: int = 1, **fields: Any) -> PlanStep:
    return PlanStep(number, "say", **fields)


STORES = [
    Triggered(
        lambda: PersistenceConfig.of(memory_stor=1),
        "PersistenceConfig: unknown setting 'memory_stor'. Did you mean 'memory_store'?",
    ),
    Triggered(
        lambda: PersistenceManager({"memory": 1}),
        "config must be a PersistenceConfig, got {'memory': 1}. Use PersistenceConfig.of(**settings) or "
        "PersistenceManager.open(path_or_url)",
    ),
    Triggered(lambda: InMemoryMemoryStore().get(""), "key must be a non-empty string, got ''."),
    Triggered(
        lambda: InMemoryMemoryStore().get("a", "team"),
        "scope must be Scope.GLOBAL, Scope.PROJECT or Scope.SESSION, got 'team'.",
    ),
    Triggered(lambda: InMemoryMemoryStore().list_keys(prefix=3), "prefix must be a string or None, got 3."),
    Triggered(
        lambda: InMemoryConversationStore().save({"id": 1}), "conversation must be a Conversation, got {'id': 1}."
    ),
    Triggered(lambda: InMemoryConversationStore().get("one"), "the id of a conversation must be a UUID, got 'one'."),
    Triggered(
        lambda: InMemoryConversationStore().list_conversations(limit=-1),
        "limit must be an integer of at least 0, got -1.",
    ),
    Triggered(
        lambda: InMemoryConversationStore().list_conversations(offset=None),
        "offset must be an integer of at least 0, got None.",
    ),
    Triggered(
        lambda: InMemoryConversationStore().save(Conversation(id=ONE, messages=[user("a"), user("b")])),
        "the message ids of conversation 00000000-0000-0000-0000-000000000001 must be unique, got "
        "00000000-0000-0000-0000-000000000001 twice.",
    ),
    Triggered(
        lambda: InMemoryConversationStore().append(ONE, ["hello"]),
        "a message must be a ConversationMessage, got 'hello'.",
    ),
    Triggered(
        lambda: InMemoryConversationStore().get_messages(ONE, before="2026"), "before must be a datetime, got '2026'."
    ),
    Triggered(lambda: InMemoryConversationStore().search(3), "query must be a string, got 3."),
    Triggered(
        lambda: in_conversation(lambda store: store.edit_message(ONE, ONE, "b", rol="user")),
        "unknown message field 'rol'. Known: id, metadata, model, timestamp, tool_call_id and 2 more.",
    ),
    Triggered(
        lambda: in_conversation(lambda store: store.regenerate(ONE, ONE, "b")),
        "message 00000000-0000-0000-0000-000000000001 must have the role 'assistant', got 'user'. Use "
        "edit_message to replace it.",
    ),
    Triggered(
        lambda: in_conversation(lambda store: store.edit_message(ONE, TWO, "b")),
        "message 00000000-0000-0000-0000-000000000002 not found in this conversation. Use the id of one of "
        "its messages.",
        about=str(TWO),
        fix="Use the id of",
    ),
    Triggered(
        lambda: InMemoryConversationStore().append(ONE, []),
        "conversation 00000000-0000-0000-0000-000000000001 not found in this scope. Save it first.",
        about=str(ONE),
        fix="Save it first",
    ),
    Triggered(
        lambda: in_conversation(lambda store: store.history(ONE, branch_id=TWO)),
        "branch 00000000-0000-0000-0000-000000000002 not found in this conversation. Use None for the main line.",
        about=str(TWO),
        fix="Use None for",
    ),
    Triggered(lambda: InMemoryTaskStore().save("index"), "task_list must be a TaskList or a Task, got 'index'."),
    Triggered(lambda: InMemoryTaskStore().save(Task(name=3)), "the name of a task must be a string, got 3."),
    Triggered(
        lambda: InMemoryTaskStore().save(Task(name="index", state="donne")),
        "state must be a TaskState, got 'donne'. Known: cancelled, complete, in_progress, not_started.",
    ),
    Triggered(
        lambda: InMemoryTaskStore().save(Task(name="index", priority="high")),
        "task 'index': priority must be a number, got 'high'.",
    ),
    Triggered(
        lambda: InMemoryTaskStore().save(Task(name="index", due_at="tomorrow")),
        "task 'index': due_at must be a datetime, got 'tomorrow'.",
    ),
    Triggered(
        lambda: InMemoryTaskStore().save(Task(name="index", dependencies=["a"])),
        "task 'index': its id and its dependencies must be UUIDs, got 'a'.",
    ),
    Triggered(
        lambda: InMemoryTaskStore().save(Task(id=ONE, name="index", dependencies=[ONE])),
        "task dependencies must not form a cycle, got index -> index. Remove one of them.",
    ),
    Triggered(
        lambda: InMemoryTaskStore().save(TaskList(name="todo", tasks=[Task(id=ONE, name="a")] * 2)),
        "the task ids of list 'todo' must be unique, got 00000000-0000-0000-0000-000000000001 twice.",
    ),
    Triggered(lambda: InMemoryTaskStore().claim(""), "worker must be a non-empty string, got ''."),
    Triggered(
        lambda: InMemoryTaskStore().claim("w1", lease_seconds=-1),
        "lease_seconds must be a number of seconds above 0, got -1.",
    ),
    Triggered(
        lambda: InMemoryTaskStore().update(ONE, stat="complete"), "unknown task field 'stat'. Did you mean 'state'?"
    ),
    Triggered(
        lambda: InMemoryTaskStore().update(ONE, name="b"),
        "task 00000000-0000-0000-0000-000000000001 not found in this scope. Save it first.",
        about=str(ONE),
        fix="Save it first",
    ),
    Triggered(
        lambda: with_claim(lambda store, task: store.complete(ONE, "w2")),
        "worker 'w2' has no claim on task 'index' (00000000-0000-0000-0000-000000000001): 'w1' has claimed "
        "it, with attempt 1. Nothing was written. Stop working on it, or claim a task again.",
        about=str(ONE),
        fix="claim a task",
    ),
    Triggered(
        lambda: with_claim(lambda store, task: store.checkpoint(task, data=[1])), "data must be a dict, got [1]."
    ),
    Triggered(
        lambda: InMemoryKnowledgeStore().save_fact(Fact(key="a", value=1, fact_type="contxt")),
        "fact_type must be a FactType, got 'contxt'. Did you mean 'context'?",
    ),
    Triggered(
        lambda: InMemoryKnowledgeStore().save_fact(Fact(key="", value=1)), "key must be a non-empty string, got ''."
    ),
    Triggered(lambda: InMemoryKnowledgeStore().save_fact("a"), "fact must be a Fact, got 'a'."),
    Triggered(
        lambda: InMemoryKnowledgeStore().save_embedding(Embedding(id=ONE, vector=[0.0, 0.0], content="a")),
        "the vector of embedding 00000000-0000-0000-0000-000000000001 must have a component other than 0, got 2 zeros.",
    ),
    Triggered(
        lambda: InMemoryKnowledgeStore().save_embedding(Embedding(id=ONE, vector="ab", content="a")),
        "the vector of embedding 00000000-0000-0000-0000-000000000001 must be a sequence of numbers, got "
        "'ab': cannot use a str to initialize an array with typecode 'd'.",
    ),
    Triggered(
        lambda: InMemoryKnowledgeStore().save_embedding(Embedding(id=ONE, vector=[1.0], content="a", dimensions=2)),
        "dimensions of embedding 00000000-0000-0000-0000-000000000001 must be 0 or 1, the length of its vector, got 2.",
    ),
    Triggered(
        lambda: InMemoryKnowledgeStore().search_similar([1.0, float("nan")]),
        "every component of query_vector must be a finite number, got nan at index 1.",
    ),
    Triggered(
        lambda: InMemoryAuditStore().prune(),
        "prune() must have a limit, got none, and this store has neither max_age nor max_entries. Pass "
        "older_than=seconds or keep=count.",
    ),
    Triggered(
        lambda: InMemoryAuditStore().get_events(event_types="run"),
        "event_types must be a list of AuditEventType or None, got 'run'.",
    ),
    Triggered(
        lambda: InMemoryAuditStore().record_metric(PerformanceMetric(name="ms", value=float("inf"))),
        "the value of metric 'ms' must be a finite number, got inf.",
    ),
    Triggered(lambda: InMemoryAuditStore(max_age=-1), "max_age must be a number of seconds of at least 0, got -1."),
]

TURNS = [
    Triggered(
        lambda: with_manager(lambda turns: turns.start_turn({"text": ""})),
        "text must not be empty, got ''. Pass the message of the user.",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.start_turn({"text": 3})),
        "text must be a string or a list of parts, got 3.",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.start_turn("hi", nope=1)),
        "start_turn(): unknown option 'nope'. Known: concurrency_key, concurrency_limit, "
        "connection, deadline, delay and 10 more.",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.start_turn("hi", priorty=1)),
        "start_turn(): unknown option 'priorty'. Did you mean 'priority'?",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.start_turn(17)),
        "turn must be a TurnEvent, its dict or a string, got 17.",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.start_turn({"text": "hi", "messages": []})),
        "text must not be combined with messages, got 'hi'. Pass one of the two.",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.start_turn({"text": "hi", "turn_id": ""})),
        "turn_id must be a string of 1 to 200 printable characters, got ''.",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.start_turn({"text": "hi", "personality": "helpr"})),
        "personality: unknown personality 'helpr'. Known: default.",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.handle_step_result_event(3)),
        "envelope must be an EventEnvelope from a topic, got 3.",
    ),
    Triggered(lambda: with_manager(None, hooks=3), "hooks must be a list of objects, got 3. Pass [hook]"),
    Triggered(
        lambda: with_manager(None, planner=Planner),
        "a planner must be an instance with create_plan, got the class Planner. Pass Planner()",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.topics.trim()),
        "trim() must have either before or keep, got before=None and keep=None. Pass one of the two.",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.topics.trim(before="today")),
        "before must be an aware datetime, or seconds since 1970, got 'today'. Use datetime.now(UTC) - timedelta(…)",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.topics.offset("agent.turn", "a")),
        "unknown topic 'agent.turn'. Did you mean 'agent.turns'?",
    ),
    Triggered(
        lambda: with_manager(lambda turns: turns.topics.publish({"topic": "agent.turns"})),
        "envelope must be an EventEnvelope, got {'topic': 'agent.turns'}. Create it with envelope()",
    ),
    Triggered(lambda: TurnEvent.from_dict({"text": "hi"}), "text: unknown field 'text'. Did you mean 'tenant'?"),
    Triggered(
        lambda: TurnEvent.from_dict({}), "messages must be set, got no value. Add it to the payload of turn.requested."
    ),
    Triggered(
        lambda: TurnEvent.from_dict("hi"), "payload must be an object with the fields of turn.requested, got 'hi'."
    ),
    Triggered(
        lambda: TurnEvent(messages=[]),
        'messages must have at least one message, got []. Pass [{"role": "user", "content": "…"}]',
    ),
    Triggered(lambda: TurnEvent(messages="hi"), "messages must be list, got 'hi'"),
    Triggered(
        lambda: TurnEvent(messages=[{"role": "boss", "content": "hi"}]),
        "messages[0].role must be one of system, user, assistant, tool, developer, got 'boss'.",
    ),
    Triggered(
        lambda: TurnEvent(messages=[{"role": "user", "content": " "}]),
        "messages[0].content must not be empty, got ' '. Pass the message of the user.",
    ),
    Triggered(
        lambda: TurnEvent(messages=[{"role": "assistant", "content": "hi"}]),
        "messages must not end with a message of the assistant, got {'role': 'assistant', 'content': 'hi'}. "
        "Add the message that the turn answers.",
    ),
    Triggered(
        lambda: StepResultChunk(step_number=1, metrics={"tokens": "3"}), "metrics.tokens must be a number, got '3'."
    ),
    Triggered(lambda: EventEnvelope.from_dict({"version": 2}), "version must be 1, got 2. Upgrade agent-runtime-core."),
    Triggered(
        lambda: EventEnvelope.from_dict({"topic": "agent.turn"}),
        "topic must be one of agent.turns, agent.steps, agent.step_results, agent.audit, got 'agent.turn'.",
    ),
    Triggered(lambda: Hooks([object()]), "a hook must have a method such as on_turn_start or on_error, got an object."),
    Triggered(lambda: Subscribers[int]().add(3), "a subscriber must be a function, got 3."),
]

SETTINGS = [
    Triggered(lambda: ConfigLoader(3), "path must be the path of a file, or None for no file, got 3."),
    Triggered(
        config("[runtime]\nmax_retries = 'x'\n"),
        "config.toml: [runtime] max_retries must be an integer of at least 1, where 1 means no retry, got 'x'.",
    ),
    Triggered(
        config("[runtime]\nmax_retrys = 3\n"),
        "config.toml: [runtime]: unknown setting 'max_retrys'. Did you mean 'max_retries'?",
    ),
    Triggered(config("[runtme]\n"), "config.toml: unknown section 'runtme'. Did you mean 'runtime'?"),
    Triggered(
        config("max_retries = 3\n"),
        "config.toml: max_retries must be in [runtime], got it above all sections. Move it there.",
    ),
    Triggered(
        config("[turns]\nmax_in_flight = 0\n"),
        "config.toml: [turns] max_in_flight must be an integer of at least 1, got 0.",
    ),
    Triggered(
        config("[providers.openai]\nkey = 'sk-1'\n"),
        "config.toml: [providers.openai]: unknown setting 'key'. Did you mean 'api_key'?",
    ),
    Triggered(
        config("[providers.openai]\napi_key = 7\n"),
        "config.toml: [providers.openai] api_key must be a non-empty string, got '***'.",
    ),
    Triggered(
        config("[runtime]\nmax_unsent_bytes = 1\n[turns]\nmax_unsent_bytes = 1\n"),
        "config.toml: [turns] max_unsent_bytes must be set once, got it in [runtime] too. Remove one.",
    ),
    Triggered(
        config("[runtime\n"),
        "config.toml must be valid TOML, got an error: Expected ']' at the end of a table declaration (at "
        "line 1, column 9).",
    ),
    Triggered(config("[personality]\ndefault = 'helpr'\n"), "unknown default personality 'helpr'. Known: default."),
    Triggered(
        config("[personality]\nfolder = 'packs'\n", a="name = 'a'\n", b="name = 'b'\n"),
        "exactly one personality must have default = true, got none of a, b. Add it to one.",
    ),
    Triggered(pack(""), "helper/pack.toml: name must be set, got no name. Add name = 'helper'"),
    Triggered(
        pack("name = 'other'\n"),
        "helper/pack.toml: name must be the name of its folder 'helper', got 'other'. Rename one of the two.",
    ),
    Triggered(
        pack("name = 'helper'\n[memory]\nhistory_tokens = 0\n"),
        "helper/pack.toml: [memory] history_tokens must be an integer of at least 1, got 0.",
    ),
    Triggered(
        pack("name = 'helper'\n[limits]\nmax_turn = 1\n"),
        "helper/pack.toml: [limits]: unknown limit 'max_turn'. Did you mean 'max_turns'?",
    ),
    Triggered(
        pack("name = 'helper'\nsystem = 'system.md'\n"),
        "helper/system.md not found. Create it.",
        about="helper/system.md",
        fix="Create it",
    ),
    Triggered(lambda: PersonalityPackManager(3), "folder must be the path of a folder, or None, got 3."),
    Triggered(lambda: PackSet.of(None).get("helpr"), "unknown personality 'helpr'. Known: default."),
    Triggered(
        lambda: PersonalityInstance(name="helper").prompt("greeting"),
        "personality 'helper': unknown prompt 'greeting'. Known: system.",
    ),
    Triggered(
        lambda: PersonalityInstance(name="helper", system_prompt="Dear {{name}}").prompt(),
        "values must have a value for {{name}} of the prompt, got no values. Pass values={'name': …}",
    ),
    Triggered(
        lambda: PersonalityInstance(name="a", system_prompt="{{name}}").prompt(values={"name": []}),
        "the value of {{name}} must be a string or a number, got [].",
    ),
]

PLANS = [
    Triggered(
        lambda: PlanStep(1, kind="llm"), "step 1: kind must be one of llm_call, tool_call, memory_op, got 'llm'."
    ),
    Triggered(lambda: PlanStep.from_dict({"step_number": "1"}), "step_number must be an integer, got '1'."),
    Triggered(lambda: Plan.from_dict({"steps": 3}), "the steps of a plan must be a list of objects, got 3."),
    Triggered(
        lambda: Plan([step(depends_on=[2]), step(2, depends_on=[1])]).order(),
        "steps must not wait for each other, got 1 -> 2 -> 1. Remove one dependency.",
    ),
    Triggered(
        lambda: Plan([step()]).validate(["says"]),
        "the plan is invalid: step 1: unknown tool 'say'. Did you mean 'says'?",
    ),
    Triggered(
        lambda: Plan([step(), step()]).validate(["say"]),
        "the plan is invalid: step numbers must be unique, got 1 twice.",
    ),
    Triggered(
        lambda: Plan([step(depends_on=[7])]).validate(["say"]),
        "the plan is invalid: step 1: depends_on must name steps of the plan, got 7.",
    ),
    Triggered(
        lambda: Plan([PlanStep(1, kind=StepKind.LLM_CALL)]).validate([]),
        "the plan is invalid: step 1: the tool_input of an llm_call must have a prompt or messages, got neither.",
    ),
    Triggered(lambda: Plan([]).validate([]), "the plan is invalid: steps must have at least one step, got []"),
    Triggered(
        lambda: resolve({"a": "{{step_2.result}}"}, {1: "x"}),
        "'{{step_2.result}}' must refer to a step with a result, got step 2. Steps with a result: 1.",
    ),
    Triggered(
        lambda: resolve({"a": "{{step_1.result.nam}}"}, {1: {"name": "x"}}),
        "'{{step_1.result.nam}}': unknown field 'nam'. Did you mean 'name'?",
    ),
    Triggered(
        lambda: RuleBasedPlanner().rule("(", print),
        "pattern must be a regular expression, got '(': missing ), unterminated subpattern at position 0.",
    ),
    Triggered(lambda: RuleBasedPlanner().rule("a", None), "make must be a function of the match, got None."),
    Triggered(
        lambda: RuleBasedPlanner().create_plan("x" * 2001, []),
        "the prompt must have at most 2,000 characters, got 2,001.",
    ),
    Triggered(
        lambda: RuleBasedPlanner().create_plan("add 2 and 3", []),
        "\"add 2 and 3\": unknown tool 'calculator'. None exist. Register it.",
    ),
    Triggered(
        lambda: RuleBasedPlanner().create_plan("tell a joke", []),
        'no plan for \'tell a joke\'. This planner understands sums ("add 2 and 3, then multiply by 4", "what '
        'is (3+4)*2?") and to-dos ("remind me to call Bob", "list my to-dos", "mark buy milk as done", '
        "\"delete to-do 3\"), joined by 'then', 'and' or a full stop.",
        about="'tell a joke'",
        fix="understands",
    ),
    Triggered(
        lambda: LLMPlanner(MockLLMClient()).create_plan("", []),
        "the prompt must not be empty, got ''. Pass the request to plan for.",
    ),
    Triggered(
        lambda: LLMPlanner(MockLLMClient(), max_repairs=1).create_plan("go", []),
        "the model returned no valid plan after 2 attempts: invalid JSON: Expecting value: line 1 column 1 (char 0)",
        about="the model",
        fix="after 2 attempts",
    ),
    Triggered(
        lambda: PlanningAgent(planner=Planner),
        "a planner must be an instance with create_plan, got the class Planner. Pass Planner()",
    ),
    Triggered(lambda: PlanningAgent(tools=3), "tools must be a ToolRegistry or a list of tools, got 3."),
]


@for_each("row", [*STORES, *TURNS, *SETTINGS, *PLANS], ids=lambda row: row.message[:60])
async def test_a_message_has_the_shape(row: Triggered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = await error_of(row)
    assert (str(error), problems_of(row)) == (row.message, [])


def test_every_other_message_says_how_to_fix_it() -> None:
    # Python versions differ in the quotes that ast.unparse writes.
    passed_on = ("{called} {error}", "step {number}: {error.path.removeprefix(")
    packages, kinds = {"persistence", "planning", "turns"}, {*VALUE_ERRORS, "NotSupported"}
    found = {message for _, message in literal_messages(packages.__contains__, kinds)}
    assert all(any(each.startswith(start) for each in found) for start in passed_on)
    fix = re.compile(r"\. (Add|Call|Create|Move|Pass|Remove|Run|Save|Set|Use) .*$")
    assert {each for each in found if not each.startswith(passed_on) and fix.search(each) is None} == set()
