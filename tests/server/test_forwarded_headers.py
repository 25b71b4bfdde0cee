"""Headers of a proxy: `X-Forwarded-For` and `X-Forwarded-Proto` of a trusted address count, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.access import Tokens
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.serving import config_of
from agent_runtime_core.server.settings import ServerSettings
from agent_runtime_core.server.token_file import Token
from tests.server.conftest import BASE, TOKEN

HOST: Final = BASE.partition("//")[2]
PROXY: Final = "10.0.0.5"
ADDRESSES: Final = ("192.0.2.1", "127.0.0.1", "::1", "10.0.0.5", "testclient", "unknown", "")
#: What proxies of several kinds send. A client may send all of it.
FORWARDING: Final = {
    "X-Forwarded-For": st.lists(st.sampled_from(ADDRESSES), min_size=1, max_size=3).map(", ".join),
    "X-Forwarded-Proto": st.sampled_from(("https", "wss", "http", "ftp", "")),
    "X-Forwarded-Host": st.sampled_from(("evil.example", "localhost:1")),
    "X-Forwarded-Port": st.just("443"),
    "X-Forwarded-Prefix": st.just("/evil"),
    "X-Forwarded-Ssl": st.just("on"),
    "X-Real-Ip": st.sampled_from(ADDRESSES),
    "X-Original-Host": st.just("evil.example"),
    "X-Scheme": st.just("https"),
    "Forwarded": st.just("for=192.0.2.1;proto=https;host=evil.example"),
    "Front-End-Https": st.just("on"),
}


def served(trusted: Iterable[str], **limits: Any) -> Any:
    """The application as `agent-runtime serve` runs it, with `/seen`: scheme, host, path and client of a request."""
    runner = AgentRunner.open("memory://", registry=Registry())
    app = create_app(
        runner,
        authenticate=Tokens([Token.of(TOKEN)]),
        settings=ServerSettings(trusted_proxies=tuple(trusted), **limits),
    )

    async def seen(request: Request) -> dict[str, Any]:
        url, client = request.url, request.client
        return {"url": f"{url.scheme}://{url.netloc}{url.path}", "client": client and client.host}

    app.add_api_route("/seen", seen)
    config = config_of(app)
    config.load()
    return config.loaded_app


def client_from(app: Any, peer: str) -> httpx.AsyncClient:
    """A client whose connection comes from this address."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(peer, 4711)), base_url=BASE)


async def seen_by(app: Any, peer: str, headers: dict[str, str]) -> Any:
    async with client_from(app, peer) as client:
        answer = await client.get("/seen", headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def trusts_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that uvicorn reads by itself."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")


@pytest.mark.usefixtures("trusts_everybody")
@pytest.mark.parametrize(
    ("trusted", "peer"),
    [((), "127.0.0.1"), ((), "::1"), ((PROXY,), "127.0.0.1"), (("10.0.0.0/30", "fd00::/8"), PROXY), (("::1",), PROXY)],
)
def test_nothing_that_an_untrusted_peer_sends_changes_what_the_server_sees(trusted: tuple[str, ...], peer: str) -> None:
    app = served(trusted)
    plain = {"url": f"{BASE}/seen", "client": peer}

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(st.fixed_dictionaries({}, optional=FORWARDING))
    def check(headers: dict[str, str]) -> None:
        assert asyncio.run(seen_by(app, peer, headers)) == plain

    check()


def test_of_a_trusted_proxy_only_two_headers_count() -> None:
    app = served([PROXY])
    expected = {"url": f"https://{HOST}/seen", "client": "192.0.2.1"}
    counting = {"X-Forwarded-For": "192.0.2.1", "X-Forwarded-Proto": "https"}

    @settings(max_examples=60, derandomize=True, database=None, deadline=None)
    @given(st.fixed_dictionaries({}, optional={k: v for k, v in FORWARDING.items() if k not in counting}))
    def check(headers: dict[str, str]) -> None:
        assert asyncio.run(seen_by(app, PROXY, headers | counting)) == expected

    check()


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        (PROXY, "192.0.2.1", "192.0.2.1"),
        ("10.0.0.0/8", "192.0.2.1", "192.0.2.1"),
        (PROXY, "203.0.113.9, 192.0.2.1", "192.0.2.1"),  # the client sent the first one, and the proxy added its own
        ("10.0.0.0/8", "203.0.113.9, 192.0.2.1, 10.0.0.6", "192.0.2.1"),  # through two proxies
        (PROXY, "2001:db8::1", "2001:db8::1"),
        (PROXY, "", PROXY),
    ],
)
async def test_the_client_is_the_last_address_that_is_not_trusted(trusted: str, forwarded: str, client: str) -> None:
    seen = await seen_by(served([trusted]), PROXY, {"X-Forwarded-For": forwarded})
    assert seen["client"] == client


async def test_the_scheme_of_a_trusted_proxy_decides_about_origins_and_cookies() -> None:
    app = served([PROXY])
    page = {"Sec-Fetch-Site": "same-origin", "X-Agent-Runtime": "1"}
    for peer, proto, origin, status in (
        (PROXY, "https", "https", 200), (PROXY, "https", "http", 403), (PROXY, "http", "https", 403),
        ("192.0.2.1", "https", "https", 403), ("192.0.2.1", "https", "http", 200),
    ):  # fmt: skip
        async with client_from(app, peer) as client:
            headers = {**page, "Origin": f"{origin}://{HOST}", "X-Forwarded-Proto": proto}
            answer = await client.post("/api/v1/session", json={"token": TOKEN}, headers=headers)
        assert answer.status_code == status, (peer, proto, origin)
        if status == 200:
            assert ("Secure" in answer.headers["set-cookie"]) is (peer == PROXY)


async def test_wrong_tokens_are_counted_by_the_address_that_the_proxy_saw() -> None:
    app = served([PROXY], failed_logins_per_minute=2)

    async def statuses(peer: str, addresses: Iterable[str]) -> list[int]:
        async with client_from(app, peer) as client:
            return [
                (
                    await client.get("/api/v1/about", headers={"Authorization": "Bearer x", "X-Forwarded-For": each})
                ).status_code
                for each in addresses
            ]

    assert await statuses(PROXY, [f"203.0.113.{n}, 192.0.2.1" for n in range(3)]) == [401, 401, 429]
    assert await statuses(PROXY, ["192.0.2.2"]) == [401]
    assert await statuses("192.0.2.3", [f"203.0.113.{n}" for n in range(3)]) == [401, 401, 429]


async def test_no_header_makes_a_client_the_test_client_of_starlette() -> None:
    async with client_from(served([PROXY]), PROXY) as client:
        headers = {"Host": "testserver", "X-Forwarded-For": "testclient"}
        assert (await client.get("/seen", headers=headers)).status_code == 421
