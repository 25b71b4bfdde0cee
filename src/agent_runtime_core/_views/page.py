"""The files of the inspector's page, the headers that they are sent with, and the hosts that may ask for them."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from .problems import Problem

#: Nothing is loaded from another host, no script or style is inline, and no text becomes markup.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".txt": "text/plain; charset=utf-8", ".json": "application/json",
}  # fmt: skip

_HOST: Final = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")


class PageFile(NamedTuple):
    """A file of the page, and the headers that it is sent with."""

    content: bytes
    headers: dict[str, str]


@lru_cache(maxsize=1)
def page_files() -> dict[str, PageFile]:
    """Return the files by their path below `static/`, such as `pages/runs.js`. The page itself is `index.html`."""
    contents: dict[str, bytes] = {}
    _collect(resources.files(__package__).joinpath("static"), "", contents)
    found = {path: PageFile(content, _headers(path, content)) for path, content in contents.items()}
    # The browser otherwise learns of a module only when it has read the one that imports it.
    modules = (f"<static/{path}>; rel=modulepreload" for path in sorted(found) if path.endswith(".js"))
    found["index.html"].headers["Link"] = ", ".join(modules)
    return found


def page_file(name: str, known: str | None) -> tuple[int, bytes | None, dict[str, str]]:
    """Return status, content and headers of a file for a client that holds the version `known` of it.

    Raises:
        Problem: The page contains no such file.
    """
    found = page_files().get(name)
    if found is None:
        raise Problem.of(404, "The page has no such file.")
    return (304, None, found.headers) if known == found.headers["ETag"] else (200, found.content, found.headers)


def check_sizes(url: int, headers: int, most: int, most_of_headers: int) -> None:
    """Raise Problem 414 or 431 for a request whose URL or headers contain too many bytes."""
    if url >= most:
        raise Problem.of(414, f"The URL must have fewer than {most} bytes.")
    if headers > most_of_headers:
        raise Problem.of(431, f"The headers must have at most {most_of_headers} bytes.")


def foreign_origin() -> Problem:
    """Return the problem of a request that a page of another origin has made."""
    return Problem.of(403, "Pages of this origin may not call the server.", type="urn:agent-runtime:foreign-origin")


def _collect(folder: Traversable, prefix: str, found: dict[str, bytes]) -> None:
    for each in folder.iterdir():
        if each.is_dir():
            _collect(each, f"{prefix}{each.name}/", found)
        elif _suffix(each.name) in _MEDIA_TYPES:
            found[prefix + each.name] = each.read_bytes()


def _suffix(path: str) -> str:
    return f".{path.rpartition('.')[2]}"


def _headers(path: str, content: bytes) -> dict[str, str]:
    # `no-cache` means: ask again each time. A new version of the library then never runs with old scripts.
    return {
        **HEADERS,
        "Content-Type": _MEDIA_TYPES[_suffix(path)],
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:20]}"',
    }


def host_name(header: str) -> str | None:
    """Return the name or address in a `Host` header in lower case, without its port; None if the header is invalid."""
    found = _HOST.fullmatch(header)
    return None if found is None else found["name"].strip("[]").lower()


@lru_cache(maxsize=64)
def is_loopback(name: str) -> bool:
    """Whether a host name or address is of this machine only."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
