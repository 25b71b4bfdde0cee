"""The HTTP API: runs over JSON, live event streams, and a WebSocket. Needs the extra `server`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .access import Caller as Caller
    from .access import Tokens as Tokens
    from .app import create_app as create_app
    from .errors import install_error_handlers as install_error_handlers
    from .settings import ServerSettings as ServerSettings
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".access": "Caller Tokens",
            ".app": "create_app",
            ".errors": "install_error_handlers",
            ".settings": "ServerSettings",
        },
    )
