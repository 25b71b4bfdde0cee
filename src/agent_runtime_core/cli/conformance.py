"""`agent-runtime conformance`: run the conformance tests for a custom backend class."""

from __future__ import annotations

import inspect
import json
import tempfile
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from itertools import count
from typing import Any, Final, cast

from .._core.lazy_import import load
from ..errors import InvalidArgument, brief
from .app_loader import attribute_of
from .output import escaped, print_json, print_line, prints_on_stderr, table, trace

Case = Callable[[Any], Awaitable[None]]

_PACKAGE: Final = "agent_runtime_core"
#: The base class of each contract, and the module with its cases.
_CONTRACTS: Final = {
    "queue": ("queue.base:RunQueue", "queue"),
    "events": ("events.base:EventBus", "events"),
    "state": ("state.base:StateStore", "state"),
    "llm": ("interfaces:LLMClient", "llm"),
    "documents": ("persistence.documents.base:DocumentStore", "persistence.documents"),
    "audit": ("persistence.base.audit:AuditStore", "persistence.audit"),
    "conversations": ("persistence.base.conversations:ConversationStore", "persistence.conversations"),
    "knowledge": ("persistence.base.knowledge:KnowledgeStore", "persistence.knowledge"),
    "memory": ("persistence.base.knowledge:MemoryStore", "persistence.memory"),
    "preferences": ("persistence.base.knowledge:PreferencesStore", "persistence.preferences"),
    "tasks": ("persistence.base.tasks:TaskStore", "persistence.tasks"),
}


async def conformance(args: Namespace) -> int:
    """Run the cases one after another; print a table of them, and return 1 if one failed."""
    with prints_on_stderr():
        found = attribute_of(args.target, args.agent_path)
    contract = args.contract or _contract_of(found, args.target)
    every = cast("Iterable[Case]", load(f"{_PACKAGE}.testing.contracts.{_CONTRACTS[contract][1]}:CASES"))
    cases = [each for each in every if args.case is None or args.case in each.__name__]
    if not cases:
        raise InvalidArgument(f"--case must be part of the name of a test, got {brief(args.case)}")
    with ExitStack() as directories, prints_on_stderr():
        make = found if contract == "llm" else _maker(found, args.option, directories)
        results = [await _result(case, make, args.debug) for case in cases]
    failed = sum(each["outcome"] != "ok" for each in results)
    if args.json:
        print_json({"contract": contract, "target": args.target, "failed": failed, "cases": results})
    else:
        table(results, ("outcome", "case", "error"))
        print_line(f"{len(results) - failed} of {len(results)} {contract} tests passed")
    return 1 if failed else 0


def _contract_of(found: Any, target: str) -> str:
    """Return the contract of a class by its base class."""
    if not inspect.isclass(found):
        raise InvalidArgument(f"--contract must be used with a function, got {target} without it. Name the contract")
    for contract, (base, _) in _CONTRACTS.items():
        if not issubclass(found, cast(type, load(f"{_PACKAGE}.{base}"))):
            continue
        if contract == "llm":
            raise InvalidArgument(
                f"{target} is a model client, and its tests need a provider with scripted replies. Name a function "
                "make(script) with --contract llm, as agent_runtime_core.testing.contracts.llm describes it"
            )
        return contract
    raise InvalidArgument(
        f"{target} must have a base class such as RunQueue, EventBus or StateStore, got {brief(found)}. "
        "Name its contract with --contract"
    )


def _maker(make: Any, options: Iterable[str], directories: ExitStack) -> Callable[..., Any]:
    """Return a function that makes a new and empty backend."""
    if not callable(make):
        raise InvalidArgument(f"target must be a class or a function, got {brief(make)}")
    pairs, numbers = [_option(text) for text in options], count(1)

    def made(**more: Any) -> Any:
        new: dict[str, Any] = {}
        number = next(numbers)
        for name, value in pairs:
            if isinstance(value, str):
                if "{tmp}" in value:
                    value = value.replace("{tmp}", directories.enter_context(tempfile.TemporaryDirectory()))
                value = value.replace("{n}", str(number))
            new[name] = value
        return make(**new, **more)

    return made


def _option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise InvalidArgument(f"--option must be NAME=VALUE, got {brief(text)}. Example: path={{tmp}}/queue.db")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


async def _result(case: Case, make: Any, debug: bool) -> dict[str, Any]:
    try:
        await case(make)
    except Exception as error:  # noqa: BLE001 - the error of a custom backend, which may be any
        if debug:
            trace(error)
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return {"outcome": "failed", "case": case.__name__, "error": escaped(text)}
    return {"outcome": "ok", "case": case.__name__, "error": None}
