"""Keys and groups as names of files: no two alike, on any file system, and readable where that does no harm."""

from __future__ import annotations

import string
import unicodedata
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from agent_runtime_core.persistence.documents.base import Collection, Entry
from agent_runtime_core.persistence.documents.file_format import ident, key_of, name_of, parsed, part, text_of
from agent_runtime_core.persistence.documents.files import FileDocuments
from tests.support.cases import for_each

NASTY = [
    "../", "..", ".", "", "/", "\\", "/etc/passwd", "C:\\x", "c:", "\0", "a\0b", "\n", "a\r", "con", "CON", "con.txt",
    "nul", "aux", "prn", "com1", "lpt9", "com1.tar.gz", "a", "A", "ab", "aB", "Ab", "AB", "a/b", "a_b", "a b", "a%2fb",
    "%", "%%", "%2f", "~", "@", "a~b", "a@b", "000001~a", ".json", "a.json", "a.", "a ", " a", ".a", "-a", "-", "--rf",
    "a..b", "*", "?", "é", "e\u0301", "\ufb01", "fi", "Å", "\u212b", "\u0130", "\u0131", "ß", "SS", "\u1e9e", "|",
    "\U0001f600", "\U0001f468\u200d\U0001f469", "\ufeff", "\u202egnp", "x" * 300, "x" * 299 + "y", "X" * 300, "é" * 300,
    "/" * 300, "../" * 100, "$HOME", "`id`", "';--", '"', "<>", "lock", "intent", "drafts", "~stamp", "~last",
    "documents", "fences",
]  # fmt: skip


def hostile(count: int) -> list[str]:
    random, found = Random(count), dict.fromkeys(NASTY)
    alphabet = [*NASTY, *string.printable, "\u0301", "é", "\U0001f600", "a", "A"]
    while len(found) < count:
        found["".join(random.choices(alphabet, k=random.randint(1, 6)))[:300]] = None
    return list(found)


def folded(name: str) -> str:
    """What a file system may take for the same name."""
    return unicodedata.normalize("NFKC", name).casefold()


def test_10_000_hostile_texts_are_10_000_names() -> None:
    texts = hostile(10_000)
    parts = [part(text) for text in texts]
    assert len({folded(each) for each in parts}) == 10_000
    for text, each in zip(texts, parts, strict=True):
        assert 0 < len(each) <= 110
        assert set(each) <= set(string.ascii_lowercase + string.digits + "_-.%")
        assert each[0] not in ".-"
        assert each[-1] not in ". "
        assert each.partition(".")[0] not in {"con", "nul", "aux", "prn", "com1", "lpt9"}
        assert text_of(each) in (text, None)
    assert sum(text_of(each) is None for each in parts) < 2_000, "most of them can be read back"


@pytest.mark.parametrize("text", ["theme", str(UUID(int=7)), "user_name", "a-b", "v1.2", "2026-11-22", "x" * 110])
def test_what_is_harmless_stays_itself(text: str) -> None:
    assert part(text) == text
    assert text_of(text) == text


@for_each("rank", [0.0, 1.0, 999_999.0, 1e6, -3.0, 1.5, 1763799371.123456, 1e300, -1e-300, 1e15, 2.0**60])
def test_a_rank_comes_back_from_a_name(rank: float) -> None:
    for name in ("~theme", "@b%2f", "~", "~x%%00"):
        assert parsed(name_of(rank, name)) == (rank, name)


@for_each(
    "name",
    [
        "theme.json",
        "1~a.txt",
        "~a.json",
        "1~A.json",
        "1~a",
        "1.json",
        "x~a.json",
        "1~a b.json",
        "--1~a.json",
        "1e~a.json",
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert parsed(name) is None


def test_a_key_below_its_group_is_named_shortly() -> None:
    assert ident("talk/7", "talk") == "@7"
    assert key_of("@7", "talk") == "talk/7"
    assert ident("talk/7", "") == ident("talk/7", "other") == "~talk%2f7"
    assert key_of("~talk%2f7", "other") == "talk/7"
    assert key_of("@7", None) is None


async def test_hostile_keys_groups_kinds_and_spaces_stay_in_the_root_and_apart(tmp_path: Path) -> None:
    """300 of them through the store itself; the 10,000 are above."""
    texts = [each for each in hostile(10_000) if each not in ("",)][:150]
    root = tmp_path / "deep" / "store"
    documents = FileDocuments(root)
    table = Collection(documents, "project", "memory")
    await table.write(*(table.put(Entry(each, f"{number}")) for number, each in enumerate(texts)))
    await table.write(*(table.put(Entry(f"{each}/in", f"{number}", each)) for number, each in enumerate(texts)))
    for space, kind in [("../..", "a"), ("/etc", "b"), ("project:../x", "../../c")]:
        await Collection(documents, space, kind).write(Collection(documents, space, kind).put(Entry("../../k", '"x"')))
        assert await Collection(documents, space, kind).get("../../k")
    await documents.close()
    documents = FileDocuments(root)
    table = Collection(documents, "project", "memory")
    assert [each.text for each in await table.many(texts)] == [f"{number}" for number in range(len(texts))]
    assert [each.key for each in await table.find("")] == texts
    for number, each in enumerate(texts):
        assert [found.text for found in await table.find(each)] == [f"{number}"], each
    for prefix in ("a", "x" * 299, "../", "\U0001f600"):
        wanted = {key for each in texts for key in (each, f"{each}/in") if key.startswith(prefix)}
        assert {each.key for each in await table.find(prefix=prefix)} == wanted
    await documents.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["deep"]
    assert sorted(each.name for each in (tmp_path / "deep").iterdir()) == ["store"]
    assert sum(each.name.endswith(".json") and each.is_file() for each in root.rglob("*")) == 2 * len(texts) + 3
