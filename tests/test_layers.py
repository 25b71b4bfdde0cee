"""Imports run in one direction, name module files, and stand at the top of their module.

Two tables say which way: `LAYERS` for the top of the package, `ROWS` for the modules inside each package. Imports for
type checkers count, and so do modules and folders that are named in strings. A reader therefore never has to follow a
circle. Three more tables hold the size: `BUDGET`, `PRIVATE` and the limits of a module.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cases import for_each
from tests.support.sources import TOGETHER, nodes, parsed

pytestmark = TOGETHER

ROOT = "agent_runtime_core"
REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / ROOT

# Bottom first. A unit is a top-level module, or a package with all in it. It imports only units of rows before its own.
LAYERS: list[str] = [
    "errors",
    "_core status",
    "_engines tools config encryption limits portal retry schema",
    "_journal engines interfaces queue",
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
        "lazy_exports payload_codec pydantic_types",
        "clock context_vars event_types former_names per_loop threads typed_steps validation",
        "lazy_import",
        "codec ids json_schema run_tasks settings",
        "arguments log",
        "redaction timeouts",
    ],
    "_core.codec": ["tagged type_hints", "json", "json_slices models", "typed"],
    "_engines": [
        "base notifier os_errors outages",
        "commit_request memory shared_engine",
        "payloads threaded",
        "sqlite",
        "backend",
        "postgres redis",
    ],
    "_engines.sqlite": [
        "live_directory transaction",
        "liveness readers user_transaction",
        "database group_commit",
        "writer",
        "engine",
        "read_only",
    ],
    "_engines.postgres": [
        "schema url",
        "connection",
        "migration notifier safety_checks user_transaction",
        "engine",
        "caller diagnosis",
    ],
    "_engines.redis": ["script url", "connection safety_checks", "notifier pipeline", "engine"],
    "queue": [
        "contents",
        "records windows",
        "pools rate_limits",
        "blocking_claims live_claims payload_fields transitions",
        "base",
        "redis_find sqlite_find",
        "sqlite_search",
        "memory postgres_batches postgres_caller postgres_search redis sqlite",
        "postgres",
    ],
    "events": ["event", "subscriptions", "base", "memory redis sqlite", "postgres"],
    "state": ["base", "memory postgres_batches redis sqlite", "postgres"],
    "_journal": ["record", "memory postgres redis sqlite"],
    "persistence": [
        "fencing models vectors",
        "chat_format documents message_tree",
        "base model_codec stored_history",
        "document_stores",
        "backends",
        "carry_over manager",
    ],
    "persistence.documents": [
        "file_directory sqlite_fts",
        "base",
        "file_format operations redis sqlite_tables",
        "file_index memory postgres",
        "file_transaction sqlite",
        "file_database",
        "files",
    ],
    "persistence.document_stores": ["base", "audit task_collection", "knowledge", "conversations", "tasks"],
    "llm": [
        "_finish_reasons",
        "_client_per_loop _openai_usage _prices _provider _schemas _stream_body",
        "_openai_format _provider_errors _retries",
        "_anthropic_format _fallbacks _openai_stream",
        "_anthropic_response _client",
        "openai",
        "anthropic litellm",
    ],
    "tools": [
        "annotations arguments confirmation names retries",
        "schema structured_output",
        "tool",
        "base",
        "calculator results todo",
        "registry",
        "invocation",
    ],
    "_execution": [
        "run_writer step",
        "loop_messages result_codec step_failure usage",
        "claim_writer journal_view run_control sync_context",
        "pools step_keys",
        "step_journal",
        "checkpoint_writer effects mailbox",
        "parking step_runner",
        "context_steps waits",
        "context",
        "recorded_calls",
    ],
    "runner": [
        "backends backpressure conversation_history pools run_watcher schedules settings signals",
        "approvals completion_hooks finding forking heartbeat processes retention",
        "search_index",
        "cancellation claim erasure outcomes run_recorder",
        "guarded_calls left_runs run_client run_tracing",
        "run_conversation",
        "execution",
        "worker",
        "runner",
        "open_run reencryption resume_check tenants verification",
        "moving",
    ],
    "steps": ["model", "graph step_list", "sequence worker_pool", "graph_run", "executor"],
    "loop": ["answers model_settings state", "session", "model_calls prepared_calls", "tool_calls", "turn_loop"],
    "integrations": [
        "_chat _langgraph_saver _mcp_http _mcp_tasks _openai_responses _steps iggy mcp",
        "_langgraph_model _langgraph_tools _openai_scope _pydantic_ai_steps mcp_server",
        "_openai_durable _openai_session langgraph pydantic_ai",
        "openai_agents",
    ],
    "planning": ["memory_operations recorded_client references", "plan", "executor llm_planner rule_planner", "agent"],
    "turns": [
        "events hooks personality turn",
        "context_manager event_topics planner",
        "processor settings",
        "services",
        "provider_steps",
        "turn_run",
        "manager",
    ],
    "testing": [
        "clock crash_points models plugin tools",
        "cassettes context contracts simulated_process",
        "crash_test recordings",
    ],
    "server": [
        "errors settings token_file",
        "documents limits",
        "access",
        "state",
        "connections open_streams reads security service submission",
        "runs serving socket streams",
        "actions schedules",
        "app",
    ],
    "_views": [
        "plain problems",
        "attempts events journal overview page queries reasons",
        "compare messages plan runs",
        "dashboard export schedules timeline visibility",
        "read_routes",
    ],
    "inspector": ["local_server script_bundle", "", "export"],
    "cli": [
        "app_loader arguments output store",
        "consent help",
        "backup check conformance control doctor erase index inspect migrate parser reencrypt runs schedules submit "
        "tenants worker",
        "completion main serve",
    ],
}

#: Most code lines of each package, without docstrings, comments and blank lines. A move that makes a package smaller
#: lowers its number. A number is raised only with a line in docs/decisions.
BUDGET: dict[str, int] = {
    "testing": 9656,
    "runner": 8484,
    "_execution": 6273,
    "persistence": 5901,
    "llm": 3961,
    "_engines": 6138,
    "_core": 3334,
    "turns": 2993,
    "server": 3119,
    "cli": 3423,
    "integrations": 3048,
    "queue": 4540,
    "_views": 2776,
    "tools": 2244,
    "loop": 1733,
    "planning": 1556,
    "tracing": 1415,
    "steps": 1150,
    "events": 1078,
    "inspector": 676,
    "_journal": 908,
    "state": 691,
    "limits": 458,
    "errors": 312,
    "config": 281,
    "interfaces": 262,
    "orchestrator": 233,
    "portal": 206,
    "__init__": 180,
    "agents": 128,
    "encryption": 90,
    "registry": 131,
    "status": 68,
    "retry": 44,
    "__main__": 8,
    "schema": 3,
    "engines": 16,
}
SPARE = 25  # lines that a package may have less than its number
LONGEST_MODULE, LONGEST_FUNCTION = 700, 60  # lines, without docstrings
SHORTEST_MODULE = 40  # code lines of a module with a single user
#: Functions that are longer, with their lines: mostly signatures. A number is never raised.
LONG_FUNCTIONS = {"openai_fallbacks": 63, "run_turn_loop": 76, "execute_plan": 72, "execute_distributed": 70}

#: Most private modules of other packages that these packages import. Less is better: they are to use promised names.
PRIVATE: dict[str, int] = {"server": 20, "inspector": 18, "integrations": 17, "cli": 17, "turns": 20, "planning": 15}

#: What a module loads when it is first used, although its package is not above the other package.
AGAINST = {
    "config": "_engines",  # only if contents are redacted or encrypted
    "tools.todo": "persistence",  # only if the tool is used without stores
}

#: Modules and packages that may import a package by its public names.
MAY_IMPORT_PACKAGES = {"__init__", "testing", "agents", "runner.backends"}
LOADER = "_core.lazy_import"
#: What the packages of an extra import as they are: other code loads them by name.
OF_EXTRAS = {
    "integrations": {
        "agents",
        "anyio",
        "httpx2",
        "langchain_core",
        "langgraph",
        "mcp",
        "mcp_types",
        "openai",
        "pydantic",
        "pydantic_ai",
        "starlette",
    },
    "server": {"fastapi", "pydantic", "pydantic_core", "starlette", "uvicorn", "websockets"},
}

#: What the adapters of other people may import. Each is a promised package.
FOR_ADAPTERS = {"queue", "events", "state", "engines", "errors", "persistence", "testing", "llm", "interfaces"}


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
    tree = parsed(text)
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
    top = module.split(".")[0]
    for line, unit in _named_in_strings(tree, module, modules):
        if unit != AGAINST.get(module) and top not in {"__init__", unit}:
            found += [(line, f"in a string: {problem}") for problem in _compared(top, unit, LEVEL)]
    return found


def _named_in_strings(tree: ast.Module, module: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the unit of each module, as the loader gets it, and of each folder that a string names."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if folder := re.fullmatch(r"([a-z_]+)/[\w./]*", node.value):
            if f"{folder[1]}.__init__" in modules:
                yield node.lineno, folder[1]
        elif loaded := re.fullmatch(rf"(\.+|{ROOT}\.)([a-z_][\w.]*)(:\w+)?", node.value):
            depth = len(loaded[1]) if loaded[1].startswith(".") else len(module.split("."))
            inside = ".".join([*module.split(".")[: len(module.split(".")) - depth], loaded[2]])
            if {inside, f"{inside}.__init__"} & modules:
                yield node.lineno, inside.split(".")[0]


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
        found = [node for node in nodes(text) if isinstance(node, ast.Import | ast.ImportFrom)]
        if module.endswith("__init__"):
            found = [node for node in found if node not in _top_level(parsed(text))[1]]
        targets = {target.removeprefix(f"{ROOT}.") for node in found for target in _targets(node, module, modules)}
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


def docstring_lines(text: str) -> set[int]:
    """Return the numbers of the lines of docstrings, also of attributes."""
    prose: set[int] = set()
    for node in nodes(text):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return prose


@functools.cache
def code_lines(text: str) -> int:
    """Return how many lines have code, without docstrings, comments and blank lines."""
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in empty
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstring_lines(text))


def importers(files: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that import each module, also only for type checkers."""
    modules = {path.removesuffix(".py").replace("/", ".") for path in files}
    found: dict[str, set[str]] = {module: set() for module in modules}
    for path, text in files.items():
        module = path.removesuffix(".py").replace("/", ".")
        for node in nodes(text):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for target in _targets(node, module, modules):
                    found.get(target.removeprefix(f"{ROOT}."), set()).add(module)
    return found


def test_no_package_grows_past_its_budget() -> None:
    sizes = Counter[str]()
    for path, text in sources().items():
        sizes[path.split("/")[0].removesuffix(".py")] += code_lines(text)
    assert sizes.keys() == BUDGET.keys()
    too_large = {unit: size for unit, size in sizes.items() if size > BUDGET[unit]}
    assert not too_large, f"{too_large}: make it smaller, or raise its number in BUDGET and say why in docs/decisions"
    smaller = {unit: size for unit, size in sizes.items() if size < BUDGET[unit] - SPARE}
    assert not smaller, f"{smaller}: lower the number in BUDGET"


def test_few_private_modules_are_used_by_other_packages() -> None:
    used: dict[str, set[str]] = {package: set() for package in PRIVATE}
    for module, users in importers(sources()).items():
        unit = module.split(".")[0]
        if any(part.startswith("_") and not part.startswith("__") for part in module.split(".")):
            for user in {user.split(".")[0] for user in users} & used.keys() - {unit}:
                used[user].add(module)
    assert {package: len(modules) for package, modules in used.items()} == PRIVATE


def test_modules_and_functions_have_a_size_that_one_can_read() -> None:
    files, found = sources(), []
    users = importers(files)
    for path, text in sorted(files.items()):
        module = path.removesuffix(".py").replace("/", ".")
        if (lines := text.count("\n") - len(docstring_lines(text))) > LONGEST_MODULE:
            found.append(f"{path}: {lines} lines")
        # What only an `__init__` imports has public names.
        only = next(iter(users[module])) if len(users[module]) == 1 else "__init__"
        if not {module.split(".")[-1], only.split(".")[-1]} & {"__init__"} and code_lines(text) < SHORTEST_MODULE:
            found.append(f"{path}: {code_lines(text)} code lines, only for {only}")
        for node in nodes(text):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = node.body[0] if ast.get_docstring(node) else None
                lines = (node.end_lineno or 0) - node.lineno + 1
                lines -= (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
                if lines > LONG_FUNCTIONS.get(node.name, LONGEST_FUNCTION):
                    found.append(f"{path}: {node.name}() has {lines} lines")
    assert found == []


def test_the_top_of_the_package_is_what_users_are_promised() -> None:
    there = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | {path.stem for path in SOURCE.glob("*.py")}
    public = {name for name in there if not name.startswith("_")} - {"cli"}
    page = (REPOSITORY / "docs/reference/api/names.md").read_text("utf-8")
    listed = set(re.findall(r"^## ([a-z_]+)$", page, re.MULTILINE)) - {ROOT}
    assert public == listed
    assert len(there) <= 37


def test_adapters_of_other_people_import_promised_packages_only() -> None:
    theirs = sorted((REPOSITORY / "tests/contract/third_party").glob("*.py"))
    assert theirs
    for path in theirs:
        for node in nodes(path.read_text("utf-8")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == ROOT:
                assert (node.module or "").split(".")[1] in FOR_ADAPTERS, f"{path.name}: {node.module}"


@for_each(
    ("path", "text", "problem"),
    [
        ("errors.py", "from ._core.clock import Clock", "'errors' imports '_core', which is above it"),
        ("status.py", "from .retry import Backoff", "'status' imports 'retry', which is above it"),
        ("tools/tool.py", "from ..interfaces import RunContext", "'tools' imports 'interfaces', which is above it"),
        ("queue/base.py", "from ..interfaces import RunContext", "'queue' imports 'interfaces', which is in"),
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
        ("queue/base.py", "FOLDER = 'testing/static'", "in a string: 'queue' imports 'testing', which is above it"),
        (
            "errors.py",
            "load('.queue', package='agent_runtime_core')",
            "in a string: 'errors' imports 'queue', which is above it",
        ),
        ("errors.py", "load('agent_runtime_core.queue')", "in a string: 'errors' imports 'queue', which is above it"),
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
