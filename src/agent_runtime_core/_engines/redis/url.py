"""The URL of a Redis server and of this library's keys there.

    redis://[user:password@]host[:6379][/db][?prefix=arc]       rediss:// is the same over TLS
    unix://[user:password@]/path/of.sock[?db=0&prefix=arc]

Characters of the user, the password and the socket path that a URL cannot contain are percent-encoded.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..._core.validation import Shown, must, redacted_url, type_name, unknown
from ...errors import InvalidArgument, brief

PREFIX = "arc"
_PORT = 6379
_SCHEMES = ("redis", "rediss", "unix")
_OPTIONS = ("db", "prefix", "allow_unsafe")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NUMBER = re.compile(r"[0-9]{1,5}")
_TRUTH = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, kw_only=True)
class RedisAddress:
    """One database of one server, and the prefix of this library's keys. `str()` shows no user and no password."""

    host: str = ""
    port: int = _PORT
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    #: The path of a Unix socket. `host` and `port` are not used then.
    unix_socket: str | None = None
    prefix: str = PREFIX
    allow_unsafe: bool = False

    @property
    def tag(self) -> str:
        """The start of each key. The braces put all keys into one slot of a cluster."""
        return f"{{{self.prefix}}}"

    @property
    def loopback(self) -> bool:
        """Whether the connection never leaves this machine."""
        if self.unix_socket is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.unix_socket is not None:
            return f"unix://{self.unix_socket}?db={self.db}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.db}"

    def shown(self) -> str:
        """Return the URL of the store, without user and password, and without the default prefix."""
        more = "" if self.prefix == PREFIX else f"{'&' if self.unix_socket else '?'}prefix={self.prefix}"
        return f"{self}{more}"


def redis_place(url: str) -> RedisAddress:
    """Parse `url`.

    Raises:
        InvalidArgument: It is no URL of a Redis server. The message shows no password.
    """
    if not isinstance(url, str):
        got = Shown(type_name(type(url)))  # its repr may contain a password
        raise must("Redis URL", "be a string such as 'redis://host:6379/0'", got)
    if any(char <= " " or char == "\x7f" for char in url):
        raise _refused(url, "percent-encode spaces, line ends and control characters")
    parts = _split(url)
    options = _options(url, parts.query)
    username, password = _credentials(url, parts)
    prefix = options.get("prefix", PREFIX)
    if not _NAME.fullmatch(prefix):
        raise _refused(url, "have a prefix of 1 to 64 letters, digits, '_', '.' or '-'")
    allow_unsafe = _TRUTH.get(options.get("allow_unsafe", "0").lower())
    if allow_unsafe is None:
        raise _refused(url, "have allow_unsafe=1 or allow_unsafe=0")
    place = _socket(url, parts) if parts.scheme == "unix" else _server(url, parts)
    return replace(
        place,
        db=_database(url, parts, options),
        username=username,
        password=password,
        prefix=prefix,
        allow_unsafe=allow_unsafe,
    )


def _refused(url: str, constraint: str, fix: str = "") -> InvalidArgument:
    return must("Redis URL", constraint, Shown(brief(redacted_url(url), 500)), fix)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:  # its message quotes what may be a password
        raise _refused(url, "be a valid URL", "Put an IPv6 address in brackets: redis://[::1]:6379/0") from None
    if parts.scheme not in _SCHEMES or "://" not in url:
        raise _refused(url, "be redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path/of.sock")
    # An @ in the path of a socket is allowed, unless a user and a password come first.
    after_host = parts.query + parts.fragment + (parts.path if parts.netloc or parts.scheme != "unix" else "")
    if "@" in after_host:
        raise _refused(url, "write %2F, %3F, %23 and %40 for '/', '?', '#' and '@' in user and password")
    if "#" in url:
        raise _refused(url, "not have a fragment", "Write %23 for a '#'")
    return parts


def _options(url: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in ("username", "password"):
            raise _refused(url, f"have the {name} before the host", "Write redis://user:password@host:6379/0")
        if name not in _OPTIONS:
            trust = "Set SSL_CERT_FILE to the certificates to trust" if name.startswith("ssl_") else ""
            where = brief(redacted_url(url), 500)
            raise InvalidArgument(f"Redis URL {where}: {unknown('option', name, _OPTIONS, trust)}")
        if name in options:
            raise _refused(url, f"have {name}= only once")
        options[name] = value
    return options


def _credentials(url: str, parts: SplitResult) -> tuple[str | None, str | None]:
    username, password = (unquote(each) if each else None for each in (parts.username, parts.password))
    if username is not None and password is None:
        # Redis's own tools read a lone word as the password, its Python client as the user.
        raise _refused(url, "have user:password before the @, or :password alone")
    return username, password


def _server(url: str, parts: SplitResult) -> RedisAddress:
    try:
        port = parts.port
    except ValueError:  # its message quotes what may be a password
        port = 0
    if port == 0:
        raise _refused(url, "have a port from 1 to 65535")
    if not parts.hostname:
        raise _refused(url, "name a host", "Write redis://host:6379/0")
    return RedisAddress(host=parts.hostname, port=port or _PORT, tls=parts.scheme == "rediss")


def _socket(url: str, parts: SplitResult) -> RedisAddress:
    path = unquote(parts.path)
    if parts.netloc.rpartition("@")[2] or path in ("", "/") or "\0" in path:
        raise _refused(url, "have the whole path of the socket", "Write unix:///path/of.sock")
    return RedisAddress(unix_socket=path)


def _database(url: str, parts: SplitResult, options: dict[str, str]) -> int:
    in_path = "" if parts.scheme == "unix" else parts.path.removeprefix("/")
    if in_path and "db" in options:
        raise _refused(url, "name the database once, in the path or with db=")
    number = options.get("db", in_path or "0")
    if not _NUMBER.fullmatch(number):
        raise _refused(url, "have a database number of 1 to 5 digits")
    return int(number)
