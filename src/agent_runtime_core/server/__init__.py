"""The HTTP API: runs over JSON, live event streams, and a WebSocket. Needs the extra `server`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily

if TYPE_CHECKING:
    from .access import Caller as Caller
    from .access import Tokens as Tokens
    from .app import create_app as create_app
    from .errors import install_error_handlers as install_error_handlers
    from .settings import ServerSettings as ServerSettings

_NAMES = {
    "Caller": ".access:Caller",
    "ServerSettings": ".settings:ServerSettings",
    "Tokens": ".access:Tokens",
    "create_app": ".app:create_app",
    "install_error_handlers": ".errors:install_error_handlers",
}
__all__ = ["Caller", "ServerSettings", "Tokens", "create_app", "install_error_handlers"]


def __getattr__(name: str) -> object:
    return lazily(__name__, _NAMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
