"""Encrypt the contents of runs and documents before they reach a store.

Install the extra `crypto`, and set a codec before stores are opened:

    configure(payload_codec=AESGCMCodec({"2026-11": key}, current="2026-11"))
    runner = AgentRunner.open("redis://host")
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import zlib
from collections.abc import Mapping
from typing import Any, Final

from ._core.lazy_import import load
from ._core.payload_codec import KEY_ID, MARK
from ._core.payload_codec import PayloadCodec as PayloadCodec
from ._core.validation import Shown, must
from .errors import StorageCorrupt, UnknownEncryptionKey

__all__ = ["AESGCMCodec", "PayloadCodec"]

_NONCE: Final = 12  # bytes, as NIST SP 800-38D recommends for GCM
_KEY_SIZE: Final = 32  # bytes, for AES-256
_SHORTEST_DIGEST_KEY: Final = 16  # bytes
_COMPRESSED: Final = "z."  # before the base64 of a text that was compressed
_SHORTEST_COMPRESSED, _LONGEST_COMPRESSED = 800, 32_000  # bytes; compressing longer texts would hold the event loop


class AESGCMCodec:
    """Encrypts with AES-256-GCM: a random nonce for each text, and the context as authenticated data.

    The text that a store gets is `arc1.<key id>.<base64 of nonce, ciphertext and tag>`, with `z.` before the base64 if
    the text was compressed. Stores cannot compress encrypted text, so this class compresses texts of 800 to 32,000
    bytes.

    Args:
        keys: Keys of 32 bytes by their ids, the oldest first. An id consists of letters, digits, `-` and `_`. Contents
            can be read while the key that encrypted them is here.
        current: The id of the key that encrypts. None writes plain text and reads what is encrypted: the setting of all
            processes before the first process encrypts.
        digest_key: The key of the digests of inputs and arguments. It must stay the same when `keys` change. None
            derives it from the oldest of `keys`. Before you remove that key, pass the `digest_key` of a codec with that
            key. Digests with a key that was derived from any of `keys` are recognized.
        strict: Whether text that is not encrypted is refused. It is accepted by default, as it was stored before.
        searchable: Whether stores keep the words of documents unencrypted, so that they can be searched.

    Raises:
        InvalidArgument: A key or an id is invalid.
        MissingDependency: The package cryptography is not installed.

    Examples:
        >>> from agent_runtime_core.encryption import AESGCMCodec
        >>> codec = AESGCMCodec({"k1": bytes(32)}, "k1")
        >>> stored = codec.encode("secret", context="input of run 1")
        >>> stored.startswith("arc1.k1."), codec.decode(stored, context="input of run 1")
        (True, 'secret')
    """

    def __init__(
        self, keys: Mapping[str, bytes], current: str | None, *, digest_key: bytes | None = None, strict: bool = False,
        searchable: bool = False,
    ) -> None:  # fmt: skip
        cipher: Any = load("cryptography.hazmat.primitives.ciphers.aead:AESGCM", needed_by="AESGCMCodec")
        self._invalid: Any = load("cryptography.exceptions:InvalidTag", needed_by="AESGCMCodec")
        if not isinstance(keys, Mapping) or not keys:
            raise must("keys", "be a dict with at least one key", Shown("something else or none"))
        for key_id, key in keys.items():
            if not isinstance(key_id, str) or KEY_ID.fullmatch(key_id) is None:
                raise must("a key id", "have 1 to 64 letters, digits, '-' and '_'", key_id)
            if not isinstance(key, bytes) or len(key) != _KEY_SIZE:
                got = Shown(f"{len(key)} bytes" if isinstance(key, bytes) else "another type")
                raise must(f"key {key_id!r}", "be 32 bytes", got, "Make one with secrets.token_bytes(32)")
        if current is not None and current not in keys:
            raise must("current", f"be one of the key ids {', '.join(map(repr, keys))} or None", current)
        if current is None and strict:
            raise must("strict", "be False while current is None", strict)
        if digest_key is not None and (not isinstance(digest_key, bytes) or len(digest_key) < _SHORTEST_DIGEST_KEY):
            raise must("digest_key", "be at least 16 bytes", Shown("something else"))
        self.key_ids: tuple[str, ...] = tuple(keys)
        self._ciphers = {key_id: cipher(key) for key_id, key in keys.items()}
        self._key_id = current
        #: Whether it encrypts, and does not only decrypt.
        self.encrypts: bool = current is not None
        #: The id of the key from which the key of digests is derived. None if `digest_key` was passed.
        self.digest_key_id: str | None = next(iter(keys)) if digest_key is None else None
        #: The key of digests. Pass it to a codec from which the oldest key is removed.
        derived = [hmac.digest(key, b"agent_runtime_core digests", hashlib.sha256) for key in keys.values()]
        self.digest_key: bytes = digest_key or derived[0]
        self._digest_keys: tuple[bytes, ...] = tuple(dict.fromkeys([self.digest_key, *derived]))
        self._strict = strict
        self.searchable: bool = searchable or current is None

    def __repr__(self) -> str:
        return f"AESGCMCodec(keys={sorted(self._ciphers)}, current={self._key_id!r})"

    def encode(self, text: str, *, context: str) -> str:
        """Return the text, encrypted with the current key, if any.

        Args:
            text: The text.
            context: The kind of text and its owner, which decoding must name too.
        """
        if self._key_id is None:
            return text
        plain, how = text.encode(), ""
        if _SHORTEST_COMPRESSED <= len(plain) <= _LONGEST_COMPRESSED:
            packed = zlib.compress(plain, 1)
            if len(packed) < len(plain) * 0.8:
                plain, how = packed, _COMPRESSED
        nonce = secrets.token_bytes(_NONCE)
        sealed: bytes = nonce + self._ciphers[self._key_id].encrypt(nonce, plain, (how + context).encode())
        return f"{MARK}{self._key_id}.{how}{base64.b64encode(sealed).decode()}"

    def decode(self, text: str, *, context: str) -> str:
        """Return the text that was encrypted with the same context.

        Args:
            text: The stored text.
            context: The context that it was encoded with.

        Raises:
            UnknownEncryptionKey: `keys` does not have the key that encrypted it.
            StorageCorrupt: It was changed, or encrypted with another context or key of this id.
        """
        if not text.startswith(MARK):
            if self._strict:
                raise StorageCorrupt(f"{context} must be encrypted, got plain text. Pass strict=False to read it")
            return text
        key_id, _, encoded = text[len(MARK) :].partition(".")
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise UnknownEncryptionKey(key_id, context)
        how = _COMPRESSED if encoded.startswith(_COMPRESSED) else ""
        try:
            sealed = base64.b64decode(encoded[len(how) :], validate=True)
            plain: bytes = cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], (how + context).encode())
        except (self._invalid, binascii.Error, ValueError) as error:
            raise StorageCorrupt(
                f"{context} cannot be decrypted: it was changed or moved, or encrypted with another key of the id "
                f"{key_id!r}. Pass that key, or restore a backup"
            ) from error
        return (zlib.decompress(plain) if how else plain).decode()

    def digest(self, text: str) -> str:
        """Return an HMAC-SHA-256 of the text, in hex.

        Args:
            text: The text.
        """
        return self._digest_with(self.digest_key, text)

    def digests(self, text: str) -> list[str]:
        """Return the digests of the text with all keys of digests of this codec, first what `digest` returns.

        Args:
            text: The text.
        """
        return [self._digest_with(key, text) for key in self._digest_keys]

    @staticmethod
    def _digest_with(key: bytes, text: str) -> str:
        return hmac.digest(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hex()
