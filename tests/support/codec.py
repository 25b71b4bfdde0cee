"""Payload codecs for tests."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime_core.config import configure
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import StorageCorrupt

KEY = bytes(range(32))


class RepeatableCodec:
    """Encodes the same text with the same context in the same way each time.

    Some cases of the contracts repeat an operation that succeeded, and stores recognize it by its contents.
    """

    searchable = True

    def encode(self, text: str, *, context: str) -> str:
        return f"{_seal(context)}{base64.b64encode(text.encode()).decode()}"

    def decode(self, text: str, *, context: str) -> str:
        if not text.startswith(_seal(context)):
            raise StorageCorrupt(f"{context} was not encoded with this context")
        return base64.b64decode(text.removeprefix(_seal(context))).decode()

    def digest(self, text: str) -> str:
        return hashlib.sha256(b"key" + text.encode()).hexdigest()


def _seal(context: str) -> str:
    return f"enc.{hashlib.sha256(context.encode()).hexdigest()[:16]}."


def encrypting() -> AESGCMCodec:
    """Return a codec that encrypts; without the package that it needs, the test is skipped."""
    pytest.importorskip("cryptography")
    return AESGCMCodec({"test": KEY}, "test", searchable=True)


#: What makes the codec of a name in the parameters of the contract suites: "sqlite+codec" is a backend with one.
CODECS: dict[str, Callable[[], Any]] = {"codec": RepeatableCodec, "aes": encrypting}


def kind_of(request: pytest.FixtureRequest) -> str:
    """Return the backend that a parameter names. If it names a codec, the backends of this test encode with it."""
    kind, _, codec = str(request.param).partition("+")
    if codec:
        configure(payload_codec=CODECS[codec]())
    return kind
