"""A digest of a folder of texts, made by a job that survives `kill -9`.

    python examples/digest.py [FOLDER] [--db digest.db] [--out digest.md] [--slow 0.2]

Each file is analysed in a durable step of its own, then the results are merged and `digest.md` is written.
Kill it anywhere and start it again: it says what it kept and goes on. The same folder with the same contents
is the same run; when a file changes, it is a new one. It needs no key and no server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import posixpath
import re
import shutil
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

from agent_runtime_core import AgentRunner, AgentRuntimeError, EventType, RunStatus, StepExecutor, UnknownRun, open_run

SUFFIXES = (".md", ".py", ".rst", ".txt")
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "venv"}
LARGEST = 32 * 2**20
# A step's result is at most 1 MB, however large its file is.
MOST_TERMS, MOST_HEADINGS, MOST_LINKS, MOST_SENTENCES, MOST_WEIGHTS = 300, 30, 300, 3000, 5000
COMMON = {
    "about",
    "also",
    "been",
    "does",
    "each",
    "from",
    "have",
    "into",
    "more",
    "only",
    "other",
    "over",
    "some",
    "such",
}
COMMON |= {"than", "that", "their", "them", "then", "there", "these", "they", "this", "what", "when", "where", "which"}
COMMON |= {"while", "will", "with", "would", "your"}
WORD = re.compile(r"(?<!\w)[^\W\d_]{4,30}(?!\w)")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.M | re.S)
UNDERLINED = re.compile(r"^(\S.{0,200})\n(?:={3,}|-{3,}|~{3,}|\^{3,})[ \t]*$", re.M)
ATX = re.compile(r"^#{1,6}[ \t]+(\S.{0,200})", re.M)
DEFINITION = re.compile(r"^(?: {4})?((?:async def|def|class) \w+)", re.M)
HEADINGS = {".md": ATX, ".py": DEFINITION, ".rst": UNDERLINED, ".txt": UNDERLINED}
MD_LINK = re.compile(r"\[[^\]\n]{0,200}\](?:\(<?|:[ \t]+)([^)\s>]{1,200})")
RST_LINK = re.compile(r"(?::doc:`|`[^`<]{0,200}<|\.\. include:: )([^`>\n]{1,200})")
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+)?import[ \t]+(\([^)]{1,4000}\)|[^\n;(]{1,400})", re.M)

N = TypeVar("N", int, float)
Summarise = Callable[[str], list[str]]


class Refused(Exception):
    """What was asked for cannot be done; the message says why."""


@dataclass(frozen=True)
class File:
    path: str  # below the folder, with /
    size: int
    sha256: str


@dataclass(frozen=True)
class Analysis:
    """What one file says by itself: the result of its step."""

    path: str
    words: int
    heading_count: int
    headings: list[str]
    terms: dict[str, int]
    sentences: list[str]
    links: list[str]  # as they are written


@dataclass(frozen=True)
class Overview:
    """What only all files together say: the result of the merge."""

    terms: dict[str, int]  # in how many files
    rarity: dict[str, float]
    links: int
    linked: dict[str, int]  # from how many files


# -- the job


async def digest(
    folder: Path, db: Path, out: Path, *, run_id: str | None = None, summarise: Summarise | None = None,
    concurrency: int = 4, slow: float = 0.0, trace: Path | None = None,
) -> None:  # fmt: skip
    """Write the digest of `folder` to `out`, with each step recorded in `db`.

    A model fits in as `summarise`, a plain function from a text to its key sentences: it runs in a thread,
    so it may wait for a client, and what it says is recorded with the file's step and not asked for again.
    For a client that may fail, give the `map` below `retries=3, backoff=Backoff(1.0)`.
    """
    summarise = summarise or key_sentences
    files, left_out = discover(folder, besides=out)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if not files:
        raise Refused(f"{shown(folder)} holds no {', '.join(SUFFIXES)} file that can be read")
    contents = fingerprint([[file.path, file.size, file.sha256] for file in files])
    job = {"folder": shown(folder), "contents": contents, "summarise": summarise.__qualname__}
    run_id = run_id or f"digest-{fingerprint(job)}"
    kept, finished = await recorded(db, run_id)
    progress = Progress(kept, total=len(files) + 1)
    print(f"run {run_id}: {len(files)} files in {shown(folder)}")
    if finished:
        print("finished before: no step runs again, the digest is written from what was recorded", flush=True)
    elif kept:
        print(f"kept {kept} of {progress.total} steps from before", flush=True)

    def analyse_one(file: File) -> Analysis:
        if trace is not None:
            with open(trace, "a", encoding="utf-8") as log:
                log.write(f"{file.path}\n")
        time.sleep(slow)
        analysis = analyse(file.path, read(folder, file), summarise)
        progress.step(file.path)
        return analysis

    def merge_all() -> Overview:
        progress.step("merge")
        return merge(analyses)

    async with open_run(db, run_id, input=job) as ctx:
        executor = StepExecutor(ctx, max_concurrency=concurrency)
        analyses = await executor.map("analyse", analyse_one, files, key=lambda file: file.path)
        overview = await ctx.step("merge", merge_all)
        # Not a step: done again it gives the same bytes, and a lost digest.md comes back.
        write_atomically(out, render(folder.name, analyses, overview))
    print(f"wrote {shown(out)}: {progress.ran} steps run, {kept} kept, {time.monotonic() - progress.began:.1f} s")


async def recorded(db: Path, run_id: str) -> tuple[int, bool]:
    """How many steps of the run are recorded, and whether it has succeeded."""
    async with AgentRunner.open(db) as runner:
        try:
            run = await runner.get_run(run_id)
        except UnknownRun:
            return 0, False
        events = await runner.event_bus.get_events(run_id)
        done = sum(event.event_type == EventType.STEP_COMPLETED for event in events)
        return done, run.status is RunStatus.SUCCEEDED


def fingerprint(value: object) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]


# -- reading


def discover(folder: Path, besides: Path) -> tuple[list[File], list[str]]:
    """The files to read in order of their paths, and what was left out and why."""
    files: list[File] = []
    left_out: list[str] = []
    for place, folders, names in os.walk(folder, onerror=lambda error: left_out.append(str(error))):
        folders[:] = [name for name in folders if name[0] != "." and name not in SKIPPED_FOLDERS]
        for path in (Path(place, name) for name in names if name[0] != "."):
            if path.suffix in SUFFIXES and path != besides:
                try:
                    files.append(examine(path, path.relative_to(folder).as_posix()))
                except (OSError, Refused) as error:
                    left_out.append(f"{shown(path)}: {getattr(error, 'strerror', None) or error}")
    return sorted(files, key=lambda file: file.path), sorted(left_out)


def examine(path: Path, name: str) -> File:
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise Refused("a link or a device, not a file")
    if about.st_size > LARGEST:
        raise Refused(f"larger than {LARGEST // 2**20} MB")
    if not name.isprintable():
        raise Refused("its name cannot be printed")
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise Refused("not UTF-8 text") from None
    if "\0" in text:
        raise Refused("binary, not text")
    return File(name, len(content), sha256(content).hexdigest())


def read(folder: Path, file: File) -> str:
    content = (folder / file.path).read_bytes()
    if sha256(content).hexdigest() != file.sha256:
        raise Refused(f"{file.path} has changed since the files were listed: start again")
    return content.decode("utf-8-sig")


# -- analysing one file


def analyse(path: str, text: str, summarise: Summarise) -> Analysis:
    suffix, prose = Path(path).suffix, text
    if suffix == ".md":
        prose = text = FENCED.sub("", text)
    elif suffix == ".py":
        prose = "\n\n".join(re.findall(r'"""(.*?)"""', text, re.S))
    headings = [" ".join(match[1].split()) for match in HEADINGS[suffix].finditer(text)]
    links = imports(text) if suffix == ".py" else (RST_LINK if suffix == ".rst" else MD_LINK).findall(text)
    return Analysis(
        path, len(prose.split()), len(headings), headings[:MOST_HEADINGS], highest(Counter(terms(prose)), MOST_TERMS),
        summarise(prose), sorted(set(links))[:MOST_LINKS],
    )  # fmt: skip


def terms(text: str) -> Iterator[str]:
    return (word for match in WORD.finditer(text) if (word := match[0].lower()) not in COMMON)


def imports(text: str) -> Iterator[str]:
    """What a Python text imports, as dotted names: `from .a import b` gives .a.b, be b a module or not."""
    for match in IMPORT.finditer(text):
        origin = match[1] or ""
        for name in re.findall(r"[.\w*]+", re.sub(r"#.*|\bas\s+\w+", "", match[2])):
            yield f"{origin}.{name}" if origin.strip(".") else origin + name


def key_sentences(text: str, count: int = 3) -> list[str]:
    """The sentences whose words say most, in the text's order: TF-IDF with its sentences as the documents."""
    pieces = (" ".join(piece.split()).lstrip("#>*-| ") for piece in SENTENCE_END.split(text))
    whole = (piece for piece in pieces if 40 <= len(piece) <= 300 and piece[-1] in ".!?")
    sentences = list(islice(whole, MOST_SENTENCES))
    bags = [set(terms(sentence)) for sentence in sentences]
    found = Counter(term for bag in bags for term in bag)
    weight = {term: n * math.log((1 + len(bags)) / n) for term, n in found.items()}
    scores = {i: math.fsum(weight[term] for term in bag) / math.sqrt(1 + len(bag)) for i, bag in enumerate(bags)}
    return [sentences[i] for i in sorted(sorted(scores, key=lambda i: (-scores[i], i))[:count])]


def highest(of: Mapping[str, N], count: int) -> dict[str, N]:
    """The `count` entries of the greatest values; equal ones in order of their keys."""
    return dict(sorted(of.items(), key=lambda item: (-item[1], item[0]))[:count])


# -- merging


def merge(analyses: Sequence[Analysis]) -> Overview:
    """TF-IDF over all files, and who links to whom."""
    found = Counter(term for each in analyses for term in each.terms)
    rarity = {term: math.log((1 + len(analyses)) / n) for term, n in found.items()}
    weights: Counter[str] = Counter()
    for each in analyses:
        for term, count in each.terms.items():
            weights[term] += round((1 + math.log(count)) * rarity[term] * 1e6)
    linked = Counter(target for targets in link_graph(analyses).values() for target in targets)
    return Overview(
        terms={term: found[term] for term in highest(weights, 20)},
        rarity={term: rarity[term] for term in highest(weights, MOST_WEIGHTS)},
        links=linked.total(),
        linked=highest(linked, 10),
    )


def link_graph(analyses: Sequence[Analysis]) -> dict[str, list[str]]:
    """Which of the files each file links to or imports."""
    files = {each.path for each in analyses}
    graph = {}
    for each in analyses:
        found = {next((path for path in places(each.path, link) if path in files), each.path) for link in each.links}
        graph[each.path] = sorted(found - {each.path})
    return graph


def places(source: str, link: str) -> list[str]:
    """Where the target of a link may be, the likeliest first."""
    if not source.endswith(".py"):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(link.partition("#")[0])))
        return [path + end for end in ("", ".md", ".rst", "/README.md", "/index.md", "/index.rst")]
    names = link.lstrip(".").split(".")
    up = len(link) - len(link.lstrip("."))
    roots = [posixpath.join(posixpath.dirname(source), "../" * (up - 1))] if up else ["", "src"]
    stems = [posixpath.normpath(posixpath.join(root, *part)) for part in (names, names[:-1]) for root in roots]
    return [stem + end for stem in stems for end in (".py", "/__init__.py")]


# -- writing


def render(name: str, analyses: Sequence[Analysis], overview: Overview) -> str:
    words, headings = sum(each.words for each in analyses), sum(each.heading_count for each in analyses)
    graph = link_graph(analyses)
    lines = [
        f"# Digest of {quoted(name)}", "",
        f"{len(analyses)} files, {words} words, {headings} headings, {overview.links} links between them.", "",
        "## Terms", "", *(f"- {term} (in {count})" for term, count in overview.terms.items()), "",
        "## Most linked", "", *(f"- {quoted(path)} (from {count})" for path, count in overview.linked.items()), "",
    ]  # fmt: skip
    for each in analyses:
        weights = {term: count * overview.rarity.get(term, 0.0) for term, count in each.terms.items()}
        about = {
            "Terms": ", ".join(highest(weights, 6)),
            "Outline": ", ".join(map(quoted, each.headings[:6])),
            "Links to": ", ".join(map(quoted, graph[each.path])),
        }
        lines += [f"## {quoted(each.path)}", "", f"- {each.words} words, {each.heading_count} headings"]
        lines += [f"- {label}: {text}" for label, text in about.items() if text]
        lines += ["", *(line for sentence in each.sentences for line in (f"> {sentence}", ""))]
    return "\n".join(lines)


def quoted(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"


def write_atomically(out: Path, text: str) -> None:
    """A reader, or a crash at any moment, finds the old file or the new one, never a part of it."""
    beside = out.with_name(f".{out.name}.tmp")
    with open(beside, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, out)
    if os.name == "posix":  # the new name is part of the folder, which is synced by itself
        place = os.open(out.parent, os.O_RDONLY)
        os.fsync(place)
        os.close(place)


# -- the command


class Progress:
    """One line that is written over on a terminal; elsewhere about twenty lines in all."""

    def __init__(self, kept: int, total: int) -> None:
        self.kept, self.total, self.ran = kept, total, 0
        self.began = time.monotonic()
        self.lock = threading.Lock()  # plain step functions run in threads

    def step(self, what: str) -> None:
        with self.lock:
            self.ran += 1
            at, last = self.kept + self.ran, self.kept + self.ran >= self.total
            line = f"step {at} of {self.total}, {time.monotonic() - self.began:.1f} s, {self.kept} kept: {what}"
            if sys.stdout.isatty():
                width = shutil.get_terminal_size().columns - 1
                print(f"\r{line[:width]}\x1b[K", end="\n" if last else "", flush=True)
            elif last or at % max(self.total // 20, 1) == 0:
                print(line, flush=True)


def shown(path: Path) -> str:
    """The path as text that can be printed and stored, whatever bytes it is made of."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def main() -> int:
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(
        description="Write a digest of a folder of texts; killed, it goes on where it was."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=root, help="default: the repository of this example")
    parser.add_argument("--db", type=Path, default=Path("digest.db"), help="where steps are recorded: digest.db")
    parser.add_argument("--out", type=Path, help="default: digest.md next to the database")
    parser.add_argument("--run-id", help="default: made from the folder and its contents")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="how many files at once: 4")
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS", help="linger on each file, to watch")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="add the path of each file that is analysed")
    asked = parser.parse_args()
    out = asked.out or asked.db.with_name("digest.md")
    folder, out = Path(os.path.realpath(asked.folder)), Path(os.path.realpath(out.parent), out.name)
    if not folder.is_dir():
        parser.error(f"{shown(asked.folder)} is not a folder")
    if not out.parent.is_dir() or out.is_dir():
        parser.error(f"--out {shown(out)} is not a file in a folder that exists")
    if not 0 <= asked.slow <= 3600:
        parser.error(f"--slow is a number of seconds up to 3600, not {asked.slow:g}")
    options = {name: getattr(asked, name) for name in ("run_id", "concurrency", "slow", "trace")}
    try:
        asyncio.run(digest(folder, asked.db, out, **options))
    except (AgentRuntimeError, Refused, OSError) as error:
        print(f"\ndigest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: start it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
