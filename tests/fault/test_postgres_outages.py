"""A PostgreSQL server that is killed, restarted, cut off or replaced under load: nothing is lost, and work goes on.

The long forms: pytest tests/fault/test_postgres_outages.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from agent_runtime_core.runner.backends import open_url
from tests.support.fault_runs import until
from tests.support.outage_load import SLOTS, Load
from tests.support.postgres_servers import PgBouncer, PostgresServer, Standby
from tests.support.redis_servers import HOST
from tests.support.tcp_proxy import TcpProxy

pytestmark = pytest.mark.postgres

log = logging.getLogger("fault")


def urls(url: str) -> list[str]:
    """URLs of the same database for two engines, as two processes have them."""
    joint = "&" if "?" in url else "?"
    return [f"{url}{joint}fallback_application_name=w{n}" for n in range(2)]


@asynccontextmanager
async def busy(url: str, **checked: Any) -> AsyncIterator[Load]:
    """Two workers that are busy during the block. Each run succeeds after it."""
    load = Load(*urls(url))
    working = [
        asyncio.create_task(each.run_loop(0.2, concurrency=SLOTS, handle_signals=False)) for each in load.runners
    ]
    submitting = asyncio.create_task(load.submit())
    await until(lambda: len(load.acknowledged) > 20)
    yield load
    load.over = True
    await submitting
    assert not any(each.done() for each in working), "a worker has ended"
    await load.check(**checked)
    for runner in load.runners:
        runner.stop()
    await asyncio.gather(*working)
    for runner in load.runners:
        await runner.close()
    log.info(
        "%d runs, %d steps acknowledged, %d in flight ran again, %d of them acknowledged",
        len(load.runs), len(load.acknowledged), sum(load.ran.values()) - len(load.ran), len(load.again),
    )  # fmt: skip


async def progress(load: Load) -> None:
    before = len(load.acknowledged)
    await until(lambda: len(load.acknowledged) > before + 20, 30.0)


async def repeated(times: int, url: str, outage: Callable[[Random], Awaitable[None]]) -> None:
    random = Random(times)
    async with busy(url, attempts=1) as load:
        for _ in range(times):
            await asyncio.sleep(random.random() * 0.1)
            await outage(random)
            await progress(load)


async def kills(times: int) -> None:
    with PostgresServer(fsync="on") as server:

        async def kill(random: Random) -> None:
            if random.random() < 0.6:
                server.kill()
            else:
                await asyncio.to_thread(server.end, random.choice((signal.SIGINT, signal.SIGQUIT)))
            await asyncio.sleep(random.random() * 0.3)
            await asyncio.to_thread(server.start)

        await repeated(times, server.url, kill)


async def terminations(times: int, server: PostgresServer) -> None:
    async def terminate(random: Random) -> None:
        some = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'agent-runtime%%'"
        await asyncio.to_thread(server.ask, f"{some} AND random() < %s", random.choice((0.3, 0.6, 1.0)))

    await repeated(times, f"{server.url}?schema=terminated{times}", terminate)


async def cuts(times: int, server: PostgresServer) -> None:
    with TcpProxy(server.port) as proxy:

        async def cut(random: Random) -> None:
            before = proxy.cuts
            if random.random() < 0.3:
                proxy.drop()
                return
            # A commit that the server applies, and whose reply is lost.
            proxy.swallow(b"COMMIT")
            await until(lambda: proxy.cuts > before)

        await repeated(times, f"postgresql://postgres@{HOST}:{proxy.port}/postgres?schema=cut{times}", cut)


async def failovers(times: int, *, synchronous: bool) -> None:
    for number in range(times):
        random = Random(number)
        waits = {"synchronous_standby_names": "standby"} if synchronous else {}
        with PostgresServer(fsync="on") as primary, Standby(primary, fsync="on") as standby:
            await asyncio.to_thread(primary.restart, **waits)
            both = f"{HOST}:{primary.port},{HOST}:{standby.port}"
            url = f"postgresql://postgres@{both}/postgres?target_session_attrs=read-write"
            async with busy(url, lost=not synchronous) as load:
                # Without its tables it would be no copy.
                await until(lambda: bool(standby.ask("SELECT to_regclass('arc.runs')")[0][0]))
                await asyncio.sleep(random.random() * 0.1)
                primary.kill()
                await asyncio.sleep(random.random() * 0.3)
                await asyncio.to_thread(standby.promote)
                await progress(load)


async def test_runs_go_on_after_kills_of_the_server() -> None:
    await kills(2)


async def test_runs_go_on_after_their_connections_are_terminated(postgres_server: PostgresServer) -> None:
    await terminations(5, postgres_server)


async def test_runs_go_on_after_cuts_of_their_connections(postgres_server: PostgresServer) -> None:
    await cuts(8, postgres_server)


async def test_runs_go_on_on_a_synchronous_standby() -> None:
    await failovers(1, synchronous=True)


async def test_a_claim_whose_reply_is_lost_is_answered_from_what_is_stored(postgres_server: PostgresServer) -> None:
    with TcpProxy(postgres_server.port) as proxy:
        url = f"postgresql://postgres@{HOST}:{proxy.port}/postgres?schema=claims"
        queue, bus, state = open_url(url)
        submitted = {str((await queue.enqueue(None, "a", {})).run_id) for _ in range(12)}
        for _ in range(3):
            proxy.swallow(b"COMMIT")
            rows = await queue.claim_rows("w", 60, limit=3)
            assert len(rows) == 3
            submitted -= {row.run_id for row in rows}
        assert len(submitted) == 3, "no run was claimed twice, and none without its worker"
        assert proxy.cuts == 3
        row = queue.new_row(None, "inline", {}, {}, origin="here")
        proxy.swallow(b"COMMIT")
        word, taken = await queue.take(row, "w", 60, insert=True, reopen=False)
        assert (word, taken is not None and taken.run_id) == ("claimed", row.run_id)
        for backend in (state, bus, queue):
            await backend.close()


@pytest.mark.slow
async def test_30_kills_of_the_server() -> None:
    await kills(30)


@pytest.mark.slow
async def test_connections_are_terminated_100_times(postgres_server: PostgresServer) -> None:
    await terminations(100, postgres_server)


@pytest.mark.slow
async def test_connections_are_cut_100_times(postgres_server: PostgresServer) -> None:
    await cuts(100, postgres_server)


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True])
async def test_5_failovers(synchronous: bool) -> None:
    await failovers(5, synchronous=synchronous)


@pytest.mark.slow
async def test_pooled_connections_are_terminated_30_times() -> None:
    with PostgresServer() as server, PgBouncer(server) as pooler:

        async def terminate(random: Random) -> None:
            some = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            await asyncio.to_thread(server.ask, f"{some} AND random() < %s", random.choice((0.3, 1.0)))

        await repeated(30, pooler.url, terminate)
