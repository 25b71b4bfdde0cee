"""Encode the contents of operations and rows on their way to a store and back, with the codec of the application."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Final, NamedTuple

from .._core.payload_codec import PayloadCodec, encrypted_without_codec, key_id_of
from ..errors import NotSupported, StorageBusy, StorageCorrupt, StorageError, UnknownEncryptionKey
from .base import Backend, Guard, Op

_FIELD: Final = "encrypted"
_BEGIN: Final = f'{{"{_FIELD}": {{"key": '


class ReadingCodec:
    """Decodes with another codec, and marks what that cannot decrypt.

    No run can be executed with it, because it refuses every write.

    Args:
        codec: The other codec, or None.
    """

    #: `Payloads` refuses every operation that would write.
    reads_only: Final = True

    def __init__(self, codec: PayloadCodec | None) -> None:
        self._codec = codec
        self.searchable: bool = bool(getattr(codec, "searchable", codec is None))
        #: Whether the process has no codec: what it can read is stored as it is.
        self.is_plain: bool = codec is None

    def encode(self, text: str, *, context: str) -> str:
        """Raise NotSupported."""
        raise NotSupported("cannot write encrypted contents without their key. Set payload_codec in this process")

    def decode(self, text: str, *, context: str) -> str:
        """Return the text, or the JSON object `{"encrypted": {"key": ID}}`."""
        key_id = key_id_of(text)
        try:
            if self._codec is not None:
                return self._codec.decode(text, context=context)
        except UnknownEncryptionKey as error:
            key_id = error.key_id
        except Exception:  # noqa: BLE001 - another key of the same id, or a damaged text: a reader shows the rest
            key_id = key_id or "unknown"
        return text if key_id is None else _marked(key_id, context)


def _marked(key_id: str, context: str) -> str:
    mark: dict[str, Any] = {_FIELD: {"key": key_id}}
    words = words_of(mark)
    if context.startswith("error "):
        mark |= {"type": "Encrypted", "message": words}
    elif context.startswith("document "):  # a message of a conversation
        mark |= {"role": "user", "content": words}
    return json.dumps(mark)


def mark_in(value: Any) -> dict[str, Any] | None:
    """Return the mark `{"encrypted": {"key": ID}}` of contents that could not be decrypted; None for other values."""
    found = value.get(_FIELD) if isinstance(value, dict) else None
    return {_FIELD: found} if isinstance(found, dict) and found.keys() == {"key"} else None


def mark_in_text(text: str | None) -> dict[str, Any] | None:
    """Return the mark in a text that `ReadingCodec` decoded; None for other texts."""
    return mark_in(json.loads(text)) if text is not None and text.startswith(_BEGIN) else None


def words_of(mark: Any) -> str:
    """Return a mark in words."""
    return f"(encrypted with key {mark[_FIELD]['key']!r})"


def in_words(value: Any) -> Any:
    """Return a JSON tree with words in place of the marks."""
    if isinstance(value, dict):
        return words_of(value) if mark_in(value) == value else {name: in_words(each) for name, each in value.items()}
    return [in_words(each) for each in value] if isinstance(value, list) else value


_EMPTY: Final = "{}"  # stays as it is: it has no content, and stands for the contents of light rows
_KEYED: Final = "h."  # begins a keyed digest; then come the mark of its key, a dot, and the digest of the codec
_KEYED_END: Final = "h/"  # after all keyed digests, in the order of their characters
_PLAIN: Final = "p."  # begins a digest that was stored before there was a codec, outside of the store
_MOST_REPEATED: Final = 256


class NotDecoded(StorageCorrupt):
    """The codec refuses a stored text: it was changed or moved, or encoded with another key."""


#: The contents of a run cannot be decoded by this process, but perhaps by another process.
UNREADABLE: Final = (UnknownEncryptionKey, NotDecoded)


class Undecoded(str):
    """A text in its stored form, because it could not be decoded. Written again, it stays as it is."""

    error: StorageError

    def __new__(cls, text: str, error: StorageError) -> Undecoded:
        """Return this text with the error of the attempt to decode it."""
        self = super().__new__(cls, text)
        self.error = error
        return self


def why_unreadable(place: str, text: object) -> StorageError | None:
    """Return why a stored text cannot be read by this process, None if it is neither encrypted nor undecoded."""
    return text.error if isinstance(text, Undecoded) else encrypted_without_codec(place, text)


def unknown_digests(digests: Sequence[str]) -> list[tuple[str, str]]:
    """Return ranges of stored digests that cannot be compared with these: a key made them that this process lacks.

    Args:
        digests: The forms of one digest, one for each key of this process; see `Payloads.digests`.

    Returns:
        The first digest of each range, and the first digest after it.
    """
    known = sorted({marked_key(each) for each in digests} - {""})
    return list(zip([_KEYED, *(f"{each[:-1]}/" for each in known)], [*known, _KEYED_END], strict=True))


def marked_key(digest: str) -> str:
    """Return the beginning of a keyed digest, which marks its key; "" for a plain digest."""
    return digest[: digest.find(".", len(_KEYED)) + 1] if digest.startswith(_KEYED) else ""


def same_digest(stored: str, digests: Sequence[str]) -> bool:
    """Return whether a stored digest may be one of the same contents.

    That is so if it is one of `digests`. A digest that cannot be compared counts as the same: otherwise an effect would
    be invisible to a process without its key, and would happen twice.

    Args:
        stored: A stored digest.
        digests: The forms of one digest, plain and with each key of this process.
    """
    return stored in digests or (
        stored.startswith(_KEYED) and any(first <= stored < end for first, end in unknown_digests(digests))
    )


class PayloadFields(NamedTuple):
    """The contents in the operations of one component.

    `encode[name](payloads, args)` returns the arguments of an operation as the store gets them, and
    `decode[name](payloads, args, result)` its result as the caller gets it.
    """

    encode: Mapping[str, Callable[[Payloads, Any], tuple[Any, ...]]]
    decode: Mapping[str, Callable[[Payloads, Any, Any], Any]] = {}


class Payloads:
    """The codec of an application, as the backends that it was passed to share it."""

    def __init__(self, codec: PayloadCodec) -> None:
        self._codec = codec
        self._digest: Callable[[str], str] | None = getattr(codec, "digest", None)
        self._digests: Callable[[str], Sequence[str]] | None = getattr(codec, "digests", None)
        self.searchable: bool = bool(getattr(codec, "searchable", False))
        self.is_plain: bool = bool(getattr(codec, "is_plain", False))
        #: Whether the codec writes what other processes cannot read without it.
        self._encrypts: bool = bool(getattr(codec, "encrypts", True))
        #: The ids of the keys of the codec, if it names them.
        self.key_ids: tuple[str, ...] = tuple(getattr(codec, "key_ids", ()))
        #: Whether this process only shows contents, and so executes no runs.
        self.reads_only: bool = bool(getattr(codec, "reads_only", False))
        #: The id of the key that the digests need too.
        self.digest_key_id: str | None = getattr(codec, "digest_key_id", None)

    def encode(self, kind: str, owner: str, text: str) -> str:
        """Return what the store gets for a text of this kind and owner."""
        if isinstance(text, Undecoded):
            return str(text)
        return text if text == _EMPTY else self._codec.encode(text, context=f"{kind} {owner}")

    def decode(self, kind: str, owner: str, text: str) -> str:
        """Return the stored text of this kind and owner.

        Raises:
            UnknownEncryptionKey: The codec does not have its key.
            NotDecoded: The codec refuses it.
        """
        if text == _EMPTY:
            return text
        context = f"{kind} {owner}"
        try:
            return self._codec.decode(text, context=context)
        except UnknownEncryptionKey:
            raise
        except StorageCorrupt as error:
            raise NotDecoded(str(error)) from error
        except Exception as error:  # noqa: BLE001 - a codec may raise anything, with contents or keys in its message
            raise NotDecoded(f"{context} was not decoded by the payload codec: {type(error).__name__}") from None

    @cached_property
    def marking(self) -> Payloads:
        """The same codec for lists of runs, which mark the contents that it cannot decrypt."""
        return self if self.reads_only else Payloads(ReadingCodec(self._codec))

    def encode_optional(self, kind: str, owner: str, text: str | None) -> str | None:
        return None if text is None else self.encode(kind, owner, text)

    def decode_optional(self, kind: str, owner: str, text: str | None) -> str | None:
        return None if text is None else self.decode(kind, owner, text)

    def keyed_digest(self, digest: str) -> str:
        """Return what the store gets for a digest of contents: the same for the same digest."""
        if not digest or self._digest is None or digest.startswith(_KEYED) or not self._encrypts:
            return digest
        return digest[len(_PLAIN) :] if digest.startswith(_PLAIN) else f"{self._key_marks[0]}{self._digest(digest)}"

    def stored_digest(self, digest: str) -> str:
        """Return a stored digest, so that `keyed_digest` returns it unchanged."""
        is_as_stored = not digest or self._digest is None or digest.startswith(_KEYED) or not self._encrypts
        return digest if is_as_stored else f"{_PLAIN}{digest}"

    def digests(self, digest: str) -> tuple[str, ...]:
        """Return all forms in which a store may have a digest: under each key of the codec, and plain.

        The first digest is what `keyed_digest` returns. Without contents there is no keyed digest, only the marks of
        the keys, so that `same_digest` knows them.
        """
        if self._digest is None:
            return (digest,)
        if not digest:
            return ("", *self._key_marks)
        keyed = (f"{mark}{each}" for mark, each in zip(self._key_marks, self._under_all(digest), strict=True))
        return (*keyed, digest) if self._encrypts else (digest, *keyed)

    @cached_property
    def _key_marks(self) -> tuple[str, ...]:
        """What begins the digests of each key. It is a digest of a constant, since a codec need not name its keys."""
        marks = (hashlib.blake2b(each.encode(), digest_size=4).hexdigest() for each in self._under_all("key"))
        return tuple(f"{_KEYED}{each}." for each in marks)

    def _under_all(self, digest: str) -> Sequence[str]:
        assert self._digest is not None
        return (self._digest(digest),) if self._digests is None else self._digests(digest)

    def committer(self, target: Any, fields: PayloadFields) -> EncodingCommitter:
        """Return what commits to an engine for all backends that use this codec."""
        found = vars(target).setdefault("_encoding_committers", {})
        if self not in found:
            found[self] = EncodingCommitter(self, target)
        committer: EncodingCommitter = found[self]
        committer.fields(fields)
        return committer


class EncodingCommitter:
    """In place of an engine, or of a backend that commits by itself: encodes operations, and decodes their results."""

    def __init__(self, payloads: Payloads, target: Any) -> None:
        self._payloads, self._target = payloads, target
        self._encode: dict[str, Callable[[Payloads, Any], tuple[Any, ...]]] = {}
        self._decode: dict[str, Callable[[Payloads, Any, Any], Any]] = {}
        #: Operations whose outcome is unknown, and their encoded forms. A store recognizes a repeated operation by its
        #: contents, and a codec encodes the same text differently each time.
        self._unconfirmed: dict[int, tuple[Op, Op]] = {}

    @property
    def engine(self) -> Any:
        """The engine, or the backend that commits by itself."""
        return self._target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        match name:  # a third party's backend may have neither
            case "commit_from_thread":
                return lambda guard, ops: self._decoded(ops, found(guard, self._encoded(ops)))
            case "commit_nowait":
                return lambda guard, ops: found(guard, self._encoded(ops))
        return found

    def fields(self, fields: PayloadFields) -> None:
        """Add the operations of a component."""
        self._encode.update(fields.encode)
        self._decode.update(fields.decode)

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        encoded = self._encoded(ops)
        try:
            results: list[Any] = await self._target.commit(guard, encoded)
        except (StorageBusy, asyncio.CancelledError):
            self._keep(ops, encoded)
            raise
        return self._decoded(ops, results)

    def _encoded(self, ops: Sequence[Op]) -> list[Op]:
        if self._payloads.reads_only:
            raise NotSupported("cannot execute a run: this process opened the store only to show its contents")
        encoded = []
        for op in ops:
            encode = self._encode.get(op.name)
            if encode is None:
                encoded.append(op)
            elif self._unconfirmed and id(op) in self._unconfirmed:
                encoded.append(self._unconfirmed[id(op)][1])
            else:
                encoded.append(Op(op.name, encode(self._payloads, op.args)))
        return encoded

    def _keep(self, ops: Sequence[Op], encoded: Sequence[Op]) -> None:
        for op, sent in zip(ops, encoded, strict=True):
            if sent is not op:
                self._unconfirmed[id(op)] = op, sent  # holds the operation, so that no other operation gets its id
        while len(self._unconfirmed) > _MOST_REPEATED:
            del self._unconfirmed[next(iter(self._unconfirmed))]

    def _decoded(self, ops: Sequence[Op], results: list[Any]) -> list[Any]:
        decode, payloads = self._decode, self._payloads
        return [
            decode[op.name](payloads, op.args, result) if op.name in decode else result
            for op, result in zip(ops, results, strict=True)
        ]


@cache
def _payloads_of(codec: Any) -> Payloads:
    return Payloads(codec)  # one for each codec, so that backends on one engine have the same committer


def encode_contents(backends: Iterable[Backend], codec: Any) -> None:
    """Make these backends encode what they store, unless they have a codec already."""
    for backend in backends:
        if backend.payloads is None:
            backend.payloads = _payloads_of(codec)
