"""Many short cases in one test, which shows all of them that fail.

Each item of pytest costs six milliseconds: every process of pytest-xdist collects it, and it is reported three times.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., Any]
#: The name of each case, and its arguments.
Table = list[tuple[str, dict[str, Any]]]


def for_each(names: str | Sequence[str], cases: Iterable[Any], *, ids: object = None) -> Callable[[Test], Test]:
    """Call a test for each case, as `pytest.mark.parametrize` does, in one item.

    Each call gets another folder `tmp_path` and another `monkeypatch`. All cases share the other fixtures. Use it for
    cases that take less than 20 ms.

    Args:
        names: The arguments of the test that a case gives, as a list or separated by commas.
        cases: A value for each case, or a tuple of values for several names.
        ids: A name for each case, or a function of a value; by default the values.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    table = [*_table(wanted, cases, ids)]

    def decorated(test: Test) -> Test:
        def every(**fixtures: Any) -> None:
            with _failures(len(table)) as failed:
                for name, arguments in _calls(table, fixtures):
                    with _case(name, arguments, failed):
                        test(**arguments)

        async def every_awaited(**fixtures: Any) -> None:
            with _failures(len(table)) as failed:
                for name, arguments in _calls(table, fixtures):
                    with _case(name, arguments, failed):
                        await asyncio.create_task(test(**arguments))  # a task has context variables of its own

        return _as_item(every_awaited if inspect.iscoroutinefunction(test) else every, test, wanted)

    return decorated


def forget() -> None:
    """Forget what a test has registered and configured.

    Only what the test itself loaded: importing the library here would hide what its import costs.
    """
    if registry := sys.modules.get("agent_runtime_core.registry"):
        registry.clear_registry()
    if config := sys.modules.get("agent_runtime_core.config"):
        config.reset_config()
    if manager := sys.modules.get("agent_runtime_core.persistence.manager"):
        vars(manager)["_default"] = manager._Default()


def close_files() -> None:
    """Close the SQLite files that a test has left open.

    The next test whose directory has the same name would get the engine of the deleted file.
    """
    if (module := sys.modules.get("agent_runtime_core._engines.sqlite.engine")) is not None:
        for engine in [*module.SQLiteEngine._open.values()]:
            while not engine._closed:
                engine.close_now()
        module.SQLiteEngine._open.clear()


def _table(names: list[str], cases: Iterable[Any], ids: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each case, or its number, and its arguments."""
    cases = [*cases]
    assert cases, "a loop without cases checks nothing"
    named = range(len(cases)) if ids is None or callable(ids) else ids
    for case, name in zip(cases, named, strict=True):
        if hasattr(case, "marks"):  # of pytest.param
            assert not case.marks, f"a case in a loop must not have marks, got {case.marks}"
            values, name = case.values, case.id or name
        else:
            values = case if len(names) > 1 else [case]
        if callable(ids):
            name = "-".join(str(ids(value)) for value in values)
        yield f"{name}", dict(zip(names, values, strict=True))


def _calls(table: Table, fixtures: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of each case and the arguments of its call; between two calls, what the first left is removed."""
    for number, (name, arguments) in enumerate(table):
        arguments = {**fixtures, **arguments}
        if "tmp_path" in fixtures:
            folder: Path = fixtures["tmp_path"] / str(number)
            folder.mkdir()
            arguments["tmp_path"] = folder
        with pytest.MonkeyPatch.context() as monkeypatch:
            if "monkeypatch" in fixtures:
                arguments["monkeypatch"] = monkeypatch
            yield name, arguments
        forget()
        close_files()


@contextlib.contextmanager
def _case(name: str, arguments: dict[str, Any], failed: list[BaseException]) -> Iterator[None]:
    """Go on after a case that fails, which is added to the list."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
        error.add_note(f"case {name}: {_printed(arguments)}")
        failed.append(error)


def _printed(arguments: dict[str, Any]) -> str:
    """The arguments of a case, unless one of them cannot be printed."""
    try:
        return ", ".join(f"{name}={value!r}"[:200] for name, value in arguments.items())
    except Exception:  # noqa: BLE001
        return ", ".join(arguments)


@contextlib.contextmanager
def _failures(cases: int) -> Iterator[list[BaseException]]:
    """Fail at the end with all that was added to the list."""
    failed: list[BaseException] = []
    yield failed
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} of {cases} cases failed", failed)


def _as_item(every: Test, test: Test, names: list[str]) -> Test:
    """Let pytest see the test without the arguments that the cases give."""
    functools.update_wrapper(every, test)
    del every.__dict__["__wrapped__"]
    signature = inspect.signature(test)
    left = [each for name, each in signature.parameters.items() if name not in names]
    every.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    return every
