"""The file with the tokens of a server. Its lines are `TOKEN [NAME [SCOPES [tenant=TENANT]]]`.

Only digests of the tokens stay in memory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from .._core.arguments import checked_tenant
from .._core.log import log
from .._core.validation import must, unknown
from ..errors import InvalidArgument
from ..runner.runner import AgentRunner

SCOPES: Final = ("run", "result", "send", "approve", "read", "act", "metrics", "admin")
FIRST_NAME: Final = "default"
_TENANT: Final = "tenant="
_MISSING: Final = (0, 0, 0)  # what is seen of a file that is not there
_TOKEN: Final = re.compile(r"[!-~]{1,512}")
_TOKEN_NAME: Final = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class Token(NamedTuple):
    """A token of the file, without its text."""

    name: str
    scopes: frozenset[str]
    digest: bytes
    tenant: str | None = None

    @classmethod
    def of(cls, text: str, name: str = FIRST_NAME, scopes: Iterable[str] = SCOPES, tenant: str | None = None) -> Token:
        """Return the token with that text.

        Raises:
            InvalidArgument: The text, the name, a scope or the tenant is invalid.
        """
        if _TOKEN.fullmatch(text) is None:
            raise InvalidArgument("a token must have 1 to 512 visible ASCII characters. Generate it at random")
        if _TOKEN_NAME.fullmatch(name) is None:
            raise InvalidArgument(
                "the name of a token must have 1 to 64 letters, digits or _ . @ -. Write each line as TOKEN NAME SCOPES"
            )
        for scope in scopes:
            if scope not in SCOPES:
                raise InvalidArgument(unknown("scope", scope, SCOPES))
        checked_tenant(tenant)
        return cls(name, frozenset(scopes), digest_of(text), tenant)


def digest_of(text: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def find(tokens: Iterable[Token], text: str) -> Token | None:
    """Return the token with that text. Every token is compared, so that the time says nothing about them."""
    wanted, found = digest_of(text), None
    for each in tokens:
        if hmac.compare_digest(each.digest, wanted):
            found = each
    return found


class TokenFile:
    """The tokens in a file, which is read again when it has changed.

    Args:
        path: The file. It is created with one token, readable by its owner only, if it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        #: Whether this process created the file.
        self.created: bool = _create(self.path)
        self._seen: tuple[int, int, int] | None = None
        self._tokens: tuple[Token, ...] = ()
        self._read(strict=True)

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens that the file contains now. An unreadable or invalid file leaves those that were read before."""
        self._read(strict=False)
        return self._tokens

    def _read(self, *, strict: bool) -> None:
        try:
            try:
                found = os.stat(self.path)
            except OSError:
                if strict or self._seen != _MISSING:  # not in the log for each request
                    self._seen = _MISSING
                    raise
                return
            seen = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return
            if strict and found.st_mode & 0o077 and os.name == "posix":
                log.warning("token file %s can be read by other users. Run chmod 600 on it", self.path)
            self._seen = seen
            self._tokens = _parsed(self.path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if strict:
                raise InvalidArgument(f"token file {str(self.path)!r} cannot be used: {why}") from None
            log.warning("token file %s cannot be read again: %s. The tokens read before stay valid", self.path, why)


def _create(path: Path) -> bool:
    """Create the file with a new token, unless it exists."""
    if path.exists():
        return False
    # Linked when it is complete, so that a second server never reads half of it; a link overwrites nothing.
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(new, path)
        finally:
            os.unlink(new)
    except FileExistsError:
        return False
    except OSError as error:
        raise InvalidArgument(f"token file {str(path)!r} cannot be created: {error.strerror}") from None
    return True


def _parsed(text: str) -> tuple[Token, ...]:
    tokens: dict[str, Token] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split(None, 3)
        if not parts or parts[0].startswith("#"):
            continue
        tenant = parts[3].rstrip().removeprefix(_TENANT) if len(parts) == 4 else None
        if tenant is not None and not parts[3].startswith(_TENANT):
            raise must(
                f"line {number}",
                "be TOKEN NAME SCOPES tenant=TENANT",
                len(line.split()),
                "Separate the scopes with commas",
            )
        try:
            scopes = parts[2].split(",") if len(parts) > 2 else SCOPES
            token = Token.of(parts[0], parts[1] if len(parts) > 1 else FIRST_NAME, scopes, tenant)
        except InvalidArgument as error:
            raise InvalidArgument(f"line {number}: {error}") from None
        if token.name in tokens:
            raise InvalidArgument(f"line {number}: the name of a token must be unique. Write it as TOKEN NAME SCOPES")
        tokens[token.name] = token
    if not tokens:
        raise InvalidArgument("it has no token. Add one, or delete the file to create a new one")
    return tuple(tokens.values())


def default_path(runner: AgentRunner) -> Path:
    """Return the path of the token file: next to the runner's SQLite file, else in the user's state directory.

    A runner that only reads creates nothing next to the file.
    """
    engine = runner.queue.commits
    path = getattr(engine, "path", None)
    if isinstance(path, str | os.PathLike):
        beside = Path(f"{os.fspath(path)}.token")
        if not getattr(engine, "read_only", False) or beside.exists():
            return beside
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folder = Path(state) / "agent-runtime"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"directory {str(folder)!r} cannot be created: {error.strerror}") from None
    return folder / "token"
