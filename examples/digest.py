"""A digest of a folder of texts, made by a job that survives `kill -9`.

    python examples/digest.py [FOLDER] [--db digest.db] [--out digest.md] [--slow 0.2] [--model gpt-5.4-nano | --mock]

Each file is analysed in a durable step of its own, then the results are merged and `digest.md` is written.
Kill it anywhere and start it again: it says what it kept and goes on. The same folder with the same contents
is the same run; when a file changes, it is a new one. It needs no key and no server; with --model a model
says what each file is about, and what it said is not asked for again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import posixpath
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from agent_runtime_core import (
    AgentRunner,
    AgentRuntimeError,
    EventType,
    LLMClient,
    MissingDependency,
    MockLLMClient,
    RunStatus,
    StepExecutor,
    UnknownRun,
    open_run,
)
from agent_runtime_core.errors import NotConfigured
from agent_runtime_core.llm import get_llm_client
from agent_runtime_core.portal import from_thread

# A step's result is at most 1 MB, however large its file is.
LARGEST, MOST_TERMS, MOST_HEADINGS, MOST_LINKS, MOST_SENTENCES, MOST_RANKED = 32 * 2**20, 300, 30, 300, 3000, 5000
MOST_ASKED = 20_000  # characters of a text that a model is sent
WORD = re.compile(r"(?<!\w)[^\W\d_]{4,30}(?!\w)")
COMMON = frozenset(
    WORD.findall("""about also been does each from have into more only other over some such than that
    their them then there these they this what when where which while will with would your""")
)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
FENCED = re.compile(r"^(```|~~~).*\n(?:(?!\1).*\n)*\1[ \t]*$", re.M)
UNDERLINED = re.compile(r"^(\S.{0,200})\n(?:={3,}|-{3,}|~{3,}|\^{3,})[ \t]*$", re.M)
DEFINED = re.compile(r"^(?: {4})?((?:async def|def|class) \w+)", re.M)
HASHED = re.compile(r"^#{1,6}[ \t]+(\S.{0,200})", re.M)
HEADINGS = {".md": HASHED, ".py": DEFINED, ".rst": UNDERLINED, ".txt": UNDERLINED}
MD_LINK = re.compile(r"\[[^\[\]\n]{0,200}\](?:\(<?|:[ \t]+)([^)\s>]{1,200})")
RST_LINK = re.compile(r"(?::doc:`|`[^`<]{0,200}<|\.\. include:: )([^`>\n]{1,200})")
IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+)?import[ \t]+(\([^()]{1,4000}\)|[^\n;(]{1,400})", re.M)


@dataclass(frozen=True)
class File:
    path: str  # below the folder, with /
    size: int
    sha256: str


@dataclass(frozen=True)
class Analysis:  # what one file says by itself: the result of its step
    path: str
    words: int
    heading_count: int
    headings: list[str]
    terms: dict[str, int]
    sentences: list[str]
    links: list[str]  # as they are written


@dataclass(frozen=True)
class Overview:  # what only all files together say: the result of the merge
    terms: dict[str, int]  # in how many files, the weightiest first
    linked: dict[str, int]  # from how many files, the most first


async def digest(
    folder: Path, db: Path, out: Path, *, run_id: str | None = None, concurrency: int = 4, slow: float = 0.0,
    summarise: Callable[[str], list[str]] | None = None,
) -> None:  # fmt: skip
    """Write the digest of `folder` to `out`, with each step recorded in `db`.

    A model fits in as `summarise`, a plain function from a text to its key sentences: it runs in a thread,
    so it may wait for a client, and what it says is recorded with the file's step and not asked for again.
    `asking` makes one of a client, which tries again by itself. For another that may fail, give the `map`
    below `retries=3, backoff=Backoff(1.0)`. Its `__qualname__` is part of what makes the run's id.
    """
    summarise = summarise or key_sentences
    files = discover(folder, besides=out)
    contents = sha256(json.dumps([vars(file) for file in files]).encode()).hexdigest()
    job = {"folder": shown(folder), "contents": contents, "summarise": summarise.__qualname__}
    run_id = run_id or "digest-" + sha256(json.dumps(job).encode()).hexdigest()[:16]
    kept, finished = await recorded(db, run_id)
    progress = Progress(kept, total=len(files) + 1)
    before = "finished before, no step runs again" if finished else f"{kept} of {progress.total} steps kept from before"
    print(f"run {run_id}: {len(files)} files in {shown(folder)}; {before}", flush=True)

    def analyse_one(file: File) -> Analysis:
        time.sleep(slow)
        analysis = analyse(folder, file, summarise)
        progress.step(file.path)
        return analysis

    async with open_run(db, run_id, input=job) as ctx:
        executor = StepExecutor(ctx, max_concurrency=concurrency)
        analyses = await executor.map("analyse", analyse_one, files, key=lambda file: file.path)
        if kept < progress.total:
            progress.step("merge")
        overview = await ctx.step("merge", merge, analyses)
        # Not a step: done again it gives the same bytes, and a digest that was lost comes back.
        write_atomically(out, render(shown(Path(folder.name)), analyses, overview))
    print(f"wrote {shown(out)}: {progress.ran} steps run, {kept} kept, {time.monotonic() - progress.began:.1f} s")


async def recorded(db: Path, run_id: str) -> tuple[int, bool]:
    """How many steps of the run are recorded, and whether it has succeeded."""
    async with AgentRunner.open(db) as runner:
        try:
            run = await runner.get_run(run_id)
        except UnknownRun:
            return 0, False
        events = await runner.event_bus.get_events(run_id)
        return sum(e.event_type == EventType.STEP_COMPLETED for e in events), run.status is RunStatus.SUCCEEDED


def shown(path: Path) -> str:
    """The path as text that can be printed and stored, whatever bytes it is made of."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text if text.isprintable() else ascii(text)


def discover(folder: Path, besides: Path) -> list[File]:
    """The files that can be read, in order of their paths; what is left out is told."""
    files = []
    for place, folders, names in os.walk(folder, onerror=lambda error: print(f"left out: {error}", file=sys.stderr)):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in ("node_modules", "venv"))
        for path in (Path(place, name) for name in sorted(names) if name[0] != "."):
            if path.suffix in HEADINGS and path != besides:
                try:
                    files.append(examine(path, path.relative_to(folder).as_posix()))
                except (OSError, ValueError) as error:
                    print(f"left out: {shown(path)}: {error}", file=sys.stderr)
    if not files:
        raise FileNotFoundError(f"{shown(folder)} holds no file to read ({', '.join(HEADINGS)})")
    return sorted(files, key=lambda file: file.path)


def examine(path: Path, name: str) -> File:
    if path.is_symlink() or not path.is_file():
        raise ValueError("a link or a device, not a file")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"larger than {LARGEST // 2**20} MB")
    if not name.isprintable():
        raise ValueError("its name holds bytes that cannot be printed")
    content = path.read_bytes()
    if "\0" in content.decode():
        raise ValueError("binary, not text")
    return File(name, len(content), sha256(content).hexdigest())


def analyse(folder: Path, file: File, summarise: Callable[[str], list[str]]) -> Analysis:
    content = (folder / file.path).read_bytes()
    if sha256(content).hexdigest() != file.sha256:
        raise ValueError(f"{file.path} has changed since the files were listed: start again")
    text, suffix = content.decode("utf-8-sig"), Path(file.path).suffix
    text = FENCED.sub("", text) if suffix == ".md" else text
    prose = "\n\n".join(re.findall(r'"""(.*?)"""', text, re.S)) if suffix == ".py" else text
    headings = [" ".join(match[1].replace("`", "").split()) for match in HEADINGS[suffix].finditer(text)]
    links = imports(text) if suffix == ".py" else (RST_LINK if suffix == ".rst" else MD_LINK).findall(text)
    return Analysis(
        file.path, len(prose.split()), len(headings), headings[:MOST_HEADINGS],
        dict(Counter(terms(prose)).most_common(MOST_TERMS)), summarise(prose), sorted(set(links))[:MOST_LINKS],
    )  # fmt: skip


def terms(text: str) -> Iterator[str]:
    return (word for match in WORD.finditer(text) if (word := match[0].lower()) not in COMMON)


def imports(text: str) -> Iterator[str]:
    """What a Python text imports, as dotted names: `from .a import b` gives .a.b, be b a module or not."""
    for origin, names in IMPORT.findall(text):
        for name in re.findall(r"[.\w*]+", re.sub(r"#.*|\bas\s+\w+", "", names)):
            yield f"{origin}.{name}" if origin.strip(".") else origin + name


def key_sentences(text: str, count: int = 3) -> list[str]:
    """The sentences whose words say most, in the text's order: TF-IDF with its sentences as the documents."""
    pieces = dict.fromkeys(" ".join(piece.split()).lstrip("#>*-| ") for piece in SENTENCE_END.split(text))
    sentences = [piece for piece in pieces if 40 <= len(piece) <= 300 and piece[-1] in ".!?"][:MOST_SENTENCES]
    bags = [set(terms(sentence)) for sentence in sentences]
    found = Counter(term for bag in bags for term in bag)
    weights = {term: n * math.log((1 + len(bags)) / n) for term, n in found.items()}
    scores = [math.fsum(weights[term] for term in bag) / math.sqrt(1 + len(bag)) for bag in bags]
    return [sentences[i] for i in sorted(sorted(range(len(bags)), key=lambda i: (-scores[i], i))[:count])]


def asking(client: LLMClient, model: str | None) -> Callable[[str], list[str]]:
    """A `summarise` that asks a model."""

    def summarise(text: str) -> list[str]:
        if not text.strip():
            return []
        wanted = "Say in at most three short sentences, each on a line of its own, what this text says. Only them."
        said = [{"role": "system", "content": wanted}, {"role": "user", "content": text[:MOST_ASKED]}]
        # This is a thread of a step: the client belongs to the loop that waits for it.
        answer = from_thread(client.generate, said, model=model).message["content"] or ""
        return [" ".join(line.split()) for line in answer.splitlines() if line.strip()][:3]

    summarise.__qualname__ = f"{type(client).__qualname__} {model or getattr(client, 'default_model', '')}".strip()
    return summarise


def scripted(messages: list[dict[str, str]]) -> str:
    """Stands in for a model."""
    text = messages[-1]["content"]
    return "\n".join([f"A script has read {len(text.split())} words of it.", *key_sentences(text, count=1)])


def client_for(provider: str | None, mock: bool) -> LLMClient:
    """The client to ask; without a key the program ends with a line that says what to do."""
    if mock:
        return MockLLMClient(response_fn=scripted)
    try:
        return get_llm_client(provider)
    except NotConfigured as error:
        sys.exit(f"digest: no key: set {error.provider.upper()}_API_KEY, or try it without one: --mock, or no --model")
    except MissingDependency as error:
        sys.exit(f"digest: {error}; or try it without: --mock, or no --model")


def merge(analyses: Sequence[Analysis]) -> Overview:
    """TF-IDF over all files, and how they link to each other."""
    found = Counter(term for each in analyses for term in each.terms)
    weights = Counter[str]()
    for each in analyses:
        weights.update(weighed(each, found, len(analyses)))
    linked = Counter(target for targets in link_graph(analyses).values() for target in targets)
    return Overview({term: found[term] for term, _ in weights.most_common(MOST_RANKED)}, dict(linked.most_common(10)))


def weighed(analysis: Analysis, found: Mapping[str, int], files: int) -> Counter[str]:
    """TF-IDF of a file's terms in millionths: whole numbers add up to the same in any order."""
    known = [(term, n) for term, n in analysis.terms.items() if term in found]
    return Counter({term: round((1 + math.log(n)) * math.log((1 + files) / found[term]) * 1e6) for term, n in known})


def link_graph(analyses: Sequence[Analysis]) -> dict[str, list[str]]:
    """Which of the files each file links to or imports."""
    files, graph = {each.path for each in analyses}, {}
    for each in analyses:
        found = {next((path for path in places(each.path, link) if path in files), each.path) for link in each.links}
        graph[each.path] = sorted(found - {each.path})
    return graph


def places(source: str, link: str) -> list[str]:
    """Where the target of a link may be, the likeliest first."""
    here = posixpath.dirname(source)
    if not source.endswith(".py"):
        path = posixpath.normpath(posixpath.join(here, unquote(link.partition("#")[0])))
        return [path + end for end in ("", ".md", ".rst", "/README.md", "/index.md", "/index.rst")]
    names = link.lstrip(".").split(".")
    up = len(link) - len(link.lstrip("."))
    roots = [posixpath.join(here, "../" * (up - 1))] if up else ["", "src"]
    stems = [posixpath.normpath(posixpath.join(root, *part)) for part in (names, names[:-1]) for root in roots]
    return [stem + end for stem in stems for end in (".py", "/__init__.py")]


def render(name: str, analyses: Sequence[Analysis], overview: Overview) -> str:
    words, headings = sum(each.words for each in analyses), sum(each.heading_count for each in analyses)
    graph = link_graph(analyses)
    lines = [
        f"# Digest of `{name}`", "",
        f"{len(analyses)} files, {words} words, {headings} headings, {sum(map(len, graph.values()))} inner links.", "",
        "## Terms", "", *(f"- {term} (in {overview.terms[term]})" for term in list(overview.terms)[:20]), "",
        "## Most linked", "", *(f"- `{path}` (from {count})" for path, count in overview.linked.items()), "",
    ]  # fmt: skip
    for each in analyses:
        best = [term for term, _ in weighed(each, overview.terms, len(analyses)).most_common(6)]
        about = {"Terms": best, "Outline": each.headings[:6], "Links to": graph[each.path]}
        lines += [f"## `{each.path}`", "", f"- {each.words} words, {each.heading_count} headings"]
        lines += [f"- {label}: {', '.join(values)}" for label, values in about.items() if values]
        lines += ["", *(line for sentence in each.sentences for line in (f"> {sentence}", ""))]
    return "\n".join(lines)


def write_atomically(out: Path, text: str) -> None:
    """A reader, or a crash at any moment, finds the old file or the new one, never a part of it."""
    beside = out.with_name(f".{out.name}.tmp")
    with open(beside, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, out)


class Progress:
    """One line that is written over on a terminal; elsewhere about twenty lines in all."""

    def __init__(self, kept: int, total: int) -> None:
        self.kept, self.total, self.ran = kept, total, 0
        self.began, self.lock = time.monotonic(), threading.Lock()  # plain step functions run in threads

    def step(self, what: str) -> None:
        with self.lock:
            self.ran += 1
            at = self.kept + self.ran
            line = f"step {at} of {self.total}, {time.monotonic() - self.began:.1f} s, {self.kept} kept: {what}"
            if sys.stdout.isatty():
                line = f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K"
                print(line, end="\n" if at == self.total else "", flush=True)
            elif at == self.total or at % max(self.total // 20, 1) == 0:
                print(line, flush=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run. A Ctrl-C that came just before the loop would have stopped has left that for its next turn."""
    with asyncio.Runner() as loop:
        try:
            loop.run(work)
        finally:
            turn = loop.get_loop()
            turn.call_soon(turn.stop)
            turn.run_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a digest of a folder of texts; killed, it can go on.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1], help="this repository")
    parser.add_argument("--db", type=Path, default=Path("digest.db"), help="where steps are recorded: digest.db")
    parser.add_argument("--out", type=Path, help="default: digest.md next to the database")
    parser.add_argument("--run-id", help="default: made from the folder and its contents")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="how many files at once: 4")
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS", help="linger on each file, to watch")
    parser.add_argument("--model", help="ask this model what each file is about; default: none, its key sentences")
    parser.add_argument("--provider", help="of the model: openai, anthropic or litellm; default: the configured one")
    parser.add_argument("--mock", action="store_true", help="as with --model, but a script answers: no key, no network")
    options = vars(parser.parse_args())
    folder, db = Path(os.path.realpath(options.pop("folder"))), options.pop("db")
    out = options.pop("out") or db.with_name("digest.md")
    model, provider, mock = (options.pop(name) for name in ("model", "provider", "mock"))
    if not folder.is_dir():
        parser.error(f"{shown(folder)} is not a folder")
    try:
        if model or provider or mock:
            logging.getLogger("agent_runtime_core").setLevel(logging.ERROR)  # nobody here asks for the price of a call
            options["summarise"] = asking(client_for(provider, mock), model)
        run(digest(folder, db, Path(os.path.realpath(out.parent), out.name), **options))
    except (AgentRuntimeError, OSError) as error:
        sys.exit(f"digest: {error}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: start it again to go on")


if __name__ == "__main__":
    main()
