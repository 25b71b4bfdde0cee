"""Open a document store by its URL."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

from .._core.lazy_import import load, load_scheme
from .._core.validation import Shown, must
from ..config import INSTALLED, get_config, place_of
from .documents.base import DocumentStore

_CLASSES: Final = {
    "memory": "memory:MemoryDocuments",
    "sqlite": "sqlite:SQLiteDocuments",
    "redis": "redis:RedisDocuments",
    "files": "files:FileDocuments",
}
_FILES = "files:///"


def open_document_store(url: str, *, durability: str = "full") -> DocumentStore:
    """Return the document store at `url`. Close it with `await store.close()`.

    Args:
        url: `memory://`, `sqlite:///path`, the path of a SQLite file, `redis://host`, `files:///path` for a
            directory of files, or a URL of an installed package that has document stores.
        durability: "full" or "normal": the `synchronous` setting of SQLite. Other stores ignore it.

    Raises:
        InvalidArgument: It is no such URL.
    """
    options: dict[str, Any]
    if isinstance(url, str) and url.startswith(_FILES):
        name, options = "files", {"root": unquote(url.removeprefix(_FILES))}
    else:
        name, options = place_of(url)
    if name == "sqlite":
        options["durability"] = durability
    if name == INSTALLED:
        opened = _installed(url)
    else:
        store: Any = load(f".documents.{_CLASSES[name]}", package=__package__)
        opened = store(**options)
    get_config().encode_contents(opened)
    return opened


def has_documents(url: str) -> bool:
    """Return whether the package that adds the scheme of `url` has document stores."""
    return callable(getattr(load_scheme(url).opener, "open_documents", None))


def _installed(url: str) -> DocumentStore:
    found = load_scheme(url)
    if not has_documents(url):
        raise must(found.called, "have a method open_documents(url)", Shown("an object without it"))
    opened = found.opener.open_documents(url)
    if not isinstance(opened, DocumentStore):
        raise must(f"{found.called}: open_documents", "return a DocumentStore", opened)
    return opened
