"""The contracts on other PostgreSQL servers: with a collation, behind a pooler, with a disk that is waited for.

A collation shows faults of order and of equality, a pooler those of session state, and `fsync` those of time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.persistence.documents.postgres import PostgresDocuments
from agent_runtime_core.queue import get_queue
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing.clock import RunClock
from agent_runtime_core.testing.contracts import events, queue, runs, state
from agent_runtime_core.testing.contracts.persistence import documents
from tests.support.postgres_servers import PgBouncer, PostgresServer

pytestmark = [pytest.mark.postgres, pytest.mark.all_backends]

NUMERIC = ("--locale-provider=icu", "--icu-locale=en-u-kn", "--locale=C.UTF-8", "--encoding=UTF8")
GERMAN = ("--locale-provider=icu", "--icu-locale=de-u-ks-level1", "--locale=C.UTF-8", "--encoding=UTF8")
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=["icu en-u-kn", "icu de", "pooler", "pooler and listen_url", "fsync"])
def base(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of such a server."""
    match request.param:
        case "icu en-u-kn":
            with PostgresServer(locale=NUMERIC) as server:
                yield f"{server.url}?schema="
        case "icu de":
            with PostgresServer(locale=GERMAN) as server:
                yield f"{server.url}?schema="
        case "fsync":
            with PostgresServer(fsync="on") as server:
                yield f"{server.url}?schema="
        case pooled:
            with PostgresServer() as server, PgBouncer(server) as pooler:
                listen = f"&listen_url={server.url}" if "listen_url" in pooled else ""
                yield f"{pooler.url}{listen}&schema="


def _three(url: str, **options: Any) -> Any:
    return (
        get_queue("postgres", url=url, **options),
        get_event_bus("postgres", url=url, **options),
        get_state_store("postgres", url=url, **options),
    )


SUITES: dict[str, tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]] = {
    "queue": (lambda **options: get_queue("postgres", **options), queue.CASES, queue.CASES.several),
    "events": (lambda **options: get_event_bus("postgres", **options), events.CASES, events.CASES.several),
    "state": (lambda **options: get_state_store("postgres", **options), state.CASES, state.CASES.several),
    "documents": (PostgresDocuments, documents.CASES, []),
    "runs": (_three, runs.CASES, []),
}
ONE = [
    pytest.param(name, case, id=f"{name}-{case.__name__}") for name, (_, cases, _) in SUITES.items() for case in cases
]
SEVERAL = [
    pytest.param(name, case, id=f"{name}-{case.__name__}") for name, (_, _, cases) in SUITES.items() for case in cases
]


@pytest.mark.parametrize(("suite", "case"), ONE)
async def test_contract(suite: str, case: Any, base: str) -> None:
    await case(lambda **options: SUITES[suite][0](url=f"{base}s{next(_NUMBERS)}", **options))


@pytest.mark.parametrize(("suite", "case"), SEVERAL)
async def test_several_objects(suite: str, case: Any, base: str) -> None:
    """The second object has another engine: by another URL of the same schema, or by another clock."""
    urls: dict[int, str] = {}

    def opened(url: str, options: dict[str, Any]) -> Any:
        made = SUITES[suite][0](url=url, **options)
        urls[id(made)] = url
        return made

    await case(
        lambda **options: opened(f"{base}s{next(_NUMBERS)}", options),
        lambda first: (
            opened(f"{urls[id(first)]}&fallback_application_name=second", {})
            if first.clock is SYSTEM
            else opened(urls[id(first)], {"clock": RunClock(first.clock, ())})
        ),
    )
