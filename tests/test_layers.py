"""Imports run in one direction, name module files, and stand at the top of their module.

Two tables say which way: `LAYERS` for the top of the package, `ROWS` for the modules inside each package. Imports for
type checkers count. A reader therefore never has to follow a circle.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.support.cases import for_each

ROOT = "agent_runtime_core"
REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / ROOT

# Bottom first. A unit is a top-level module, or a package with all in it. It imports only units of rows before its own.
LAYERS: list[str] = [
    "errors",
    "_core status",
    "encryption",
    "_engines tools config limits portal retry schema",
    "_journal interfaces queue",
    "events state persistence llm tracing registry",
    "_execution",
    "runner steps loop",
    "agents planning testing",
    "_views orchestrator turns",
    "inspector integrations server",
    "cli",
    "__main__ __init__",
]

# The same for the modules of a package, by their names below it. A subpackage is one unit here.
ROWS: dict[str, list[str]] = {
    "_core": [
        "encrypted_text payload_codec pydantic_types slices",
        "clock context_vars current_step event_types former_names per_loop threads trace_sink typed_steps validation",
        "chat_messages lazy_import schema_references",
        "installed_schemes",
        "codec ids json_schema run_tasks settings",
        "arguments log traceparent",
        "redaction timeouts",
    ],
    "_core.codec": [
        "tagged type_hints",
        "json",
        "json_slices models plain",
        "typed",
    ],
    "_engines": [
        "base notifier os_errors",
        "commit_request memory reading_codec shared_engine",
        "payloads",
        "read_only",
        "sqlite",
        "backend",
        "redis",
    ],
    "_engines.sqlite": [
        "file_copy live_directory transaction wal",
        "liveness one_name reader_files readers user_transaction",
        "database group_commit notifier",
        "writer",
        "engine",
        "read_only",
    ],
    "_engines.redis": [
        "script url",
        "connection safety_checks",
        "notifier pipeline subscription",
        "engine",
    ],
    "queue": [
        "records",
        "blocking_claims delayed_runs live_claims payload_fields queued_run redacted_mail transitions",
        "base",
        "redis_find sqlite_find",
        "memory redis sqlite",
    ],
    "events": [
        "event",
        "subscriptions",
        "base",
        "memory redis sqlite",
    ],
    "state": [
        "rows",
        "payload_fields",
        "base",
        "memory redis sqlite",
    ],
    "_journal": [
        "record",
        "payload_fields",
        "memory redis sqlite",
    ],
    "persistence": [
        "fencing models vectors",
        "chat_format documents message_tree model_codec task_order vector_index",
        "base jsonl legacy_files stored_history",
        "document_stores open_documents",
        "backends legacy_models",
        "carry_over manager",
    ],
    "persistence.documents": [
        "file_directory file_lock file_names full_text rows sqlite_fts",
        "payload_fields",
        "base",
        "file_format operations redis sqlite_tables",
        "file_index memory sqlite_queries",
        "file_transaction sqlite",
        "file_database",
        "files",
    ],
    "persistence.document_stores": [
        "arguments base change_log ranks ready_tasks three_way_merge",
        "audit conversation_save embeddings memory preferences task_collection task_validation",
        "knowledge recent_histories task_claims",
        "conversations",
        "tasks",
    ],
    "llm": [
        "_anthropic_content _api_keys _circuit_breaker _client_per_loop "
        "_error_messages _error_text _finish_reasons _openai_usage _prices _provider _schemas _stream_body "
        "_tool_images",
        "_anthropic_options _anthropic_turns _openai_errors _openai_format _property_names _retries _trace_header",
        "_anthropic_errors _anthropic_format _message_order _openai_stream _recording",
        "_anthropic_response _fallbacks",
        "_anthropic_stream _client",
        "openai",
        "anthropic litellm",
    ],
    "tools": [
        "annotation_metadata arguments confirmation docstrings expression json_in_text names parts retries",
        "annotations",
        "schema structured_output",
        "tool",
        "base",
        "calculator results todo",
        "registry",
        "invocation",
    ],
    "_execution": [
        "result_codec reviews run_writer step_policy step_scope stored_errors write_buffer",
        "agent_thread event_publisher fence_check loop_messages read_only_writer record_factory redacted_values "
        "run_control step_failure step_function",
        "list_states step_keys usage",
        "claim_writer journal_view sync_context",
        "lineage_keys unconfirmed_writes",
        "step_journal",
        "charging checkpoint_writer effects",
        "mailbox step_runner tracing",
        "context_steps inbox parking",
        "waits",
        "context",
        "recorded_calls",
    ],
    "runner": [
        "installed_stores kept_turns",
        "backends backpressure concurrency conversation_history run_watcher settings signals",
        "approvals arguments audit_log completion_hooks crash_suspects forking heartbeat processes results retention",
        "cancellation claim lifespans outcomes run_recorder",
        "guarded_calls run_client run_tracing unread_messages",
        "run_conversation",
        "execution",
        "inline_runs worker",
        "runner",
        "open_run reencryption resume_check tenants",
    ],
    "steps": [
        "model",
        "checkpoint_only graph step_list",
        "sequence worker_pool",
        "graph_run map_run",
        "executor",
    ],
    "loop": [
        "answers model_settings received state trimming",
        "session",
        "model_calls prepared_calls",
        "tool_calls",
        "turn_loop",
    ],
    "integrations": [
        "_langgraph_saver _mcp_content _mcp_questions _mcp_results _openai_responses _steps",
        "_openai_scope",
        "_langgraph_model _mcp_tasks _openai_durable _openai_session _pydantic_ai_steps mcp",
        "iggy langgraph mcp_server openai_agents pydantic_ai",
    ],
    "planning": [
        "memory_operations number_words recorded_client references",
        "arithmetic_requests plan todo_requests",
        "base",
        "executor llm_planner rule_planner",
        "agent",
        "progress",
    ],
    "turns": [
        "change_listeners events logs personality_instance redacted_payloads settings_files step_semaphore turn",
        "context_manager event_topics hooks pack_reader planner",
        "personality processor",
        "settings",
        "config_loader services",
        "provider_steps",
        "distributed_steps turn_records",
        "turn_run",
        "agent",
        "manager",
    ],
    "testing": [
        "clock crash_points models plugin run_comparison tools",
        "cassettes context contracts simulated_process",
        "crash_test recordings",
    ],
    "server": [
        "settings token_file",
        "errors",
        "documents limits models pending reply",
        "access",
        "state",
        "connections health listing open_streams security submission waiting",
        "frames runs session",
        "actions metrics overview page socket streams",
        "app serving",
    ],
    "_views": [
        "about cursors hosts page plain problems wire",
        "attempts events invalidated journal list_query planned results waits",
        "messages steps",
        "agents compare plan queue runs timeline usage",
        "export",
    ],
    "inspector": [
        "query_parameters redaction script_words",
        "exported_data local_routes script_bundle",
        "html_file local_server",
        "export",
    ],
    "cli": [
        "app_loader durations findings output",
        "arguments database_file metrics store",
        "conformance dead_letters doctor export inspect parser reencrypt runs submit tenants worker",
        "check completion control events serve",
        "main",
    ],
}

#: Modules and packages that may import a package by its public names.
MAY_IMPORT_PACKAGES = {"__init__", "testing", "agents", "runner.backends"}
LOADER = "_core.lazy_import"
#: What the packages of an extra import as they are: other code loads them by name.
OF_EXTRAS = {
    "integrations": {
        "agents",
        "anyio",
        "langchain_core",
        "langgraph",
        "mcp",
        "mcp_types",
        "openai",
        "pydantic",
        "pydantic_ai",
    },
    "server": {"fastapi", "pydantic", "pydantic_core", "starlette", "uvicorn", "websockets"},
}

#: What the adapters of other people may import. Each is a promised package.
FOR_ADAPTERS = {"queue", "events", "state", "errors", "persistence", "testing", "llm", "interfaces"}


def order(rows: list[str]) -> dict[str, int]:
    return {unit: level for level, units in enumerate(rows) for unit in units.split()}


LEVEL = order(LAYERS)
LEVELS = {package: order(rows) for package, rows in ROWS.items()}


def violations(files: dict[str, str]) -> list[str]:
    """Return what breaks the rules in `files`, source text by path relative to the package."""
    modules = {path.removesuffix(".py").replace("/", ".") for path in files}
    return [
        f"{path}:{line}: {problem}"
        for path, text in sorted(files.items())
        for line, problem in _violations_of(path, text, modules)
    ]


def _violations_of(path: str, text: str, modules: set[str]) -> list[tuple[int, str]]:
    module = path.removesuffix(".py").replace("/", ".")
    if module.split(".")[0] not in LEVEL:
        return [(1, f"{module.split('.')[0]!r} is in no layer")]
    found = []
    for package, levels in LEVELS.items():
        if module.startswith(f"{package}.") and _unit(module, package) not in {*levels, "__init__"}:
            found.append((1, f"{_unit(module, package)!r} is in no row of {package!r}"))
    tree = ast.parse(text)
    at_top, for_types = _top_level(tree)
    lazy_init = module.split(".")[-1] == "__init__"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if node not in at_top and module != LOADER:
            found.append((node.lineno, "import inside a function"))
        for target in _targets(node, module, modules):
            top, _, inside = target.partition(".")
            if top != ROOT:
                known = {*sys.stdlib_module_names, *OF_EXTRAS.get(module.split(".")[0], ())}
                if node not in for_types and top not in known:
                    found.append((node.lineno, f"third party package {top!r} is not loaded through {LOADER}"))
            elif not (lazy_init and node in for_types):
                found += [(node.lineno, problem) for problem in _problems(inside, module)]
    return found


def _top_level(tree: ast.Module) -> tuple[set[ast.stmt], set[ast.stmt]]:
    """Return the statements that the import runs, and those of them that only a type checker reads."""
    at_top: set[ast.stmt] = set()
    for_types: set[ast.stmt] = set()

    def visit(body: list[ast.stmt], typing_only: bool) -> None:
        for node in body:
            at_top.add(node)
            if typing_only:
                for_types.add(node)
            if isinstance(node, ast.If):
                visit(node.body, typing_only or "TYPE_CHECKING" in ast.unparse(node.test))
                visit(node.orelse, typing_only)
            elif isinstance(node, ast.Try):
                visit([*node.body, *node.orelse, *node.finalbody], typing_only)
                for handler in node.handlers:
                    visit(handler.body, typing_only)

    visit(tree.body, False)
    return at_top, for_types


def _targets(node: ast.Import | ast.ImportFrom, module: str, modules: set[str]) -> list[str]:
    """Return absolute dotted names of what is imported; a package itself ends in `.__init__`."""
    if isinstance(node, ast.Import):
        return [_file(alias.name, modules) for alias in node.names]
    base = (node.module or "").split(".") if node.module else []
    if node.level:
        here = [ROOT, *module.split(".")]
        base = here[: len(here) - node.level] + base
    dotted = ".".join(base)
    inside = f"{dotted}.".removeprefix(f"{ROOT}.").removesuffix(".")
    if dotted == ROOT or f"{inside}.__init__" in modules:
        # `from ._engines import memory` names a module file, `from .queue import RunQueue` a package.
        prefix = "" if dotted == ROOT else f"{inside}."
        return [
            f"{dotted}.{alias.name}" if f"{prefix}{alias.name}" in modules else f"{dotted}.__init__"
            for alias in node.names
        ]
    return [dotted]


def _file(dotted: str, modules: set[str]) -> str:
    inside = f"{dotted}.".removeprefix(f"{ROOT}.").removesuffix(".")
    return f"{dotted}.__init__" if dotted == ROOT or f"{inside}.__init__" in modules else dotted


def _unit(module: str, package: str) -> str:
    """Return the name of the unit of `package` that `module` is in."""
    return module.removeprefix(f"{package}.").split(".")[0]


def _problems(target: str, module: str) -> list[str]:
    package, _, last = target.rpartition(".")
    if last == "__init__":
        if f"{module}.".startswith(f"{package}." if package else ""):
            return [f"imports its own package {(package or ROOT)!r}: name the module file"]
        if not {module, module.split(".")[0]} & MAY_IMPORT_PACKAGES:
            return [f"imports the package {package!r}: name the module file"]
    mine, other = module.split(".")[0], target.split(".")[0]
    if other not in LEVEL:
        return [f"imports {target!r}, which is in no layer"]
    if mine != other:
        return _compared(mine, other, LEVEL)
    return [
        problem
        for package, levels in LEVELS.items()
        if module.startswith(f"{package}.") and target.startswith(f"{package}.")
        for problem in _compared(_unit(module, package), _unit(target, package), levels)
    ]


def _compared(mine: str, other: str, levels: dict[str, int]) -> list[str]:
    if mine == other or mine not in levels:
        return []
    if other not in levels:
        return [f"imports {other!r}, which is in no row"]
    if levels[other] < levels[mine]:
        return []
    return [
        f"{mine!r} imports {other!r}, which is {'in the same row' if levels[other] == levels[mine] else 'above it'}"
    ]


def sources() -> dict[str, str]:
    return {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}


def test_the_library_keeps_its_layers() -> None:
    files = sources()
    assert "__init__.py" in files
    assert violations(files) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = sources()
    modules = {path.removesuffix(".py").replace("/", ".") for path in files}
    imports: dict[str, set[str]] = {}
    for path, text in files.items():
        module = path.removesuffix(".py").replace("/", ".")
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        if module.endswith("__init__"):
            nodes = [node for node in nodes if node not in _top_level(tree)[1]]
        targets = {target.removeprefix(f"{ROOT}.") for node in nodes for target in _targets(node, module, modules)}
        imports[module] = targets & modules
    while leaves := [module for module, targets in imports.items() if not targets & imports.keys()]:
        for module in leaves:
            del imports[module]
    assert sorted(imports) == []


def test_the_tables_name_only_what_is_there() -> None:
    files = sources()
    modules = {path.removesuffix(".py").replace("/", ".") for path in files}
    assert {unit for unit in LEVEL if not any(f"{module}.".startswith(f"{unit}.") for module in modules)} == set()
    for package, levels in LEVELS.items():
        units = {_unit(module, package) for module in modules if module.startswith(f"{package}.")}
        assert set(levels) - units == set(), package


def test_the_top_of_the_package_is_what_users_are_promised() -> None:
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | {path.stem for path in SOURCE.glob("*.py")}
    public = {name for name in there if not name.startswith("_")} - {"cli"}
    page = (REPOSITORY / "docs/reference/names.md").read_text("utf-8")
    listed = set(re.findall(r"^## ([a-z_]+)$", page, re.MULTILINE)) - {ROOT}
    assert public == listed
    assert len(there) <= 37


def test_adapters_of_other_people_import_promised_packages_only() -> None:
    theirs = sorted((REPOSITORY / "tests/contract/third_party").glob("*.py"))
    assert theirs
    for path in theirs:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == ROOT:
                assert (node.module or "").split(".")[1] in FOR_ADAPTERS, f"{path.name}: {node.module}"


@for_each(
    ("path", "text", "problem"),
    [
        ("errors.py", "from ._core.clock import Clock", "'errors' imports '_core', which is above it"),
        ("status.py", "from .retry import Backoff", "'status' imports 'retry', which is above it"),
        ("tools/tool.py", "from ..interfaces import RunContext", "'tools' imports 'interfaces', which is above it"),
        (
            "queue/base.py",
            "from ..interfaces import RunContext",
            "'queue' imports 'interfaces', which is in",
        ),
        ("queue/base.py", "import agent_runtime_core.events.base", "'queue' imports 'events', which is above it"),
        (
            "_engines/memory.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..queue.base import RunQueue",
            "'_engines' imports 'queue', which is above it",
        ),
        ("queue/base.py", "from .memory import InMemoryQueue", "'base' imports 'memory', which is above it"),
        ("queue/memory.py", "from .sqlite import SQLiteQueue", "'memory' imports 'sqlite', which is in the same row"),
        ("queue/stray.py", "", "'stray' is in no row of 'queue'"),
        ("queue/base.py", "def f():\n    from .records import RunRow", "import inside a function"),
        ("queue/base.py", "class C:\n    import json", "import inside a function"),
        ("status.py", "from agent_runtime_core import Step", "imports its own package 'agent_runtime_core'"),
        ("status.py", "from . import nowhere", "imports its own package 'agent_runtime_core'"),
        ("status.py", "import agent_runtime_core", "imports its own package 'agent_runtime_core'"),
        ("queue/memory.py", "from . import RunQueue", "imports its own package 'queue'"),
        ("queue/memory.py", "from ..queue import RunQueue", "imports its own package 'queue'"),
        ("runner/claim.py", "from ..queue import RunQueue", "imports the package 'queue'"),
        ("status.py", "from .nowhere import x", "which is in no layer"),
        ("stray.py", "", "'stray' is in no layer"),
        ("queue/redis.py", "import redis.asyncio", "third party package 'redis' is not loaded through"),
        ("testing/context.py", "from . import MockRunContext", "imports its own package 'testing'"),
    ],
)
def test_a_violation_is_found(path: str, text: str, problem: str) -> None:
    files = {"__init__.py": "", "queue/__init__.py": "", "testing/__init__.py": "", path: text}
    assert len(found := violations(files)) == 1, found
    assert problem in found[0]
    assert found[0].startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("runner/claim.py", "from ..queue.base import RunQueue\nfrom .._engines import memory\nimport json"),
        ("__init__.py", "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from .queue import RunQueue"),
        ("testing/context.py", "from ..queue import RunQueue"),
        ("queue/memory.py", "from .base import RunQueue"),
        ("queue/redis.py", "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    import redis.asyncio"),
        ("_core/lazy_import.py", "def f():\n    import importlib"),
        ("_core/clock.py", "try:\n    from ..errors import X\nexcept ImportError:\n    import json"),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    files = {
        "__init__.py": "",
        "queue/__init__.py": "",
        "_engines/__init__.py": "",
        "_engines/memory.py": "",
        path: text,
    }
    assert violations(files) == []
