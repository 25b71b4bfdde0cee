"""Calls and imports the library does without: unsafe ones, blind ones, and clocks or chance outside the clock."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.cases import for_each
from tests.support.sources import TOGETHER, nodes, parsed

pytestmark = TOGETHER

SOURCE = Path(__file__).parents[1] / "src" / "agent_runtime_core"

MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "unittest", "random"}
BUILTINS = {"eval", "exec", "print", "__import__"}
ATTRIBUTES = {
    "asyncio.wait_for": "use asyncio.timeout and check .expired()",
    "unittest.mock": "a fake stands at the seam",
    "time.time": "ask a Clock",
    "time.time_ns": "ask a Clock",
    "datetime.now": "ask a Clock",
    "datetime.utcnow": "ask a Clock",
    "datetime.today": "ask a Clock",
    "uuid.uuid1": "ask a Clock",
    "uuid.uuid4": "ask a Clock",
    "os.urandom": "ask a Clock",
}
METHODS = {"run_until_complete": "use the portal"}
EXECUTES = {"execute", "executemany", "executescript"}
CLOCK_FILE = "_core/clock.py"


def banned(text: str) -> list[str]:
    """What `text` uses and should not, each with its line."""
    tree = parsed(text)
    # A module is executed once, with no text of a user: its constants, and those that it imports from our modules.
    constants = {each.asname or each.name for node in tree.body for each in _imported(node)}
    for name, value in _assignments(tree.body):
        if value is not None and (_is_named_constant(name) or _is_constant(value, constants)):
            constants.add(name)
    built: set[str] = set()
    for name, value in _assignments(ast.walk(tree)):
        if value is None or (name not in constants and _is_built(value, constants, built)):
            built.add(name)
    return [f"{line}: {problem}" for node in ast.walk(tree) for line, problem in _problems(node, constants, built)]


def _imported(node: ast.stmt) -> list[ast.alias]:
    if isinstance(node, ast.ImportFrom) and node.level:
        return [each for each in node.names if _is_named_constant(each.name)]
    return []


def _is_named_constant(name: str) -> bool:
    return name.isupper()


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr | None]]:
    """Names with the value they get; None for one that is added to."""
    for node in nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                yield name, value
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add() | ast.Mod()):
                yield name, None


def _problems(node: ast.AST, constants: set[str], built: set[str]) -> list[tuple[int, str]]:
    match node:
        case ast.Import(names=names):
            return [(node.lineno, each.name) for each in names if each.name.split(".")[0] in MODULES]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            if module.split(".")[0] in MODULES:
                return [(node.lineno, module)]
            imported = [f"{module}.{each.name}" for each in names]
            return [(node.lineno, f"{each}: {ATTRIBUTES[each]}") for each in imported if each in ATTRIBUTES]
        case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
            return [(node.lineno, f"{name}()")]
        case ast.Call(func=ast.Attribute(attr=method), args=[sql, *_]) if method in EXECUTES:
            unsafe = _is_built(sql, constants, built) and not _is_pragma(sql)
            return [(node.lineno, f"SQL built from strings in .{method}()")] if unsafe else []
        case ast.Attribute(attr=method) if method in METHODS:
            return [(node.lineno, f"{method}: {METHODS[method]}")]
        case ast.Attribute(value=owner, attr=name):
            used = f"{ast.unparse(owner).split('.')[-1]}.{name}"
            return [(node.lineno, f"{used}: {ATTRIBUTES[used]}")] if used in ATTRIBUTES else []
    return []


def _is_built(node: ast.expr, constants: set[str], built: set[str]) -> bool:
    """Whether this text is put together at run time; joined constants are one constant."""
    match node:
        case ast.JoinedStr() | ast.BinOp(op=ast.Add() | ast.Mod()):
            return not _is_constant(node, constants)
        case ast.Call(func=ast.Attribute(value=ast.Constant() | ast.Name(), attr="format" | "join" | "replace")):
            return True
        case ast.IfExp(body=body, orelse=orelse):
            return _is_built(body, constants, built) or _is_built(orelse, constants, built)
        case ast.Name(id=name):
            return name in built
    return False


def _is_constant(node: ast.expr, constants: set[str]) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.Name(id=name):
            return name in constants
        case ast.JoinedStr(values=values):
            return all(_is_constant(each, constants) for each in values)
        case ast.FormattedValue(value=value):
            return _is_constant(value, constants)
        case ast.BinOp(left=left, right=right):
            return _is_constant(left, constants) and _is_constant(right, constants)
    return False


def _is_pragma(node: ast.expr) -> bool:
    """SQLite takes no parameters in a PRAGMA."""
    match node:
        case ast.JoinedStr(values=[ast.Constant(value=str(start)), *_]):
            return start.startswith("PRAGMA ")
    return False


def test_the_library_uses_nothing_banned() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{problem}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).as_posix() != CLOCK_FILE
        for problem in banned(path.read_text("utf-8"))
    ]
    assert found == []


@for_each(
    "text",
    [
        "import pickle",
        "import marshal as m",
        "from shelve import open",
        "from yaml import load",
        "import unittest.mock",
        "from unittest import mock",
        "from random import choice",
        "eval('1')",
        "exec('1')",
        "print('x')",
        "asyncio.wait_for(x, 1)",
        "from asyncio import wait_for",
        "loop.run_until_complete(x)",
        "time.time()",
        "datetime.now(UTC)",
        "datetime.datetime.utcnow()",
        "uuid.uuid4()",
        "from uuid import UUID, uuid4",
        "db.execute(f'SELECT * FROM {table}')",
        "db.execute('SELECT * FROM %s' % table)",
        "db.execute('SELECT * FROM {}'.format(table))",
        "db.executemany('DELETE FROM ' + table, rows)",
        "db.executescript('A' + 'B' + table)",
        "sql = f'SELECT {x}'\ndb.execute(sql)",
        "def f(db, table):\n    sql = f'SELECT {table}'\n    db.execute(sql)",
        "sql = 'SELECT 1'\nsql += where\ndb.execute(sql)",
        "db.execute('A' if x else f'{y}')",
        "db.execute('SELECT ' + ','.join(columns))",
    ],
)
def test_a_banned_use_is_found(text: str) -> None:
    assert len(banned(text)) == 1, banned(text)


@for_each(
    "text",
    [
        "db.execute('SELECT ?', (1,))",
        "db.execute('SELECT ' + '1')",
        "db.execute(SQL)",
        "db.execute(f'SELECT 1')",
        "db.execute(f'PRAGMA busy_timeout={n}')",
        "C = 'a, b'\nS = f'SELECT {C} ' + 'FROM t'\ndef f(db):\n    db.execute(S)\n    db.execute(S + ' LIMIT 1')",
        "ctx.uuid4()\nctx.random()\nctx.now()",
        "clock.wall()",
        "asyncio.timeout(1)",
        "from uuid import UUID",
        "regex.exec('x')",
    ],
)
def test_what_is_allowed_passes(text: str) -> None:
    assert banned(text) == []


REFUSALS = {"InvalidArgument", "InvalidTurn", "BadArguments", "UnknownSetting"}


def told_in_full(text: str) -> list[str]:
    """Parameters of a function that its refusals show by `!r`: a repr may be endless, or not to be had."""
    found = []
    for fn in nodes(text):
        if not isinstance(fn, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        given = {each.arg for each in ast.walk(fn.args) if isinstance(each, ast.arg)} - {"self", "cls"}
        for call in ast.walk(fn):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in REFUSALS:
                shown = [
                    each for each in ast.walk(call) if isinstance(each, ast.FormattedValue) and each.conversion == 114
                ]
                found += [
                    f"{call.lineno}: {ast.unparse(each.value)}" for each in shown if ast.unparse(each.value) in given
                ]
    return found


def test_a_refusal_shows_what_it_refuses_by_brief() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert [f"{path.relative_to(SOURCE)}:{each}" for path in files for each in told_in_full(path.read_text())] == []


def test_a_refusal_that_shows_all_is_found() -> None:
    assert told_in_full("def f(x):\n    raise InvalidArgument(f'not {x!r:.80}')") == ["2: x"]
    assert told_in_full("def f(x):\n    raise InvalidArgument(f'not {brief(x)}')") == []


#: Who opens files by their path, and how often. None of them is a SQLite database, nor the index of its log: to close
#: any descriptor of one drops all locks that SQLite has on it in this process. The log itself is never locked.
OPENS: dict[str, dict[str, int]] = {
    # Files of its own in the directory `.live`.
    "_engines/sqlite/live_directory.py": {"_open": 1},
    "runner/backends.py": {"open_installed": 1},  # `open` of the object of another package
    "_engines/redis/script.py": {"joined": 1, "lua_source": 1},  # scripts of ours
    # The file exclusively: a file that is there is not opened. The table of mounts.
    "_engines/sqlite/database.py": {"DatabaseFile._create": 1, "_is_mounted": 1},
    # A file that no process has open, or of which another user's process has the only readable index.
    "_engines/sqlite/read_only.py": {"import shutil": 1, "import tempfile": 1, "_fixed_parts": 1},
    "_engines/sqlite/writer.py": {"WriteAheadLog._extend": 1},  # the log
    "_views/page.py": {"_collect": 1},  # files of the page
    "cli/backup.py": {"_new_file": 1, "_flush": 1},  # created exclusively; flushed before it is opened
    "cli/main.py": {"main": 2},  # the null device
    "cli/doctor.py": {"file_system_of": 1},  # the table of mounts
    "cli/inspect.py": {"_opened": 1},  # `export` refuses the database of its own store
    "cli/conformance.py": {"import tempfile": 1, "_installed": 1},  # directories for the backends of others
    "persistence/documents/file_directory.py": {
        "DurableDirectory.draft": 2,
        "DurableDirectory.read": 2,
        "_flush": 1,  # JSON files, by their names
        "_acquire": 1,
        "_open_or_create": 2,  # a lock file
    },
    # Created exclusively; `serve` refuses the database of its own store.
    "server/token_file.py": {"TokenFile._read": 1, "_create": 2},
    "testing/cassettes.py": {"Cassette.load": 1, "Cassette.save": 1},
    "turns/personality.py": {"_read": 2},  # settings and packs
}
#: Whole modules that open what they are given.
OPENERS = {
    "bz2", "codecs", "dbm", "filecmp", "fileinput", "gzip", "linecache", "lzma", "mmap", "shutil", "tarfile",
    "tempfile", "tokenize", "zipfile",
}  # fmt: skip
OPENING = {"os": {"open", "fdopen", "popen", "truncate", "posix_spawn"}, "io": {"open", "open_code", "FileIO"}}
#: Whose `open` is one of ours: classes, and objects of them.
OURS = re.compile(r"(^|\.)([A-Z]\w*|cls|self|writer|manager|super\(\))$")
PATHS = {"read_bytes", "read_text", "write_bytes", "write_text"}


def opening(text: str) -> Counter[str]:
    """Where `text` opens files by their path, or has at hand what does: functions and imports."""
    return Counter(_opening(parsed(text), ""))


def _opening(node: ast.AST, inside: str) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            inside = f"{inside}.{name}".strip(".")
        case ast.Import(names=names):
            yield from (f"import {each.name}" for each in names if each.name.split(".")[0] in OPENERS)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            known = OPENING.get(module, set())
            yield from (f"from {module} import {e.name}" for e in names if e.name in known or module in OPENERS)
        case ast.Name(id="open" | "open_code" | "FileIO", ctx=ast.Load()):
            yield inside
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if name in OPENING.get(owner, ()):
            yield inside
        case ast.Attribute(attr=name) if name in PATHS:
            yield inside
        case ast.Attribute(value=owner, attr="open") if not OURS.search(ast.unparse(owner)):
            yield inside
    for each in ast.iter_child_nodes(node):
        yield from _opening(each, inside)


def test_files_are_opened_only_where_none_can_be_a_database() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): dict(opened)
        for path in sorted(SOURCE.rglob("*.py"))
        if (opened := opening(path.read_text("utf-8")))
    }
    assert found == OPENS


@for_each(
    "text",
    [
        "open(db)",
        "io.open(db)",
        "os.open(db, os.O_RDONLY)",
        "os.close(os.open(db, 0))",
        "Path(db).read_bytes()",
        "self.path.read_text()",
        "Path(db).open('rb')",
        "path.open()",
        "map(open, paths)",
        "loop.run_in_executor(None, open, db)",
        "read = os.open",
        "from os import open",
        "from io import FileIO",
        "import shutil",
        "from shutil import copy",
        "import mmap as m",
        "os.truncate(db, 0)",
    ],
)
def test_what_opens_a_file_is_found(text: str) -> None:
    assert opening(text).total() == 1, opening(text)
    inside = "\n    ".join(["class C:", f"    def f(self): {text}"])
    assert set(opening(inside)) <= {"C.f", text.replace(" as m", "")}


@pytest.mark.parametrize(
    "text",
    [
        "SQLiteEngine.open(db)",
        "cls.open(db)",
        "self.writer.open()",
        "sqlite3.connect(db)",
        "os.stat(db)",
        "os.close(fd)",
    ],
)
def test_what_opens_no_file_passes(text: str) -> None:
    assert not opening(text)
