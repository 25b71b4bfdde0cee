"""`agent-runtime conformance`: run the conformance tests for a store URL or a custom backend class."""

from __future__ import annotations

import inspect
import json
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from logging import CRITICAL
from typing import Any, Final, NamedTuple, cast

from .._core.clock import SYSTEM, Clock
from .._core.lazy_import import load, load_scheme
from .._core.validation import Shown, must, redacted_url
from .._engines.memory import MemoryEngine
from ..config import INSTALLED, place_of
from ..errors import InvalidArgument, brief
from ..queue.live_claims import DelayedRuns
from ..runner.backends import open_built_in, open_installed
from ..testing.clock import RunClock
from .app_loader import attribute_of
from .output import escaped, only_logged, print_json, print_line, prints_on_stderr, table, trace

Case = Callable[..., Awaitable[None]]
Make = Callable[..., Any]

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
#: The backends of a run in memory, in the order in which a runner takes them.
_IN_MEMORY: Final[dict[str, str]] = {
    "queue": "queue.memory:InMemoryQueue",
    "events": "events.memory:InMemoryEventBus",
    "state": "state.memory:InMemoryStateStore",
}
_NO_PLACE: Final = "tests with several objects, because no --option names a new store with {tmp} or {n}"


class _Suite(NamedTuple):
    """The tests of one contract, and what opens their backends."""

    contract: str
    make: Make
    again: Make | None = None  # opens a second object on the store of a backend

    @property
    def cases(self) -> Any:
        module = "runs" if self.contract == "runs" else _CONTRACTS[self.contract][1]
        return load(f"{_PACKAGE}.testing.contracts.{module}:CASES")

    @property
    def several(self) -> tuple[Case, ...]:
        cases: tuple[Case, ...] = getattr(self.cases, "several", ())
        return cases


async def conformance(args: Namespace) -> int:
    """Run the cases in sequence; print a table of them, and return 1 if one failed."""
    results: list[dict[str, Any]] = []
    not_run: Counter[str] = Counter()
    is_url = "://" in args.target
    with ExitStack() as directories, prints_on_stderr(), only_logged(CRITICAL):  # the tests make runs fail
        suites = (_suites_of_url if is_url else _suites_of_class)(args, _Places(directories))
        for suite in suites:
            cases: list[tuple[Case, tuple[Make, ...]]] = [(case, (suite.make,)) for case in suite.cases]
            if suite.again is not None:
                cases += [(case, (suite.make, suite.again)) for case in suite.several]
            elif suite.several:
                not_run[_NO_PLACE] += len(suite.several)
            # Runs on a broken backend may wait in vain, each until its time limit.
            useless = suite.contract == "runs" and any(each["outcome"] != "ok" for each in results)
            for case, makes in cases:
                if useless:
                    not_run["tests of whole runs, because other tests failed"] += 1
                elif args.case is None or args.case in case.__name__:
                    results.append(await _result(suite.contract, case, makes, args.debug))
                else:
                    not_run[f"tests without {args.case!r} in their name"] += 1
    if not results:
        raise InvalidArgument(f"--case must be part of the name of a test, got {brief(args.case)}")
    if is_url and args.contract is None:
        not_run["tests of a document store, because its class must be named"] += len(_Suite("documents", _three).cases)
    failed = sum(each["outcome"] != "ok" for each in results)
    if args.json:
        left_out = [{"tests": tests, "what": what} for what, tests in not_run.items()]
        first = {"contract": suites[0].contract, "target": redacted_url(args.target) if is_url else args.target}
        print_json({**first, "failed": failed, "cases": results, "not_run": left_out})
    else:
        table(results, ("outcome", "contract", "case", "error"))
        for what, tests in not_run.items():
            print_line(f"not run: {tests} {what}")
        for contract in dict.fromkeys(each["contract"] for each in results):
            outcomes = [each["outcome"] for each in results if each["contract"] == contract]
            print_line(f"{outcomes.count('ok')} of {len(outcomes)} {contract} tests passed")
    return 1 if failed else 0


# -- where the backends of a test are stored


class _Places:
    """Makes new stores. Their numbers begin at the present time, so that no earlier command used them."""

    def __init__(self, directories: ExitStack) -> None:
        self._directories, self._numbers = directories, count(int(SYSTEM.wall() * 1000))

    def new(self) -> _Place:
        return _Place(next(self._numbers), self._directories)


class _Place:
    """A new and empty store: what {tmp} and {n} stand for in its name."""

    def __init__(self, number: int, directories: ExitStack) -> None:
        self._number, self._directories = number, directories
        self._directory = ""
        self._engine: MemoryEngine | None = None

    def named(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if "{tmp}" in value and not self._directory:
            self._directory = self._directories.enter_context(tempfile.TemporaryDirectory())
        return value.replace("{tmp}", self._directory).replace("{n}", str(self._number))

    def in_memory(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a backend in memory that is stored here."""
        clock = {name: value for name, value in options.items() if name == "clock"}
        if self._engine is None:
            self._engine = MemoryEngine(**clock)
        return {"engine": self._engine, **clock}


def _is_new(text: object) -> bool:
    return isinstance(text, str) and ("{tmp}" in text or "{n}" in text)


def _opening(opened_at: Callable[..., Any], places: _Places) -> tuple[Make, Make]:
    """Return functions that open backends on a new store, and on the store of others.

    Args:
        opened_at: `opened_at(place, **options)` opens them.
        places: Makes the stores.
    """
    there: dict[int, tuple[Any, _Place, dict[str, Any]]] = {}  # kept, so that no id is used again

    def opened(place: _Place, options: dict[str, Any]) -> Any:
        made = opened_at(place, **options)
        there[id(made)] = made, place, options
        return made

    def make(**options: Any) -> Any:
        return opened(places.new(), options)

    def again(made: Any) -> Any:
        _, place, options = there[id(made)]
        if "clock" in options:  # another process has other random values, and on a server another connection
            clock = (made[0] if isinstance(made, tuple) else made).clock
            options = {**options, "clock": RunClock(clock, ("uuid4",) * len(there))}
        return opened(place, options)

    return make, again


# -- a URL


def _suites_of_url(args: Namespace, places: _Places) -> list[_Suite]:
    url, every = args.target, (*_IN_MEMORY, "runs")
    if args.option:
        raise InvalidArgument("--option must be used with a class, got a URL. Put the options into the URL")
    if args.contract not in (None, *every):
        raise InvalidArgument(f"--contract of a URL must be one of {', '.join(every)}, got {args.contract}")
    if not _is_new(url) and not url.startswith("memory:"):
        fix = "Example: sqlite:///{tmp}/agents.db"
        raise must("URL", "contain {tmp} or {n}, so that each test has an empty store", Shown(redacted_url(url)), fix)
    place_of(places.new().named(url))
    suites = []
    for contract in every if args.contract is None else (args.contract,):
        opened_at = partial(_three, url) if contract == "runs" else partial(_one_of_three, url, contract)
        suites.append(_Suite(contract, *_opening(opened_at, places)))
    return suites


def _three(url: str, place: _Place, *, max_retries: int = 3, **options: Any) -> tuple[Any, ...]:
    name, where = place_of(place.named(url))
    if name == INSTALLED:
        return _installed(where["url"], max_retries, options.get("clock"))
    # Objects with one clock may share an engine, which would serialize what they write.
    where |= place.in_memory(options) if name == "memory" else {"clock": Clock(), **options}
    return open_built_in(where, name, max_retries)


def _one_of_three(url: str, contract: str, place: _Place, **options: Any) -> Any:
    """Open the three backends at a URL, and return the backend of `contract`. Closing it closes all three."""
    backends = _three(url, place, **options)
    one = backends[[*_IN_MEMORY].index(contract)]
    closes = [each.close for each in backends]

    async def close() -> None:
        for each in closes:
            await each()

    one.close = close
    return one


def _installed(url: str, max_retries: int, clock: Any) -> tuple[Any, ...]:
    opener = load_scheme(url).opener
    if clock is None:
        return open_installed(url, max_retries=max_retries, read_only=False)
    if "clock" in inspect.signature(opener.open).parameters:
        return open_installed(url, max_retries=max_retries, read_only=False, clock=clock)
    backends = open_installed(url, max_retries=max_retries, read_only=False)
    for each in (*backends, *(each.commits for each in backends)):
        if hasattr(each, "clock"):
            cast(Any, each).clock = clock
    backends[0].delayed_runs = DelayedRuns(clock)
    return backends


# -- a class


def _suites_of_class(args: Namespace, places: _Places) -> list[_Suite]:
    found = attribute_of(args.target, args.agent_path)
    contract = args.contract or _contract_of(found, args.target)
    if not callable(found):
        raise InvalidArgument(f"target must be a class or a function, got {brief(found)}")
    if contract == "llm":
        return [_Suite(contract, found)]
    pairs = [_option(text) for text in args.option]

    def opened_at(place: _Place, **options: Any) -> Any:
        return found(**{name: place.named(value) for name, value in pairs}, **options)

    def run_at(place: _Place, **options: Any) -> Any:
        """Open a backend of the class, and the others of a run in memory."""
        backends = []
        for name, path in _IN_MEMORY.items():
            in_memory: Any = load(f"{_PACKAGE}.{path}")
            mine = name == contract
            backends.append(opened_at(place, **options) if mine else in_memory(**place.in_memory(options)))
        return tuple(backends)

    openers = {contract: opened_at, **({"runs": run_at} if contract in _IN_MEMORY else {})}
    suites = [_Suite(name, *_opening(each, places)) for name, each in openers.items()]
    return suites if any(_is_new(value) for _, value in pairs) else [suite._replace(again=None) for suite in suites]


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


def _option(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise InvalidArgument(f"--option must be NAME=VALUE, got {brief(text)}. Example: path={{tmp}}/queue.db")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


async def _result(contract: str, case: Case, makes: Sequence[Make], debug: bool) -> dict[str, Any]:
    try:
        await case(*makes)
    except Exception as error:  # noqa: BLE001 - the error of a custom backend, which may be any
        if debug:
            trace(error)
        text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return {"outcome": "failed", "contract": contract, "case": case.__name__, "error": escaped(text)}
    return {"outcome": "ok", "contract": contract, "case": case.__name__, "error": None}
