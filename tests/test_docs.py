"""Every code block of the README and the docs runs, as `tests/support/pages.py` describes; every test and every
relative link they name exists.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

import agent_runtime_core
from agent_runtime_core import RunContext, events, queue, runner, state
from agent_runtime_core._core.lazy_import import EXTRAS
from benchmarks import report
from benchmarks.floor import Line
from scripts import evidence, figures
from tests.support.pages import (
    MARK,
    PYTHON,
    ROOT,
    SERVERS,
    DocsError,
    blocks_of,
    compare,
    in_a_file,
    python_blocks,
    run_page,
)
from tests.support.postgres_servers import PostgresServer
from tests.support.processes import until

SKILL = ROOT / "src" / "agent_runtime_core" / "skill.md"
PAGES = [ROOT / "README.md", SKILL, *sorted((ROOT / "docs").rglob("*.md"))]
_OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md")
LINKED = [*PAGES, *(ROOT / name for name in _OTHERS)]
KITS = ROOT / "src" / "agent_runtime_core" / "testing" / "contracts"

# Which test runs which example.
EXAMPLES = {
    "chat.py": "tests/acceptance/test_examples.py",
    "crewai_crew.py": "tests/integrations/test_crewai_example.py",
    "digest.py": "tests/acceptance/test_digest.py",
    "langgraph_agent.py": "tests/integrations/test_langgraph_example.py",
    "langgraph_tools.py": "tests/integrations/test_langgraph_example.py",
    "openai_agents_agent.py": "tests/integrations/test_openai_agents_example.py",
    "mcp_tools.py": "tests/integrations/test_mcp_example.py",
    "pydantic_ai_agent.py": "tests/integrations/test_pydantic_ai_example.py",
    "todo_planner.py": "tests/acceptance/test_todo_planner.py",
    "tools.py": "tests/acceptance/test_examples.py",
}

_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_TEST = re.compile(r"(?P<path>tests/[\w/]+\.py)(?:::(?P<name>\w+))?|::(?P<more>test_\w+)")
_CASE = re.compile(r"tests/contract/test_(?P<kit>\w+)_contract\.py -k (?P<case>\w+)")


def imported_names(text: str) -> list[tuple[str, str]]:
    """(module, name) of what a block imports from this library."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "agent_runtime_core"
        for alias in node.names
    ]


def named_tests(text: str) -> Iterator[tuple[str, str | None]]:
    """(path, function or None) of the tests a text names; `::name` alone is of the path before it."""
    path = ""
    for found in _TEST.finditer(text):
        path = found["path"] or path
        yield path, found["name"] or found["more"]


def missing_tests(text: str, root: Path = ROOT, kits: Path = KITS) -> list[str]:
    """What a page names of the tests and is not there: files, functions in them, cases of a contract."""
    missing = []
    for path, name in named_tests(text):
        if not (root / path).is_file():
            missing.append(path or f"::{name}")
        elif name is not None and name not in _defined(root / path):
            missing.append(f"{path}::{name}")
    known = functools.cache(lambda kit: set[str]().union(*map(_defined, kits.glob(f"{kit}*.py"))))
    missing += [found[0] for found in _CASE.finditer(text) if found["case"] not in known(found["kit"])]
    return missing


@functools.cache
def _defined(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def dead_links(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    dead = []
    for found in _LINK.finditer(_prose(text)):
        target, _, heading = found["target"].partition("#")
        if target.startswith(("https:", "http:", "mailto:")):
            continue
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (heading and heading not in _headings(there.read_text("utf-8"))):
            dead.append(found["target"])
    return dead


def _headings(text: str) -> set[str]:
    """What the headings of a page are called in links to them."""
    titles = re.findall(r"^#+ (.+)$", _prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_page(page.read_text("utf-8"), page.name)


def test_the_pages_are_programs_in_a_file() -> None:
    """A block that the third way of docs/index.md changes may contain nothing that works only in a module."""
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert "inside `async def main():`" in text
    assert "replace `asyncio.run(…)`" in text
    programs = {page: program for page in PAGES if (program := in_a_file(page.read_text("utf-8")))}
    assert len(programs) > 35
    for page, program in programs.items():
        names = [each for each in ast.walk(ast.parse(program)) if isinstance(each, ast.Global)]
        assert names == [], f"{_id(page)}: a global of the page is a local variable in a file"
        compile(program, page.name, "exec", dont_inherit=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", [each for each in PAGES if in_a_file(each.read_text("utf-8"))], ids=_id)
def test_every_page_runs_in_a_file(page: Path, tmp_path: Path) -> None:
    text = page.read_text("utf-8")
    for block in blocks_of(text):
        if block.file:
            (tmp_path / block.file).write_text(block.text, "utf-8")
    (tmp_path / "page.py").write_text(in_a_file(text) or "", "utf-8")
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    printed = {int(line): said for line, _, said in (x.partition("\n") for x in done.stdout.split(f"{MARK} ")[1:])}
    for block in blocks_of(text):
        if block.output is not None:
            compare(block.output, printed[block.line], f"{page.name}, line {block.line}")


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, page: Path) -> Iterator[str]:
    """A new database, as the pages also name it after another scheme and without a schema."""
    name = re.sub(r"\W", "_", page.stem)
    postgres_server.ask(f"CREATE DATABASE {name}")
    yield f"{postgres_server.url.removeprefix('postgresql:').rpartition('/')[0]}/{name}"
    postgres_server.ask(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        pytest.param(kind, page, id=f"{kind}-{_id(page)}", marks=getattr(pytest.mark, kind))
        for kind in SERVERS
        for page in PAGES
        if f"docs: needs {kind}" in page.read_text("utf-8")
    ],
)
def test_every_block_runs_with_a_server(
    kind: str, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run_page(page.read_text("utf-8"), page.name, **{kind: request.getfixturevalue(f"{kind}_url")})


def test_every_name_a_block_imports_exists() -> None:
    blocks = [(page, block) for page in PAGES for block in python_blocks(page.read_text("utf-8"))]
    missing = [
        f"{_id(page)}, line {block.line}: {module} has no {name}"
        for page, block in blocks
        for module, name in imported_names(block.text)
        if not _has(module, name)
    ]
    assert missing == []


def _has(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    # A module in a package is a name of it once somebody has imported it.
    return hasattr(found, name) or (
        hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    )


def test_every_test_a_page_names_exists() -> None:
    missing = []
    for page in LINKED:
        text = page.read_text("utf-8")
        here = {block.file for block in blocks_of(text)} if page in PAGES else set()
        missing += [f"{_id(page)}: {each}" for each in missing_tests(text) if each not in here]
    assert missing == []


def test_the_promises_name_tests() -> None:
    assert evidence.PAGE.read_text("utf-8") == evidence.current(), "run python scripts/evidence.py"
    assert len(list(named_tests(evidence.PAGE.read_text("utf-8")))) > 100


def test_the_figures_of_the_pages_are_from_the_data_file() -> None:
    assert figures.main(["--check"]) == 0, "run python scripts/figures.py"
    measured = re.compile(r"\d ?µs|\d[\d,]* (?:runs|steps|commits|events) (?:per|a) second|\d per second")
    guides = [page for page in PAGES if not {"decisions", "design.md"} & set(page.parts)]
    by_hand = {_id(page): measured.findall(figures.PART.sub("", page.read_text("utf-8"))) for page in guides}
    assert {page: found for page, found in by_hand.items() if found} == {}


def test_the_figures_of_a_run_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    lines = [Line("idle worker", 1234.5, "µs", 617.25, most=1.5), Line("store", 0.1875, "MB", note="a note")]
    report.record(path, "growth", report.machine(), [])
    report.record(path, "run", report.machine(), lines)
    recorded = json.loads(path.read_text("utf-8"))
    assert recorded.keys() == {"run", "growth"}
    assert figures.table(recorded["run"]).splitlines()[1:] == [
        "1 of 1 targets were missed.",
        "",
        "| Row | Result | Baseline | Ratio | Target | |",
        "|---|---|---|---|---|---|",
        "| idle worker | 1,234 µs | 617 | 2.00 | ≤ 1.5 | missed |",
        "| store | 0.188 MB |  |  |  | a note |",
    ]
    assert figures.text("{idle worker}, {idle worker:floor}", recorded["run"]) == "1,234 µs, 617 µs"
    with pytest.raises(KeyError, match="no such row"):
        figures.text("{no such row}", recorded["run"])


FEATURES: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "features.toml").read_text("utf-8"))["feature"]
_WORD = "|".join(re.escape(word) for each in FEATURES for word in each["words"])
_NO = r"\b(?:no|not|none|nothing|cannot)\b"
#: A denial at most four words before a feature, or right after it. Farther words belong to something else.
_DENIAL = re.compile(rf"{_NO}(?: [\w'-]+){{0,4}} (?:{_WORD})\b|\b(?:{_WORD}) (?:is|are|was|were) {_NO}", re.IGNORECASE)
#: Pages that record what was true once, or that only contributors read.
_HISTORY = ("CHANGELOG.md", "docs/decisions/", "docs/design.md", "docs/evidence.md", "docs/migration", "docs/limits.md")


def denials(text: str) -> list[str]:
    """The sentences that join a feature with a denial, in a paragraph, list item or table row without a link."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)", _prose(text)):
        if "limits.md" in block:
            continue
        plain = re.sub(r"`[^`]*`", "x", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split())))
        for sentence in re.split(r"(?<=[.:;!?]) |\*\* | \| ", plain):
            if _DENIAL.search(sentence):
                found.append(sentence)
    return found


def test_no_page_denies_a_feature() -> None:
    """What the library lacks is listed in docs/limits.md. Say it there, and link to it."""
    pages = [*PAGES, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
    found = {_id(page): denials(page.read_text("utf-8")) for page in pages if not _id(page).startswith(_HISTORY)}
    assert {page: each for page, each in found.items() if each} == {}


def test_each_feature_has_a_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert [each["name"] for each in FEATURES if f"({each['page']})" not in index] == []


def test_a_denied_feature_is_found() -> None:
    assert denials("Steps are fast. Nothing here: the library has no web UI.\n") == ["the library has no web UI."]
    assert denials("- MCP is there.\n- It cannot talk to `x` of [MCP](guide/mcp.md)\n") == [
        "- It cannot talk to x of MCP"
    ]
    assert denials("Nothing is encrypted. FastAPI is not supported.") == [
        "Nothing is encrypted.",
        "FastAPI is not supported.",
    ]
    assert denials("There is no web UI: see [limits](limits.md).\n\nA notion of MCP.\n") == []


def test_a_promise_without_a_test_is_missed() -> None:
    page = "# Promises\n\n## Steps\n\n| Promise | Limit |\n|---|---|\n| one `a` | |\n| two | no |\n\n| x | y |\n"
    assert evidence.promises(page) == {"Steps": ["one `a`", "two"]}
    tests = {"one `a`": ["tests/test_a.py::test_b"], "two": ["tests/test_c.py"]}
    written = evidence.rendered({"promises": tests, "long": []}, {"page.md": page})
    assert "\n## Promises\n\n### Steps\n\n- one `a`\n    - `tests/test_a.py::test_b`\n- two\n" in written
    for wrong, problem in ((tests | {"three": ["t"]}, "no row .* three"), (tests | {"two": []}, "no test .* two")):
        with pytest.raises(ValueError, match=problem):
            evidence.rendered({"promises": wrong, "long": []}, {"page.md": page})
    with pytest.raises(ValueError, match="two rows: two"):
        evidence.rendered({"promises": tests, "long": []}, {"page.md": page, "other.md": page})
    suite = {"suite": "s", "version": "1", "date": "d", "passed": 2, "failed": 0, "skipped": 1, "differences": ["x"]}
    written = evidence.rendered({"promises": tests, "long": []}, {"page.md": page}, [suite])
    assert "\n| s | 1 | d | 2 | 0 | 1 |\n" in written
    assert written.endswith("### What differs in s\n\n- x\n")


def test_the_page_of_promises_is_short() -> None:
    """What is below the tables is closed until a reader opens it."""
    page = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    assert len(re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL).encode()) <= 12_500
    assert page.count("<details") == page.count("\n## ")


def test_every_relative_link_leads_somewhere() -> None:
    assert [f"{_id(page)}: {each}" for page in LINKED for each in dead_links(page, page.read_text("utf-8"))] == []


def test_every_page_is_linked_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = _linked(index)
    # The pages of these directories are linked from an index in the directory.
    for directory in ("decisions", "reference/api"):
        inner = index.parent / directory / "index.md"
        assert inner in linked
        linked |= _linked(inner)
    pages = {page for page in PAGES if page.is_relative_to(index.parent) and page != index}
    assert sorted(map(_id, pages - linked)) == []


def _linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = {found["target"].partition("#")[0] for found in _LINK.finditer(page.read_text("utf-8"))}
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


@pytest.mark.parametrize(
    "kind",
    [
        *(
            state.Op,
            state.Guard,
            queue.RunRow,
            queue.RunFilter,
            queue.RunCounts,
            queue.ClaimRequest,
            queue.MailboxMessage,
            queue.RunSnapshot,
        ),
        *(events.StoredEvent, state.Record, state.StateRow, state.EffectRow),
    ],
    ids=lambda kind: kind.__name__,
)
def test_the_fields_of_rows_are_those_of_the_classes(kind: type[Any]) -> None:
    page = (ROOT / "docs" / "reference" / "rows.md").read_text("utf-8")
    section = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    [mine] = [each for each in section if each.startswith(f"{kind.__name__}\n")]
    said = re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", mine, re.MULTILINE)
    assert said == [(name, _plainly(hint)) for name, hint in get_type_hints(kind).items()]


def _plainly(hint: Any) -> str:
    """A type as that page says it."""
    words = {
        str: "string",
        float: "float",
        int: "integer",
        bool: "bool",
        tuple: "tuple",
        dict: "dict",
        queue.ContentFilter: "ContentFilter",
        type(None): "None",
    }
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    return " or ".join(words[get_origin(each) or each] for each in kinds)


NAMES = ROOT / "docs" / "reference" / "api" / "names.md"


def _named() -> dict[str, list[str]]:
    """The names of each package, "" for the one at the top, as the page of names has them."""
    sections = re.split(r"^## (?:agent_runtime_core$)?", NAMES.read_text("utf-8"), flags=re.MULTILINE)[1:]
    rows = {each.partition("\n")[0]: re.findall(r"^\| (`.*?`)(?: \*)? \|", each, re.MULTILINE) for each in sections}
    return {package: re.findall(r"`(\w+)`", ", ".join(cells)) for package, cells in rows.items()}


def _package(name: str) -> ModuleType:
    return importlib.import_module(f"agent_runtime_core.{name}".rstrip("."))


def test_every_public_name_has_its_line_on_the_page_of_names() -> None:
    said = _named()
    packages = {each.name for each in pkgutil.iter_modules(agent_runtime_core.__path__) if each.name[0] != "_"}
    assert said.keys() <= {"", *packages}
    for name in sorted({"", *packages}):
        public = sorted(getattr(_package(name), "__all__", ()))
        if name in said:
            assert (name, sorted(said[name])) == (name, public)
        else:  # it is all at the top
            assert set(public) <= set(said[""]), name


def test_a_star_marks_the_names_that_mean_something_of_their_own() -> None:
    starred = set(re.findall(r"^\| .*?`(\w+)` \* \|", NAMES.read_text("utf-8"), re.MULTILINE))
    things: dict[str, set[int]] = {}
    for name, names in _named().items():
        for each in names:
            things.setdefault(each, set()).add(id(getattr(_package(name), each)))
    assert starred == {each for each, found in things.items() if len(found) > 1}


def test_the_readme_has_blocks() -> None:
    assert len([each for each in blocks_of((ROOT / "README.md").read_text("utf-8")) if not each.skip_run]) == 3


@pytest.mark.parametrize(("page", "kilobytes"), [("README.md", 9), ("CHANGELOG.md", 36)])
def test_a_reader_gets_through_the_page(page: str, kilobytes: int) -> None:
    assert (ROOT / page).stat().st_size <= kilobytes * 1024


def test_the_migration_page_has_a_row_for_each_breaking_change() -> None:
    """If this fails for a new line of the changelog, add a row that says what a user of 0.6.0 must do."""
    unreleased = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("\n## [Unreleased]")[2].partition("\n## [")[0]
    breaking = unreleased.partition("\n### Breaking\n")[2].partition("\n### ")[0]
    page = (ROOT / "docs" / "migration-0.6.md").read_text("utf-8")
    conditions = [row for row in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE) if row != "If"]
    assert len(conditions) == len(re.findall(r"^- ", breaking, re.MULTILINE))
    assert len(set(conditions)) == len(conditions)


def test_each_breaking_change_begins_with_whom_it_concerns() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    entries = [each for part in text.split("\n### Breaking\n")[1:]
               for each in re.findall(r"^- .*$", re.split(r"\n##", part)[0], re.MULTILINE)]  # fmt: skip
    assert len(entries) > 50
    assert [each for each in entries if not each.startswith("- If you")] == []


def test_the_readme_has_the_commands_that_run_the_job_and_the_tests() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert "pip install -e . && python examples/digest.py" in lines
    assert "pip install -e '.[dev]' && scripts/check" in lines


def test_the_site_starts_with_the_first_program() -> None:
    readme, index = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/index.md"))
    pitch, program = readme.partition("\n\n[Tutorial]")[0].partition("\n\n")[2], readme.partition("Save this as")[2]
    assert index.startswith(
        f"# agent-runtime-core\n\n{pitch}\n\nSave this as{program.partition('`agent-runtime inspect')[0]}"
    )


@pytest.mark.parametrize("page", ["tutorial", "guide/workers", "guide/wait-for-people", "guide/retries-and-doubt"])
def test_a_page_of_the_main_path_has_a_picture(page: str) -> None:
    [picture, *_] = re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", (ROOT / "docs" / f"{page}.md").read_text("utf-8"))
    assert (ROOT / "docs" / f"{page}.md").parent.joinpath(picture).is_file()


def test_the_readme_lists_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    table = (ROOT / "README.md").read_text("utf-8").partition("| Extras | Add |")[2].partition("\n\n")[0]
    said = re.findall(r"`([\w-]+)`", table)
    assert sorted(said) == sorted(extras.keys() - {"dev", "docs"})
    inside = re.findall(r"[\w-]+", extras["all"][0].partition("[")[2])
    assert set(inside) == set(said[: said.index("all")])


def test_the_pages_agree_on_the_installation() -> None:
    """If there is a release, change this test and the pages that it names together."""
    sentence = "The package is on no package index yet, so install it from a checkout"
    pages = ["README.md", "SECURITY.md", "docs/tutorial.md", "docs/guide/containers.md", "examples/deploy/Dockerfile"]
    assert [page for page in pages if sentence not in (ROOT / page).read_text("utf-8")] == []
    others = {
        _id(page): re.findall(r"pip install agent-runtime-core.*", page.read_text("utf-8"))
        for page in PAGES
        if "decisions" not in page.parts
    }
    assert {page: found for page, found in others.items() if found} == {}


@pytest.mark.parametrize(("page", "kind"), [("runner.md", runner.AgentRunner), ("context.md", RunContext)])
def test_the_methods_on_a_page_have_all_their_arguments(page: str, kind: type[Any]) -> None:
    """The page says once that calls take `tenant` and `connection`."""
    text = (ROOT / "docs" / "reference" / page).read_text("utf-8")
    rows = re.findall(r"^\| `(?:await |async with |async for |for )?(\w+)\(([^`]*)\)[^`]*`", text, re.MULTILINE)
    assert len(rows) > 15
    for name, arguments in rows:
        if name == kind.__name__ or "…" in arguments:
            continue
        said = re.findall(r"(?:^|, )\*{0,2}(\w+)", re.sub(r"\[[^]]*\]|=[^,]*", "", arguments))
        known = [each for each in inspect.signature(getattr(kind, name)).parameters if each != "self"]
        assert (name, said) == (name, [each for each in known if each in said or each not in {"tenant", "connection"}])


#: Names of the library that need an extra, which the guides use.
_NEED_AN_EXTRA = {
    "AESGCMCodec": "crypto",
    "AsyncAESGCMCodec": "crypto",
    "OpenTelemetrySink": "otel",
    "PrometheusSink": "metrics",
    "create_app": "server",
}


_EXTRA_OF = {**EXTRAS, "starlette": "server"}


def lacking(text: str) -> list[str]:
    """What the Python blocks of a page import and the page does not tell a reader to install."""
    blocks = blocks_of(text)
    here = {re.split(r"[/.]", block.file)[0] for block in blocks if block.file}
    here |= {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+)\.py`", text)}
    wanted = set()
    for block in (each for each in blocks if each.language in PYTHON):
        for node in ast.walk(compile(block.text, "", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            wanted |= {_NEED_AN_EXTRA[name] for name in names if name in _NEED_AN_EXTRA}
            tops = {module.partition(".")[0] for module in modules} - here - sys.stdlib_module_names
            wanted |= {_EXTRA_OF.get(top, top) for top in tops - {"agent_runtime_core"}}
    said = " ".join(re.findall(r"pip install [^\n`]*", text))
    return [each for each in sorted(wanted) if not re.search(rf"\b{each}\b", said)]


@pytest.mark.parametrize("page", [page for page in PAGES if "decisions" not in page.parts], ids=_id)
def test_a_page_names_what_its_blocks_need(page: Path) -> None:
    text = page.read_text("utf-8")
    assert lacking(text) == [], "name the command: pip install …"
    for kind, server in (("redis", "Redis or Valkey server"), ("postgres", "PostgreSQL server")):
        if f"docs: needs {kind}" in text:
            assert server in text, f"say that blocks of this page need a {server}"


def test_a_package_that_a_page_does_not_name_is_found() -> None:
    block = "```python\nimport fastapi\nfrom agent_runtime_core.tracing import PrometheusSink\nimport json, mine\n```\n"
    assert lacking(f"Save `mine.py`.\n{block}") == ["metrics", "server"]
    assert lacking(f"Save `mine.py`: `pip install 'agent-runtime-core[server,metrics]'`.\n{block}") == []


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)
    for example, test in EXAMPLES.items():
        texts = {
            node.value
            for node in ast.walk(ast.parse((ROOT / test).read_text("utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert any(example in text for text in texts), f"{test} does not run examples/{example}"


def _page(*blocks: str) -> str:
    return "# A page\n\n" + "\n\n".join(f"```python\n{block}\n```" for block in blocks)


def test_blocks_share_a_namespace() -> None:
    assert run_page(_page("a = 1", "b = a + 1"), "page.md")["b"] == 2


def test_a_block_may_await_and_another_may_own_a_loop() -> None:
    page = _page(
        "import asyncio\nlock = asyncio.Lock()\nawait lock.acquire()",
        "async def main():\n    return 7\nseven = asyncio.run(main())",
        "lock.release()\nloop_is_kept = await asyncio.sleep(0, True)",
    )
    left = run_page(page, "page.md")
    assert left["seven"] == 7
    assert left["loop_is_kept"] is True


def test_a_block_is_the_main_module() -> None:
    page = _page("from __future__ import annotations\nclass C:\n    x: int\nmodule = C.__module__\nname = __name__")
    before = sys.modules["__main__"]
    left = run_page(page, "page.md")
    assert left["module"] == left["name"] == "__main__"
    assert sys.modules["__main__"] is before


def test_a_failing_block_fails_at_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(_page("a = 1", "1 / 0"), "page.md")
    last = caught.traceback[-1]
    assert (last.path, last.lineno + 1) == ("page.md", 8)


def test_a_skipped_block_is_compiled_and_not_run() -> None:
    left = run_page("<!-- docs: skip-run needs a server -->\n\n" + _page("a = 1 / 0").removeprefix("# A page\n\n"), "p")
    assert "a" not in left
    with pytest.raises(SyntaxError):
        run_page("<!-- docs: skip-run needs a server -->\n```python\na = = 1\n```\n", "p")


def test_a_function_of_a_page_can_call_code_in_c_that_imports() -> None:
    page = "```python\nimport time\n\ndef day():\n    return time.strptime('7', '%d').tm_mday\n\na = day()\n```\n"
    assert run_page(page, "p")["a"] == 7


def test_setup_runs_in_the_namespace(tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text("a = 41\n")
    page = "<!-- docs: setup before.py -->\n```python\nb = a + 1\n```\n"
    assert run_page(page, "p", tmp_path)["b"] == 42


@pytest.mark.parametrize(
    "page",
    [
        "<!-- docs: skip -->\n```python\n```\n",
        "<!-- docs: skip-run -->\n```python\n```\n",
        "<!-- docs: skip-run why -->\nWords.\n```python\n```\n",
        "<!-- docs: skip-run why -->\n```text\n```\n",
        "```output\n1\n```\n",
        "```python\nprint(1)\n```\n\nWords.\n\n```output\n1\n```\n",
        "```shell\nls\n```\n",
        "<!-- docs: skip-run why -->\n",
        "```python\na = 1\n",
    ],
)
def test_a_directive_or_block_nobody_can_follow_is_refused(page: str) -> None:
    with pytest.raises(DocsError):
        blocks_of(page)


def test_other_blocks_are_left_alone() -> None:
    page = "```text\nrm -r /\n```\n\n````markdown\n```python\n1 / 0\n```\n````\n\n  ```python\n  a = 1\n  ```\n"
    assert [(block.line, block.text) for block in blocks_of(page)] == [(12, "a = 1\n")]


def test_output_is_compared() -> None:
    page = "```python\nprint('run 7f3a succeeded')\nprint('a', 'b', sep='\\n')\n```\n\n```output\n%s\n```\n"
    run_page(page % "run 7f3a succeeded\na\nb", "p")
    run_page(page % "run ... succeeded\n...\nb", "p")
    for wrong in ("run 7f3a succeeded", "run ... failed\n...", "run 7f3a succeeded\nb\na"):
        with pytest.raises(AssertionError, match="the output is"):
            run_page(page % wrong, "p")


def test_shell_blocks_run_in_the_directory_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (
        "<!-- docs: file job/hello.py -->\n```python\nimport sys\nprint('hello', *sys.argv[1:])\n```\n\n"
        "```console\n$ python job/hello.py you\nhello you\n$ python job/hello.py a \\\n    b\nhello a b\n"
        '$ false; echo "exit code $?"\nexit code 1\n$ kill -KILL $$\nKilled\n'
        "$ agent-runtime --version\nagent-runtime ...\n```\n\n"
        "```bash\nsleep 600 &\necho $! > pid\n```\n"
    )
    run_page(page, "p")
    pid = (tmp_path / "pid").read_text().strip()
    until(lambda: ended(int(pid)), "the program in the background ends")


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    "block", ["```console\n$ echo 1\n2\n```\n", "```console\n$ false\n```\n", "```bash\nfalse\ntrue\n```\n"]
)
def test_a_shell_block_that_fails_is_found(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="line 2"):
        run_page(block, "p")


def test_imported_names_are_read() -> None:
    text = "from agent_runtime_core.queue import A, B as C\nfrom json import loads\nimport agent_runtime_core"
    assert imported_names(text) == [("agent_runtime_core.queue", "A"), ("agent_runtime_core.queue", "B")]


def test_a_test_that_is_not_there_is_missed() -> None:
    here = "tests/test_docs.py"
    good = f"`{here}`, `{here}::test_the_readme_has_blocks`, `::test_blocks_share_a_namespace`; `{here}`"
    assert missing_tests(good) == []
    assert missing_tests(f"{good} and `::test_gone`") == [f"{here}::test_gone"]
    assert missing_tests(f"run `pytest tests/fault/test_gone.py -m slow`; {good}") == ["tests/fault/test_gone.py"]
    assert missing_tests("`::test_of_no_file`") == ["::test_of_no_file"]
    contract = "tests/contract/test_queue_contract.py -k"
    assert missing_tests(f"`{contract} a_run_is_released_once`, `{contract} a_case_nobody_wrote`") == [
        f"{contract} a_case_nobody_wrote"
    ]


def test_a_link_that_leads_nowhere_is_missed(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# The other page\n\n## What `it` says, and why\n\n```\n# no heading\n```\n")
    page.touch()
    good = "[a](other.md) [b](other.md#what-it-says-and-why) [c](https://example.org/gone) [d](#here)\n\n# Here\n"
    page.write_text(good)
    assert dead_links(page, good) == []
    assert dead_links(page, "[a](gone.md) [b](other.md#no-heading) [c](#nowhere)") == [
        "gone.md",
        "other.md#no-heading",
        "#nowhere",
    ]
    assert dead_links(page, "```\n[in a block](gone.md)\n```\n") == []
