"""Conditions on the contents of a run: its metadata, its tags, the type of its error, and the texts in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .._core.arguments import checked_name
from .._core.codec.json import encode
from .._core.codec.tagged import TAG
from .._core.validation import must

TAGS: Final = "agent-runtime.tags"  # the key of the tags in the metadata of a run
MAX_TAG: Final = 128  # characters
MOST_TAGS: Final = 32


def with_tags(metadata: Mapping[str, Any], tags: Iterable[str]) -> dict[str, Any]:
    """Return the metadata of a new run with its tags.

    Raises:
        InvalidArgument: A tag is not a string of 1 to 128 characters, or the metadata has the key of the tags.
    """
    if TAGS in metadata:
        raise must("metadata", f"not contain the key {TAGS!r}", metadata[TAGS], "Pass the tags as tags=[...]")
    found = checked_tags(tags)
    return {**metadata, TAGS: found} if found else {**metadata}


def checked_tags(tags: Iterable[str]) -> list[str]:
    """Return tags, each once, or raise InvalidArgument."""
    if isinstance(tags, str | Mapping) or not isinstance(tags, Iterable):
        raise must("tags", "be a list of strings", tags, "Example: tags=['nightly']")
    found = [*dict.fromkeys(checked_tag(each) for each in tags)]
    if len(found) > MOST_TAGS:
        raise must("tags", f"have at most {MOST_TAGS} tags", len(found), "Store more in the metadata")
    return found


def checked_tag(value: object) -> str:
    """Return a tag, or raise InvalidArgument."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TAG:
        raise must("tag", f"be a string of 1 to {MAX_TAG} characters", value)
    return checked_name("tag", value)


def tags_in(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tags in the metadata of a run. A `redact` hook may have replaced them."""
    found = metadata.get(TAGS)
    return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


def without_tags(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata as the caller passed it."""
    return {key: value for key, value in metadata.items() if key != TAGS}


def comparable(value: Any) -> str:
    """Return the text of a metadata value: two values are equal if their texts are, so that 3 equals "3"."""
    return value if isinstance(value, str) else _text_of(json.loads(encode(value)))


def _text_of(tree: Any) -> str:
    return tree if isinstance(tree, str) else json.dumps(tree, sort_keys=True, separators=(",", ":"))


class ContentFilter(NamedTuple):
    """Conditions that a store does not decide: who reads the contents of a run decides them.

    Attributes:
        metadata: Keys with the texts of their values, see `comparable`.
        tag: One of the tags.
        error_type: The type of the error.
        code_version: The version of the code that began the run, or that continues it after `resume`.
        search: A text that one of the texts contains, in upper or lower case.
    """

    metadata: tuple[tuple[str, str], ...] = ()
    tag: str | None = None
    error_type: str | None = None
    code_version: str | None = None
    search: str | None = None

    def admits(self, contents: RunContents) -> bool:
        """Return whether a run with these contents is wanted.

        Args:
            contents: The contents of the run.
        """
        return (
            (not (self.metadata or self.tag) or self._has_metadata(_tree(contents.metadata)))
            and (self.error_type is None or self.error_type == contents.error_type)
            and (self.code_version is None or self.code_version == contents.code_version)
            and (self.search is None or contains(self.search, contents.names, contents.texts))
        )

    def _has_metadata(self, metadata: Any) -> bool:
        if not isinstance(metadata, dict):
            return False
        return (self.tag is None or self.tag in tags_in(metadata)) and all(
            key in metadata and _text_of(metadata[key]) == text for key, text in self.metadata
        )


#: No conditions.
ANY_CONTENTS: Final = ContentFilter()


class RunContents(NamedTuple):
    """What a filter reads of a run besides its row.

    Attributes:
        metadata: The metadata, as JSON.
        error: The last error, as JSON.
        code_version: The version of the code.
        names: Names of the run, such as its id.
        texts: JSON texts: input, output, errors, and the results of steps, which contain the messages.
    """

    metadata: str = "{}"
    error: str | None = None
    code_version: str | None = None
    names: tuple[str | None, ...] = ()
    texts: tuple[str | None, ...] = ()

    @property
    def error_type(self) -> str | None:
        """The type of the error."""
        error = _tree(self.error)
        return error.get("type") if isinstance(error, dict) else None


def contains(words: str, names: Iterable[str | None], texts: Iterable[str | None]) -> bool:
    """Return whether a name, or a value in JSON texts, contains words, in upper or lower case."""
    wanted = words.lower()
    if any(wanted in each.lower() for each in names if each):
        return True
    # In JSON of ASCII, most characters stand for themselves. Most texts need not be decoded.
    plain = wanted.isascii() and json.dumps(wanted)[1:-1] == wanted
    return any(
        (wanted in each.lower() if plain else True) and any(wanted in value for value in _values(_tree(each)))
        for each in texts
        if each
    )


#: Characters that no index contains of contents: NUL ends a text for FTS5, a lone surrogate has no UTF-8, and 1 is
#: around the tenant.
_REPLACED: Final = re.compile("[\0\1\ud800-\udfff]")
#: Characters of a word that an index can find.
SHORTEST_WORD: Final = 3
#: Characters of the contents of a run that an index contains at most. Longer contents are searched without it.
MOST_INDEXED: Final = 1_000_000


class Candidates(NamedTuple):
    """The runs that may contain words, from the full-text index of a store.

    Attributes:
        places: The (created_at, arrival) of runs that match the filter of the store, in its order.
        end: Where the next candidates begin; None after the last one.
    """

    places: list[tuple[float, int]]
    end: tuple[float, int] | None


class IndexState(NamedTuple):
    """How far a full-text index goes.

    Attributes:
        upto: The `arrival` of the last run that was indexed.
        changed: The `arrival` of the first runs that changed since they were indexed, and that do not run.
        last: The greatest `arrival` that was assigned so far.
        writers: The open transactions that may store a run with an `arrival` up to `last`, by their names.
    """

    upto: int
    changed: list[int]
    last: int
    writers: frozenset[str] = frozenset()


class IndexEntry(NamedTuple):
    """What an index is to contain of a run.

    Attributes:
        arrival: The `arrival` of the run.
        seen: Its `generation`, `ended_at`, `mail_seq` and `claim_id` when its contents were read; None in place of
            the last while it runs.
        text: Its text; None makes it a candidate of each search.
        live: Whether it had not ended. Only a claim or a message changes its contents, and it is indexed again then.
    """

    arrival: int
    seen: tuple[int, float | None, int, str | None]
    text: str | None
    live: bool


def indexed_words(words: str) -> str:
    """Return words as the texts of an index contain them."""
    return _REPLACED.sub("?", words.lower())


def indexed_text(tenant: str, contents: RunContents) -> str | None:
    """Return the text of a run for an index: its names and values as `contains` compares them. None if it is long.

    Args:
        tenant: The tenant of the run.
        contents: Its contents.
    """
    found = dict.fromkeys(each.lower() for each in contents.names if each)
    for each in contents.texts:
        found.update(dict.fromkeys(_values(_tree(each))))
    text = _REPLACED.sub("?", "\n".join(found))
    return f"{tenant_mark(tenant)}\n{text}" if len(text) <= MOST_INDEXED else None


def tenant_mark(tenant: str) -> str:
    """Return what the texts of a tenant contain, and no other text."""
    return f"\1{tenant}\1"


def _tree(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None  # encrypted, or damaged


def _values(tree: Any) -> Iterable[str]:
    """Yield the texts of all values in a JSON tree, in lower case, without the names of its fields."""
    left = [tree]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += (value for key, value in each.items() if key != TAG)
        elif isinstance(each, Sequence) and not isinstance(each, str):
            left += each
        elif each is not None:
            yield (each if isinstance(each, str) else json.dumps(each)).lower()
