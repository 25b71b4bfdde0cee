"""The contracts hold over TLS, where no two threads may use a connection at once; needs the openssl program."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import ssl
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core.errors import StorageBusy, StorageError
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.state import get_state_store
from tests.support.contract_suites import SUITES, making
from tests.support.redis_proxy import Cut
from tests.support.redis_servers import HOST, RedisServer

pytestmark = pytest.mark.redis

FEW = [
    pytest.param(suite, case, id=f"{suite}-{case.__name__}") for suite, cases in SUITES.items() for case in cases[::9]
]

_PREFIXES = itertools.count(1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key of loopback, made for these tests."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs the openssl program")
    where = tmp_path_factory.mktemp("tls") / "server.pem"
    making = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=loopback"]
    making += ["-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(where), "-out", str(where.with_suffix(".crt"))]
    subprocess.run(making, check=True, capture_output=True)
    with where.open("a") as file:
        file.write(where.with_suffix(".crt").read_text())
    return where


@pytest.fixture(scope="module")
def server(redis_server: RedisServer, certificate: Path) -> Iterator[Cut]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Cut(redis_server.port, tls=context) as server:
        yield server


@pytest.fixture
def url(server: Cut, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """At a prefix of its own, of a server that is trusted."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    return f"{server.url}?prefix=tls{next(_PREFIXES)}"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a thread came to a TLS connection that another one was sending to or reading from."""
    found: Counter[str] = Counter()
    inside: dict[int, set[int]] = {}
    lock = threading.Lock()

    def watched(name: str) -> Any:
        real = getattr(ssl.SSLSocket, name)

        def call(sock: Any, *args: Any, **options: Any) -> Any:
            me = threading.get_ident()
            with lock:
                there = inside.setdefault(id(sock), set())
                found[name if there <= {me} else "at once"] += 1
                mine = me not in there
                there.add(me)
            try:
                return real(sock, *args, **options)
            finally:
                if mine:
                    with lock:
                        there.discard(me)

        return call

    # That of the proxy is no SSLSocket: asyncio has its own way.
    for name in ("recv", "recv_into", "send"):
        monkeypatch.setattr(ssl.SSLSocket, name, watched(name))
    return found


@pytest.mark.parametrize(("suite", "case"), FEW)
async def test_some_cases_over_tls(suite: str, case: Any, url: str, shared: Counter[str]) -> None:
    await case(making(suite, lambda: f"{url}x{next(_PREFIXES)}"))
    assert shared["send"]
    assert not shared["at once"]


async def test_many_commits_at_once_and_topics_that_come_and_go(url: str, shared: Counter[str]) -> None:
    bus = get_event_bus("redis", url=url)
    followed = [uuid4() for _ in range(8)]

    async def follow(run_id: Any) -> list[Any]:
        found = []
        async for event in bus.subscribe(run_id, 0):
            found.append(event.payload["n"])
            if len(found) == 50:
                return found
        return found

    async with asyncio.timeout(60):
        readers = [asyncio.ensure_future(follow(run_id)) for run_id in followed]
        for n in range(50):
            told = [bus.commit(None, [bus.publishing(each, [(f"e{n}", "tick", {"n": n})])]) for each in followed]
            await asyncio.gather(*told)
        assert await asyncio.gather(*readers) == [list(range(50))] * len(followed)
    await bus.close()
    assert shared["send"] > 50
    assert not shared["at once"]


async def test_a_server_that_is_not_trusted_is_not_spoken_to(server: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    store = get_state_store("redis", url=f"{server.url}?prefix=untrusted")
    with pytest.raises(StorageError, match="SSL_CERT_FILE") as refused:
        await store.save_checkpoint(uuid4(), {"n": 1})
    assert not isinstance(refused.value, StorageBusy)  # to try again is of no use
    await store.close()
