"""Serve an application with uvicorn, in an event loop that does other work too."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Generator
from typing import Final, cast

import uvicorn
from fastapi import FastAPI

from ..errors import InvalidArgument, brief
from .connections import guarded_protocol
from .state import ServerState

BACKLOG: Final = 2048
LAST_SECONDS: Final = 5  # for responses in progress, when the server stops
_PING_SECONDS: Final = 20.0


def _is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn reports more than a rejected handshake, which anybody can cause. The access log has those."""
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
        ws_ping_timeout=state.settings.stalled_seconds + _PING_SECONDS, backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_SECONDS,
    )  # fmt: skip


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 is a free one.

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
    """Return the URL of a listening socket, with a loopback address for one that listens on all addresses."""
    port = listening.getsockname()[1]
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            host = "::1" if ":" in host else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
