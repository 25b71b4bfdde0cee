"""The settings of the HTTP server."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Final

from .._core.settings import COUNT, POSITIVE, POSITIVE_SECONDS, TRUTH, SettingType, number, with_known_names
from .._core.validation import must

__all__ = ["ServerSettings"]

MIB: Final = 1 << 20
MOST_BODY_BYTES: Final = 16 * MIB
_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_HOST: Final = re.compile(r"[A-Za-z0-9.-]+")


@with_known_names
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and trusted names of a server. A limit applies to one process.

    Args:
        cors: Origins, such as `https://app.example.com`, whose pages may call the API with a token.
        trusted_hosts: Names in the `Host` header that the server answers besides `localhost` and loopback addresses.
        trusted_proxies: Addresses of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` count. `agent-runtime
            serve` uses it; your own server needs its own setting.
        max_body_bytes: The largest request body, at most 16 MiB.
        max_header_bytes: The largest size of all request headers.
        max_url_bytes: The longest URL.
        max_json_depth: How deep a JSON body may be nested.
        request_seconds: Seconds that a client may take to send a request.
        max_connections: Connections at the same time, besides streams and sockets. `agent-runtime serve` uses it.
        requests_per_second: Requests that a caller may make per second on average.
        request_burst: Requests that a caller may make at the same time.
        failed_logins_per_minute: Wrong tokens of one address per minute that are answered with 401.
        max_pending: `POST /runs` answers 429 while so many runs are pending. None means no limit.
        max_priority: The greatest `priority` that `POST /runs` accepts. Runs that the application itself submits may
            be of a greater priority, and so start before those.
        max_streams: Event streams and sockets at the same time.
        max_streams_per_caller: Event streams and sockets of one caller at the same time.
        max_waits_per_caller: Requests of one caller that wait for a run at the same time. All callers together may
            use half of `max_connections` for it.
        max_unsent_bytes_per_caller: A request gets 429 while earlier answers to its caller contain more bytes that
            the caller has not read.
        stalled_seconds: Seconds after which a client that accepts nothing of its answer is disconnected.
        keep_alive_seconds: Seconds between two comments of an event stream without events.
        max_frame_bytes: The largest frame that a client may send over a socket.
        cookie_seconds: Seconds for which a browser stays signed in.
        metrics_open: Whether `/metrics` needs no token.

    Raises:
        UnknownSetting: A setting does not exist.
        InvalidArgument: A value is invalid.
    """

    cors: Collection[str] = ()
    trusted_hosts: Collection[str] = ()
    trusted_proxies: Collection[str] = ()
    max_body_bytes: int = MIB
    max_header_bytes: int = 32 * 1024
    max_url_bytes: int = 8 * 1024
    max_json_depth: int = 100
    request_seconds: float = 20.0
    max_connections: int = 1000
    requests_per_second: float = 50.0
    request_burst: int = 200
    failed_logins_per_minute: int = 10
    max_pending: int | None = None
    max_priority: int = 1_000_000
    max_streams: int = 2000
    max_streams_per_caller: int = 100
    max_waits_per_caller: int = 100
    max_unsent_bytes_per_caller: int = 16 * MIB
    stalled_seconds: float = 120.0
    keep_alive_seconds: float = 15.0
    max_frame_bytes: int = 64 * 1024
    cookie_seconds: float = 12 * 3600.0
    metrics_open: bool = False

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            kind.check(name, getattr(self, name))
        for name, fits, wanted in (
            ("cors", _is_origin, "have origins like 'https://app.example.com'"),
            ("trusted_hosts", _is_host, "have host names without a port, like 'agents.example.com'"),
            ("trusted_proxies", _is_address, "have IP addresses or networks, like '10.0.0.0/8'"),
        ):
            for each in getattr(self, name):
                if not fits(each):
                    raise must(name, wanted, each)


def _is_origin(value: object) -> bool:
    return isinstance(value, str) and _ORIGIN.fullmatch(value) is not None


def _is_host(value: object) -> bool:
    return isinstance(value, str) and (_HOST.fullmatch(value) is not None or _is_address(value.strip("[]")))


def _is_address(value: Any) -> bool:
    try:
        ipaddress.ip_network(value)
    except ValueError:
        return False
    return isinstance(value, str)


_NAMES = SettingType(
    "a list of strings", lambda value: isinstance(value, Collection) and not isinstance(value, str | bytes)
)
_TYPES: Final = {
    **dict.fromkeys(("cors", "trusted_hosts", "trusted_proxies"), _NAMES),
    "max_body_bytes": replace(
        number(1, MOST_BODY_BYTES, whole=True), wanted=f"an integer from 1 to {MOST_BODY_BYTES}"
    ),
    **dict.fromkeys(
        (
            "max_header_bytes", "max_url_bytes", "max_json_depth", "max_connections", "request_burst", "max_streams",
            "max_streams_per_caller", "max_waits_per_caller", "max_unsent_bytes_per_caller", "max_frame_bytes",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        ("request_seconds", "stalled_seconds", "keep_alive_seconds", "cookie_seconds", "requests_per_second"),
        POSITIVE_SECONDS,
    ),
    "failed_logins_per_minute": COUNT,
    "max_pending": POSITIVE.or_none(),
    "max_priority": replace(number(-(2**31) + 1, 2**31 - 1, whole=True), wanted="an integer of 32 bits"),
    "metrics_open": TRUTH,
}  # fmt: skip
