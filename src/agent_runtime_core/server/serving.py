"""Serve an application with uvicorn, in an event loop that does other work too."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Generator
from dataclasses import replace
from typing import Final, cast

import uvicorn
from fastapi import FastAPI

from .._core.log import log
from ..errors import InvalidArgument, brief
from .connections import SPARE, guarded_protocol
from .limits import MOST_REJECTED
from .settings import ServerSettings
from .state import ServerState

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

BACKLOG: Final = 2048  # connections that the system keeps until the server accepts them
_ACCEPTED: Final = 100  # connections that asyncio accepts before it looks at any of them; they need descriptors
LAST_SECONDS: Final = 5  # for responses in progress, when the server stops
#: Descriptors for what is neither a connection nor a stream: the store, the log, and clients that are turned away.
KEPT_DESCRIPTORS: Final = 64 + SPARE + MOST_REJECTED
_PING_SECONDS: Final = 20.0


def _is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn reports more than a rejected handshake, which anybody can cause and the access log shows."""
    return record.msg != "ASGI callable returned without completing handshake."


class Server(uvicorn.Server):
    """A server of uvicorn that leaves the signals of the process to its caller.

    Args:
        app: An application of `create_app`.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(config_of(app))
        #: Set when the server accepts connections.
        self.ready: asyncio.Event = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Set `ready` when the server accepts connections."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)
        self.ready.set()


def config_of(app: FastAPI) -> uvicorn.Config:
    """Return the configuration of uvicorn for an application of `create_app`."""
    state = cast("ServerState", app.state.server)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    proxies = list(state.settings.trusted_proxies)
    return uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False,
        http=guarded_protocol(state), proxy_headers=bool(proxies), forwarded_allow_ips=proxies,
        h11_max_incomplete_event_size=state.settings.max_header_bytes + state.settings.max_url_bytes,
        ws_max_size=state.settings.max_frame_bytes, ws_per_message_deflate=False,
        ws_ping_interval=_PING_SECONDS,
        # A client that does not read does not answer pings either. It gets code 4408 before.
        ws_ping_timeout=state.settings.stalled_seconds + _PING_SECONDS, backlog=_ACCEPTED,
        timeout_graceful_shutdown=LAST_SECONDS,
    )  # fmt: skip


def within_descriptors(settings: ServerSettings) -> ServerSettings:
    """Raise the limit of descriptors of this process, and return settings whose connections and streams fit it.

    The store, spare connections and rejected sockets need descriptors too.
    """
    if resource is None:  # this system has no such limit
        return settings
    wanted = settings.max_connections + settings.max_streams
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + KEPT_DESCRIPTORS:
        most = wanted + KEPT_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(wanted + KEPT_DESCRIPTORS, hard)
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    room = max(soft - KEPT_DESCRIPTORS, 2)
    if soft == resource.RLIM_INFINITY or wanted <= room:
        return settings
    connections = max(1, room * settings.max_connections // wanted)
    streams = room - connections
    log.warning(
        "the limit of %d open files allows %d connections and %d streams, fewer than the settings max_connections=%d "
        "and max_streams=%d. Raise it with ulimit -Hn, or LimitNOFILE of systemd",
        soft, connections, streams, settings.max_connections, settings.max_streams,
    )  # fmt: skip
    per_caller = min(settings.max_streams_per_caller, max(1, streams // 2))
    return replace(
        settings, max_connections=connections, max_streams=streams, max_streams_per_caller=per_caller,
        max_waits_per_caller=min(settings.max_waits_per_caller, max(1, connections // 4)),
    )  # fmt: skip


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 is a free port.

    Raises:
        InvalidArgument: The address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(cast("tuple[str, int]", address[:2]), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a valid name"
        raise InvalidArgument(
            f"port {port} of {brief(host)} cannot be used: {why}. Choose another one with --host and --port"
        ) from None


def url_of(listening: socket.socket, host: str) -> str:
    """Return the URL of a listening socket, with a loopback address for a socket that listens on all addresses."""
    port = listening.getsockname()[1]
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
