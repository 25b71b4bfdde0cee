"""The contents of documents: their texts. The words for the search are left out, unless the codec allows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..._engines.payloads import PayloadFields, Payloads
from .rows import Document


def _owner(space: str, kind: str, key: str) -> str:
    return f"{space}/{kind}/{key}"


def _encode_entry(payloads: Payloads, args: Any) -> tuple[Any, ...]:
    space, kind, entry, *rest = args
    text = payloads.encode("document", _owner(space, kind, entry.key), entry.text)
    return space, kind, entry._replace(text=text, words=entry.words if payloads.searchable else ""), *rest


def decode_documents(payloads: Payloads | None, space: str, kind: str, found: Iterable[Document]) -> list[Document]:
    """Return documents that a store has as their readers get them."""
    if payloads is None:
        return [*found]
    return [each._replace(text=payloads.decode("document", _owner(space, kind, each.key), each.text)) for each in found]


FIELDS = PayloadFields({"documents.put": _encode_entry, "documents.add": _encode_entry})
