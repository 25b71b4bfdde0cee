"""The page of the HTTP API has every request and every type of problem."""

from __future__ import annotations

import inspect
import re
from typing import Any

from fastapi import FastAPI

from agent_runtime_core import errors
from agent_runtime_core._views.problems import TITLES, kebab, problem_of
from tests.support.pages import ROOT

PAGE = (ROOT / "docs/reference/http-api.md").read_text("utf-8")
SOURCE = ROOT / "src/agent_runtime_core/server"
VIEWS = ROOT / "src/agent_runtime_core/_views"
#: They are described with the streams and the browser.
ELSEWHERE = re.compile(r"/(health|session|socket|metrics)|/runs/\{id\}/events")


def _rows(columns: int) -> list[list[str]]:
    rows = re.findall(r"^\| (.+) \|$", PAGE, re.MULTILINE)
    return [cells for row in rows if len(cells := [each.strip(" `") for each in row.split("|")]) == columns]


def test_every_request_has_its_row_with_its_scope(app: FastAPI) -> None:
    paths: dict[str, Any] = app.openapi()["paths"]
    there = {
        f"{method.upper()} {path.removeprefix('/api/v1')}"
        for path, operations in paths.items()
        for method in operations
        if not ELSEWHERE.search(path)
    }
    cells = [first for first, *_ in _rows(3) if re.match("(GET|POST|PUT|DELETE) /", first)]
    listed = [each for each in cells if not ELSEWHERE.search(each)]
    assert sorted(listed) == sorted(there)


def test_every_type_of_problem_has_its_row_once() -> None:
    listed = [(int(status), kind, error) for status, kind, error in _rows(3) if status.isdecimal()]
    found = set()
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.AgentRuntimeError):
            error = kind.__new__(kind, "x")
            vars(error).update(field="x", kind="input", key_id="x")
            problem = problem_of(error)
            word = problem.type.removeprefix("urn:agent-runtime:")
            found.add((problem.status, word, "every other error" if problem.status == 500 else name))
    by_status = {(status, kebab(title), "") for status, title in TITLES.items() if status not in (409, 410, 422, 500)}
    source = "".join(path.read_text("utf-8") for where in (SOURCE, VIEWS) for path in where.glob("*.py"))
    special = set(re.findall(r"urn:agent-runtime:([a-z-]+)", source))
    assert sorted(listed) == sorted({each for each in listed if each[2] == ""} | found)
    assert by_status <= set(listed)
    assert special <= {kind for _, kind, _ in listed}
    assert len({kind for _, kind, _ in listed}) == len(listed)
