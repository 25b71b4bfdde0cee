"""Which backend is meant, and where it is kept: by a URL, or by its own setting."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from ..config import RuntimeConfig
from ..errors import InvalidArgument
from .redis_url import redacted

_WHERE = frozenset({"engine", "path", "db_path", "url", "redis_url"})


def located(url: str) -> tuple[str, dict[str, Any]]:
    """The name of the backends that a URL means, and the options that say where they are; InvalidArgument."""
    scheme, found, rest = url.partition("://")
    if not found:
        return "sqlite", {"path": url}
    match scheme:
        case "memory":
            return "memory", {}
        case "sqlite":
            if not rest.startswith("/") or rest == "/":
                raise InvalidArgument(f"{url!r}: write sqlite:///relative.db or sqlite:////absolute/path.db")
            return "sqlite", {"path": unquote(rest[1:])}
        case "redis" | "rediss" | "unix":
            return "redis", {"url": url}
        case _:
            raise InvalidArgument(
                f"{redacted(url)!r}: there is memory://, sqlite:///path, redis://host:port/db, "
                "or the path of a SQLite file"
            )


def chosen(
    config: RuntimeConfig, setting: str, backend: str | None, options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The name and options of the backend asked for; of None, what `backend_url` or else `setting` says."""
    if backend is None and config.backend_url is not None:
        backend, where = located(config.backend_url)
        options = options if _WHERE & options.keys() else {**where, **options}
    name: str = getattr(config, setting) if backend is None else backend
    return name, config.placed(name, options)
