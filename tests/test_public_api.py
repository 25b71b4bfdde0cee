"""Every public name is there, documented, in order, and where users import it from."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import agent_runtime_core

ROOT = agent_runtime_core.__name__

# Where existing code and the README import each name from.
VOCABULARY = (
    "AgentRuntime RunContext RunResult Message Tool ToolDefinition ToolRegistry EventType ErrorInfo LLMClient "
    "LLMResponse LLMStreamChunk TraceSink"
)
WHERE = {
    "": f"__version__ {VOCABULARY} RuntimeConfig configure get_config register_runtime get_runtime list_runtimes "
    "unregister_runtime clear_registry AgentRunner RunnerConfig RunContextImpl Step StepExecutor StepResult StepStatus "
    "ExecutionState StepExecutionError StepCancelledError MockRunContext create_test_context run_agent_test "
    "RunStatus RunInfo open_run open_run_sync AgentRuntimeError LeaseLost RunBusy ToolCallingAgent RunLimits tool "
    "run_turn_loop TurnState CancellationToken agent_tool MockLLMClient MockLLMResponse LLMEvaluator MockTool "
    "MemoryStore ConversationStore TaskStore PreferencesStore Scope Conversation ConversationMessage ToolCall "
    "ToolResult TaskList Task TaskState FileMemoryStore FileConversationStore FileTaskStore FilePreferencesStore "
    "PersistenceManager PersistenceConfig get_persistence_manager configure_persistence",
    ".persistence": "MemoryStore ConversationStore TaskStore PreferencesStore KnowledgeStore AuditStore Scope "
    "TaskState FactType AuditEventType ErrorSeverity Conversation ConversationMessage ToolCall "
    "ToolResult TaskList Task Fact Summary Embedding AuditEntry ErrorRecord PerformanceMetric "
    "FileMemoryStore FileConversationStore FileTaskStore FilePreferencesStore PersistenceManager "
    "PersistenceConfig get_persistence_manager configure_persistence",
    ".interfaces": VOCABULARY,
    ".queue": "InMemoryQueue SQLiteQueue get_queue RunQueue QueuedRun",
    ".events": "InMemoryEventBus SQLiteEventBus get_event_bus EventBus Event",
    ".state": "InMemoryStateStore SQLiteStateStore get_state_store StateStore",
    ".config": "RuntimeConfig configure get_config reset_config",
    ".registry": "register_runtime get_runtime list_runtimes unregister_runtime clear_registry",
    ".runner": "AgentRunner RunnerConfig RunInfo open_run open_run_sync",
    ".steps": "Step StepExecutor StepResult StepStatus ExecutionState StepExecutionError StepCancelledError",
    ".testing": "MockRunContext create_test_context run_agent_test MockLLMClient MockLLMResponse LLMEvaluator MockTool "
    "ReplayLLMClient RecordingLLMClient Cassette CassetteMiss crash_everywhere",
    ".tools": "Tool ToolDefinition ToolRegistry tool BaseTool ToolResult CalculatorTool TodoStoreTool",
    ".llm": "get_llm_client use_llm_client LLMClient LLMResponse LLMStreamChunk OpenAIConfigurationError "
    "AnthropicConfigurationError OpenAIClient AnthropicClient LiteLLMClient Timeouts Retries",
    ".tracing": "NoopTraceSink get_trace_sink LangfuseTraceSink",
    ".loop": "run_turn_loop TurnState CancellationToken LoopResult Hooks agent_tool",
    ".limits": "RunLimits",
    ".agents": "ToolCallingAgent",
    ".inspector": "run_html",
    ".turns": "AuditEvent ConfigChanged ConfigLoader ContextManager EventEnvelope EventPublisherSubscriber InvalidTurn "
    "PlanExecutor PlanRequest Remembered StepEvent StepKind StepMetrics StepProcessor StepResultChunk StepState "
    "TopicStats Turn TurnEvent TurnManager MemorySettings PackSet PersonalityInstance PersonalityPackManager "
    "PersonalitySettings ProviderSettings Sampling Settings TurnSettings",
    ".planning": "BasePlanner LLMPlanner Plan PlanResult PlanStep PlanningAgent PlanningError RuleBasedPlanner "
    "StepKind built_in_tools execute_plan memory_operations resolve",
    ".orchestrator": "Orchestrator OrchestratorSettings RunCreate RunResponse RunStatus",
}
if find_spec("fastapi"):
    WHERE[".server"] = "Caller ServerSettings Tokens create_app"
# Names that mean something else there, as the README and existing code have it.
TWINS = {(".orchestrator", "RunStatus"), (".tools", "ToolResult"), (".persistence", "Message")}


#: Modules that import the packages of an extra as they are.
NEED_EXTRAS = {
    rf"{ROOT}\.(server(\..*)?|cli\.serve)": "fastapi",
    rf"{ROOT}\.integrations\..*langgraph.*": "langgraph",
    rf"{ROOT}\.integrations\..*mcp.*": "mcp",
    rf"{ROOT}\.integrations\..*openai.*": "agents",
    rf"{ROOT}\.integrations\..*pydantic_ai.*": "pydantic_ai",
}


def _can_be_imported(name: str) -> bool:
    return all(find_spec(package) for modules, package in NEED_EXTRAS.items() if re.fullmatch(modules, name))


def _public_modules() -> Iterator[str]:
    yield ROOT
    for found in pkgutil.walk_packages(agent_runtime_core.__path__, f"{ROOT}."):
        if not any(part.startswith("_") for part in found.name.split(".")) and (_can_be_imported(found.name)):
            yield found.name


MODULES = sorted(_public_modules())


def _exports(name: str) -> tuple[ModuleType, list[str]]:
    module = importlib.import_module(name)
    return module, list(getattr(module, "__all__", ()))


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as the linter sorts them."""
    rank = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return rank, name


def test_every_export_is_there_documented_and_in_order() -> None:
    wrong: list[str] = []
    for name in MODULES:
        module, exports = _exports(name)
        wrong += [] if module.__doc__ else [f"{name} has no docstring"]
        wrong += [] if exports == sorted(set(exports), key=_order) else [f"{name}: exports are not in order"]
        for each in exports:
            value = getattr(module, each, None)
            if not hasattr(module, each):
                wrong.append(f"{name}.{each} does not exist")
            elif (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__:
                wrong.append(f"{name}.{each} has no docstring")
    assert wrong == []


def test_a_package_says_what_it_exports() -> None:
    packages = [ROOT, *(f"{ROOT}{module}" for module in WHERE if module)]
    found = [(name, *_exports(name)) for name in packages]
    wrong = [
        name
        for name, module, exports in found
        if hasattr(module, "__path__") and not (exports and set(exports) <= set(dir(module)))
    ]
    assert wrong == []


def test_the_names_import_from_where_users_look() -> None:
    places = [(f"{ROOT}{module}", name) for module, names in WHERE.items() for name in names.split()]
    assert [f"{module}.{name}" for module, name in places if not hasattr(importlib.import_module(module), name)] == []


def test_one_name_is_one_thing_everywhere() -> None:
    seen: dict[str, object] = {}
    for module, names in WHERE.items():
        for name in names.split():
            value = getattr(importlib.import_module(f"{ROOT}{module}"), name)
            same = seen.setdefault(name, value) is value
            assert same is ((module, name) not in TWINS), name
    assert agent_runtime_core.ToolDefinition is agent_runtime_core.Tool


def test_the_whole_error_tree_is_at_the_top() -> None:
    errors = importlib.import_module(f"{ROOT}.errors")
    tree = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, agent_runtime_core.AgentRuntimeError)
    }
    assert tree <= set(_exports(ROOT)[1])
    assert all(name in (errors.__doc__ or "") for name in tree)


def _said_to_checkers(module: ModuleType) -> Iterator[str]:
    """What a module binds at its top or under an `if` there, without running it."""
    for node in ast.parse(Path(module.__file__ or "").read_text()).body:
        for each in node.body if isinstance(node, ast.If) else [node]:
            if isinstance(each, ast.Import | ast.ImportFrom):
                yield from (alias.asname or alias.name for alias in each.names)
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield each.name
            elif isinstance(each, ast.Assign | ast.AnnAssign):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_a_type_checker_is_told_of_every_export() -> None:
    untold = {}
    for name in MODULES:
        module, exports = _exports(name)
        if missing := set(exports) - set(_said_to_checkers(module)):
            untold[name] = missing
    assert untold == {}


def _lists_of_names(tree: ast.Module) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """The module of each name of a lazy package: for type checkers, and in the table of `lazy_exports`."""
    for block in tree.body:
        if not isinstance(block, ast.If) or ast.unparse(block.test) != "TYPE_CHECKING" or not block.orelse:
            continue
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        tables = [node for each in block.orelse for node in ast.walk(each) if isinstance(node, ast.Dict)]
        for table in tables[:1]:  # another one contains former names
            yield (
                {each.name: "." * node.level + (node.module or "") for node in imports for each in node.names},
                {name: module for module, names in ast.literal_eval(table).items() for name in names.split()},
            )


def test_what_is_loaded_lazily_is_what_type_checkers_import() -> None:
    lists = {
        name: found
        for name in MODULES
        for found in _lists_of_names(ast.parse(Path(importlib.import_module(name).__file__ or "").read_text("utf-8")))
    }
    assert {ROOT, f"{ROOT}.persistence", f"{ROOT}.queue", f"{ROOT}.runner"} <= lists.keys()
    assert [(name, *pair) for name, pair in lists.items() if pair[0] != pair[1]] == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for name in ["TurnManagers", "_hidden"]:
        assert name not in dir(agent_runtime_core)
        with pytest.raises(AttributeError, match=f"module 'agent_runtime_core' has no attribute '{name}'"):
            getattr(agent_runtime_core, name)


def test_the_version_is_the_installed_one() -> None:
    assert importlib.import_module("importlib.metadata").version("agent-runtime-core") == agent_runtime_core.__version__


@pytest.mark.parametrize(
    "name",
    ["queue.RunQueue", "queue.RunTransitions", "events.EventBus", "state.StateStore", "persistence.DocumentStore"],
)
def test_a_docstring_for_authors_of_backends_names_what_they_can_import(name: str) -> None:
    module = importlib.import_module(f"{ROOT}.{name.partition('.')[0]}")
    backend = getattr(module, name.partition(".")[2])
    texts = [backend.__doc__, *(each.__doc__ or "" for each in vars(backend).values())]
    named = {each for text in texts for each in re.findall(r"`(\w+)\(|\b([A-Z]+_[A-Z_]+)\b", text)}
    others = {"wake", "get", "find", "words", "keys", "count", "aclose"}  # arguments, and what `read` is asked for
    known = {*module.__all__, *dir(backend), *dir(builtins), *others}
    assert {one or other for one, other in named} - known == set()
