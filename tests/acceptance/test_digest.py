"""examples/digest.py, the main job: killed at any moment it goes on, and the digest is the same to the byte."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pty
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner, EventType, StepExecutionError
from examples import digest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "digest.py"
log = logging.getLogger(__name__)
CONCURRENCY = 4
#: Runs the example with a line in a log for every text that is analysed, written as it is analysed.
WATCHED = """
import os, re, sys
sys.path.insert(0, sys.argv.pop(1))
import digest
log = os.open(sys.argv.pop(1), os.O_APPEND | os.O_CREAT | os.O_WRONLY)
told = digest.key_sentences
def key_sentences(text):
    os.write(log, re.search(r"Note (\\d+)", text)[1].encode() + b"\\n")
    return told(text)
digest.key_sentences = key_sentences
digest.main()
"""


def write_notes(folder: Path, count: int) -> None:
    """Notes of all four kinds that link to each other, in folders of ten."""
    topics = ["rivers", "gardens", "lighthouses", "violins", "glaciers", "bakeries", "telescopes", "harbours"]
    for i in range(count):
        topic, other = topics[i % 8], topics[i * 3 % 7]
        said = f"Note {i} tells at length what is known about {topic}. Nobody compared it with {other} before note {i}."
        place = folder / f"part{i // 10:02}"
        place.mkdir(parents=True, exist_ok=True)
        after = (i + 4) // 10
        match i % 4:
            case 0:
                text = f"# Note {i}\n\n{said}\n\nSee [the next](../part{after:02}/note{i + 4:03}.md#top).\n"
            case 1:
                text = f"Note {i}\n=======\n\n{said}\n\nSee `that <note{i + 4:03}.rst>`_.\n"
            case 2:
                text = f'"""{said}"""\n\nfrom .note{i + 4:03} import about\n\ndef about() -> None: ...\n'
            case _:
                text = f"Note {i}\n\n{said}\n"
        (place / f"note{i:03}{('.md', '.rst', '.py', '.txt')[i % 4]}").write_text(text)


def run(*arguments: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done


class Job:
    """The example over one folder, in processes that are killed."""

    def __init__(self, folder: Path, place: Path, slow: float) -> None:
        self.db, self.out, self.log = place / "digest.db", place / "digest.md", place / "analysed.log"
        self.said = place / "said.txt"
        self.command = [sys.executable, "-c", WATCHED, str(SCRIPT.parent), str(self.log), str(folder)]
        self.command += ["--db", str(self.db), "--slow", str(slow), "--concurrency", str(CONCURRENCY)]
        paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        self.numbers = [int(re.findall(r"\d+", path)[-1]) for path in paths]
        self.run_id: str | None = None
        self.log.touch()

    def analysed(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()]

    def begin(self) -> subprocess.Popen[bytes]:
        with open(self.said, "wb") as said:
            return subprocess.Popen(self.command, stdout=said, stderr=subprocess.STDOUT)

    def live(self, analyses: int, then: float) -> bool:
        """One life, ended by SIGKILL `then` seconds after `analyses` more were begun; False if it finished before."""
        enough, process = len(self.analysed()) + analyses, self.begin()
        try:
            until = time.monotonic() + 30
            while process.poll() is None and len(self.analysed()) < enough:
                assert time.monotonic() < until, self.said.read_text()
                time.sleep(0.001)
            time.sleep(then)
        finally:
            process.kill()
            process.wait()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, self.said.read_text()
        return process.returncode == -signal.SIGKILL

    async def recorded(self) -> set[int]:
        """The notes whose analysis is recorded, and -1 for the merge."""
        if (found := re.match(r"run (\S+):", self.said.read_text())) is not None:
            self.run_id = found[1]
        if self.run_id is None:
            return set()
        async with AgentRunner.open(self.db) as runner:
            events = await runner.event_bus.get_events(self.run_id)
        done = [event.payload for event in events if event.event_type == EventType.STEP_COMPLETED]
        steps = [-1 if each["step_name"] == "merge" else self.numbers[each["step_index"]] for each in done]
        assert len(steps) == len(set(steps)), "a step was recorded twice"
        return set(steps)

    def running(self) -> bool:
        """Whether a process has the run."""
        uri = f"{self.db.as_uri()}?mode=ro"
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(uri, uri=True)) as conn:
            return bool(conn.execute("SELECT 1 FROM arc_runs WHERE status = 'running'").fetchone())
        return False

    def kept(self) -> int | None:
        """What the last process said it kept; None if it was killed before it could say so, or had nothing to do."""
        said = re.search(r"(\d+) of \d+ steps kept", self.said.read_text())
        return None if said is None else int(said[1])


def kill_and_go_on(tmp_path: Path, files: int, kills: int, slow: float, seed: int) -> None:
    folder, plain, rng = tmp_path / "notes", tmp_path / "plain", random.Random(seed)
    write_notes(folder, files)
    plain.mkdir()
    run(folder, cwd=plain)
    expected = (plain / "digest.md").read_bytes()
    job, killed, lives, recorded = Job(folder, tmp_path, slow), 0, 0, set[int]()
    while killed < kills:
        lives += 1
        assert lives < 2 * kills
        before, most = len(job.analysed()), 2 * (files - len(recorded)) // (kills - killed)
        # One life in five falls at any moment from the start of the process on, the others while it analyses.
        early = rng.random() < 0.2 or most <= 0
        killed += job.live(0 if early else rng.randint(0, most), rng.uniform(0, 0.3 if early else 0.01))
        again = recorded.intersection(job.analysed()[before:])
        assert not again, f"recorded and analysed again: {again}"
        assert job.kept() in (None, len(recorded))
        now = asyncio.run(job.recorded())
        assert now >= recorded, f"recorded and gone: {recorded - now}"
        recorded = now
        assert not job.out.exists() or job.out.read_bytes() == expected
    assert job.begin().wait() == 0
    assert job.kept() in (None, len(recorded))
    assert job.out.read_bytes() == expected
    counts = Counter(job.analysed())
    repeated = counts.total() - files
    assert set(counts) == set(range(files))
    assert max(counts.values()) <= 1 + killed
    assert repeated <= killed * CONCURRENCY
    log.info("%d files, %d kills in %d lives, %d analyses repeated, at most %d of one file",
             files, killed, lives, repeated, max(counts.values()))  # fmt: skip


def test_killed_8_times_it_writes_the_same_digest(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, files=60, kills=8, slow=0.01, seed=8)


@pytest.mark.slow
def test_killed_50_times_over_240_files_it_writes_the_same_digest(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, files=240, kills=50, slow=0.01, seed=50)


@pytest.mark.parametrize("moment", ["before it is written", "before it is renamed", "before the run is ended"])
def test_killed_while_the_digest_is_written_it_writes_it_again(tmp_path: Path, moment: str) -> None:
    folder, out = tmp_path / "notes", tmp_path / "digest.md"
    write_notes(folder, 6)
    out.write_text("old")
    named = {"before it is written": "digest.render", "before it is renamed": "os.replace"}
    dying = (
        "import os, signal, sys; sys.path.insert(0, sys.argv.pop(1)); import digest; write = digest.write_atomically\n"
    )
    dying += f"def die(*_): os.kill(os.getpid(), {signal.SIGKILL.value})\n"
    dying += f"{named.get(moment, 'digest.write_atomically')} = "
    dying += "die\n" if moment in named else "lambda *given: die(write(*given))\n"
    dead = subprocess.run(
        [sys.executable, "-c", dying + "digest.main()", SCRIPT.parent, folder], cwd=tmp_path, check=False
    )
    assert dead.returncode == -signal.SIGKILL
    assert (out.read_text() == "old") == (moment in named)
    assert "7 of 7 steps kept from before" in run(folder, cwd=tmp_path).stdout
    again = out.read_bytes()
    assert not list(tmp_path.glob(".digest.md*"))
    run(folder, "--run-id", "plain", cwd=tmp_path)
    assert out.read_bytes() == again


# -- the command


def test_the_default_folder_is_this_repository(tmp_path: Path) -> None:
    said = run(cwd=tmp_path).stdout
    files = int(re.findall(r": (\d+) files in ", said)[0])
    assert f"wrote {tmp_path / 'digest.md'}: {files + 1} steps run, 0 kept" in said
    written = (tmp_path / "digest.md").read_text()
    assert "## `README.md`" in written
    assert "## `src/agent_runtime_core/_execution/claim_writer.py`" in written
    # Elsewhere than on a terminal: about twenty lines of progress, the last one of the last step.
    steps = re.findall(r"^step (\d+) of (\d+), [\d.]+ s, 0 kept: \S+$", said, re.M)
    assert 20 <= len(steps) <= 41
    assert steps[-1] == (str(files + 1), str(files + 1))


def test_a_finished_run_is_written_again_from_the_journal(tmp_path: Path) -> None:
    write_notes(tmp_path, 12)
    run(tmp_path, cwd=tmp_path)
    out = tmp_path / "digest.md"
    written = out.read_bytes()
    for text in ("lost", "damaged"):
        out.unlink() if text == "lost" else out.write_text(text)
        said = run(tmp_path, cwd=tmp_path).stdout
        assert "12 files" in said
        assert "finished before, no step runs again" in said
        assert "0 steps run, 13 kept" in said
        assert out.read_bytes() == written
    assert not list(tmp_path.glob(".digest.md*"))


def test_a_changed_folder_is_another_run(tmp_path: Path) -> None:
    write_notes(tmp_path, 3)
    first = run(tmp_path, cwd=tmp_path).stdout
    (tmp_path / "more.md").write_text("# More\n")
    second = run(tmp_path, "--run-id", "mine", cwd=tmp_path).stdout
    third = run(tmp_path, cwd=tmp_path).stdout
    assert "5 steps run, 0 kept" in second
    assert second.startswith("run mine: ")
    assert "5 steps run, 0 kept" in third
    assert third.split()[1] != first.split()[1]
    (tmp_path / "more.md").write_text("# Other\n")
    assert (
        "'mine' was used before with another input." in run(tmp_path, "--run-id", "mine", cwd=tmp_path, code=1).stderr
    )


def test_what_cannot_be_read_is_left_out_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    write_notes(folder, 1)
    (folder / "binary.md").write_bytes(b"a\0b")
    (folder / "latin.txt").write_bytes("Café".encode("latin-1"))
    (folder / "loop").symlink_to(folder, target_is_directory=True)
    (folder / "self.md").symlink_to("self.md")
    (folder / "line\nbreak\x1b.md").write_text("x")
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.md"))).write_text("x")
    os.mkfifo(folder / "pipe.rst")
    with open(folder / "huge.txt", "wb") as huge:
        huge.truncate(40 * 2**20)
    (folder / ".hidden.md").write_text("x")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.md").write_text("x")
    (folder / "picture.png").write_bytes(b"x")
    done = run(folder, cwd=tmp_path)
    assert ": 1 files in " in done.stdout
    told = dict(line.removeprefix("left out: ").split(": ", 1) for line in done.stderr.splitlines())
    assert {path.rsplit("/")[-1]: why for path, why in told.items()} == {
        "binary.md": "binary, not text",
        "huge.txt": "larger than 32 MB",
        "latin.txt": "'utf-8' codec can't decode byte 0xe9 in position 3: unexpected end of data",
        "line\\nbreak\\x1b.md'": "its name holds bytes that cannot be printed",
        "pipe.rst": "a link or a device, not a file",
        "self.md": "a link or a device, not a file",
        "\\xff.md": "its name holds bytes that cannot be printed",
    }


@pytest.mark.parametrize(
    ("name", "unit", "words"),
    [
        ("large.md", "Ten words make one sentence of this rather large file.\n", 1_818_180),
        ("large.md", "[", 1),
        ("large.rst", "`a <", 2_500_001),
        ("large.py", "import (", 0),
        pytest.param("large.txt", "x", 1, marks=pytest.mark.slow),
        pytest.param("large.md", "```python\n", 1_000_000, marks=pytest.mark.slow),
        pytest.param("large.py", '"""', 0, marks=pytest.mark.slow),
    ],
)
def test_a_file_of_10_mb_is_analysed_in_time(tmp_path: Path, name: str, unit: str, words: int) -> None:
    (tmp_path / name).write_text(unit * (10_000_000 // len(unit)))
    run(tmp_path, cwd=tmp_path)
    assert f"- {words} words, 0 headings" in (tmp_path / "digest.md").read_text()


def test_what_is_wrong_with_the_arguments_is_said_in_a_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "note.md").write_text("x")
    cases: list[tuple[int, str, list[str]]] = [
        (1, f"digest: {empty} holds no file to read (.md, .py, .rst, .txt)", [str(empty)]),
        (2, f"digest.py: error: {tmp_path / 'nowhere'} is not a folder", ["nowhere"]),
        (2, f"digest.py: error: {tmp_path / 'note.md'} is not a folder", ["note.md"]),
        (1, "max_concurrency must be an integer of at least 1, got 0", [".", "--concurrency", "0"]),
        (1, "must be in a directory that exists, got 'nowhere/digest.db'", [".", "--db", "nowhere/digest.db"]),
        (1, "No such file or directory: 'nowhere", [".", "--out", "nowhere/digest.md"]),
    ]
    for code, message, arguments in cases:
        told = run(*arguments, cwd=tmp_path, code=code).stderr.splitlines()
        assert (
            message.replace("'nowhere", f"'{tmp_path}/nowhere" if "directory:" in message else "'nowhere") in told[-1]
        )
        assert "Traceback" not in told[0]


def test_on_a_terminal_the_progress_is_one_line_written_over(tmp_path: Path) -> None:
    write_notes(tmp_path, 5)
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, SCRIPT, tmp_path], cwd=tmp_path, stdout=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # what Linux says when the other end is closed
            break
        if not piece:
            break
        text += piece
    os.close(ours)
    assert process.wait() == 0
    lines = text.decode().replace("\r\n", "\n").splitlines(keepends=True)
    shown = "".join(lines).split("\n")
    assert len(shown) == 4
    steps = shown[1].split("\r")[1:]
    assert [step.split(",")[0] for step in steps] == [f"step {n} of 6" for n in range(1, 7)]
    assert all(step.endswith("\x1b[K") and len(step) < 80 + 3 for step in steps)


def test_interrupted_it_says_how_to_go_on_and_goes_on(tmp_path: Path) -> None:
    files = 240  # in half a minute
    write_notes(tmp_path / "notes", files)
    job = Job(tmp_path / "notes", tmp_path, slow=0.5)
    process = job.begin()
    while len(job.analysed()) < 8:
        assert process.poll() is None, job.said.read_text()
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    job.command[job.command.index("--slow") + 1] = "0"  # the rest may be quick
    assert process.wait() == 1
    # A file whose analysis was under way in a thread may still tell of its end after that.
    assert "\ninterrupted: start it again to go on\n" in job.said.read_text()
    recorded = asyncio.run(job.recorded())
    assert 1 <= len(recorded) < files
    assert job.begin().wait() == 0
    assert job.kept() == len(recorded)
    assert max(Counter(job.analysed()).values()) <= 2


def test_of_two_at_once_one_is_told_that_the_run_is_held(tmp_path: Path) -> None:
    write_notes(tmp_path / "notes", 8)
    job = Job(tmp_path / "notes", tmp_path, slow=30)
    process = job.begin()
    try:
        while not job.running():
            assert process.poll() is None, job.said.read_text()
            time.sleep(0.001)
        held = subprocess.run(job.command, capture_output=True, text=True, timeout=30, check=False)
        assert held.returncode == 1
        assert f"is already running in open_run-{process.pid}" in held.stderr
    finally:
        process.kill()
        process.wait()


# -- the parts


async def test_what_summarise_says_is_recorded_and_not_asked_for_again(tmp_path: Path) -> None:
    folder, asked, broken = tmp_path / "notes", list[str](), True
    write_notes(folder, 6)

    def model(text: str) -> list[str]:
        asked.append(re.findall(r"Note \d+", text)[0])
        if broken and len(asked) == 4:
            raise ConnectionError("the model is away")
        return [f"A model read {asked[-1]}."]

    async def work() -> str:
        out = tmp_path / "digest.md"
        await digest.digest(folder, tmp_path / "digest.db", out, concurrency=1, summarise=model)
        return out.read_text()

    with pytest.raises(StepExecutionError, match="the model is away"):
        await work()
    broken = False
    text = await work()
    assert sorted(asked) == sorted([*(f"Note {i}" for i in range(6)), asked[3]])
    assert all(f"> A model read Note {i}." in text for i in range(6))
    assert await work() == text
    assert len(asked) == 7


async def test_a_file_that_changes_under_the_job_stops_it(tmp_path: Path) -> None:
    write_notes(tmp_path, 5)

    def meddler(text: str) -> list[str]:
        for path in tmp_path.rglob("*.txt"):
            path.write_text("Something else.")
        return []

    with pytest.raises(StepExecutionError, match=r"note003\.txt has changed since the files were listed: start again"):
        await digest.digest(tmp_path, tmp_path / "d.db", tmp_path / "d.md", concurrency=1, summarise=meddler)
    assert not (tmp_path / "d.md").exists()


async def test_the_digest_tells_words_headings_terms_and_links(tmp_path: Path) -> None:
    texts = {
        "guide.md": "# Guide to `rivers`\n\nRivers carry water from the mountains down to the sea. So they do.\n\n"
        "```python\n# no heading\n```\n\nSee [the sea](deep/sea%20side.rst#top), [home]: no, [web](https://example.org/x).\n"
        "\n## Mountains\n\n[code]: pkg/main.py\n",
        "deep/sea side.rst": "The sea\n=======\n\nThe guide is :doc:`../guide` and `this <nowhere.rst>`_.\n",
        "pkg/__init__.py": "",
        "pkg/main.py": '"""Main things happen in this module and nowhere else."""\n\nimport json as other, pkg.side\n'
        "from . import (\n    side as b,  # why\n)\nfrom ..top import *\n\nclass A:\n    def b(self): ...\n",
        "pkg/side.py": "from pkg import main\n",
        "top.py": "from pkg.main import A\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    await digest.digest(tmp_path, tmp_path / "d.db", tmp_path / "d.md")
    _, _, about = (tmp_path / "d.md").read_text().partition("## Most linked\n\n")
    linked, *parts = about.split("\n\n## ")
    assert linked.splitlines()[0] == "- `pkg/main.py` (from 3)"
    told = {part.partition("\n")[0].strip("`"): part.splitlines()[2:] for part in parts}
    assert list(told) == sorted(texts)
    assert "- Outline: Guide to rivers, Mountains" in told["guide.md"]
    assert "- Links to: deep/sea side.rst, pkg/main.py" in told["guide.md"]
    assert "> Rivers carry water from the mountains down to the sea." in told["guide.md"]
    assert told["guide.md"][1].startswith("- Terms: rivers")
    assert told["deep/sea side.rst"][0] == "- 10 words, 1 headings"
    assert "- Links to: guide.md" in told["deep/sea side.rst"]
    assert "- Outline: class A, def b" in told["pkg/main.py"]
    assert "- Links to: pkg/side.py, top.py" in told["pkg/main.py"]
    assert "- Links to: pkg/main.py" in told["pkg/side.py"]
    assert "- Links to: pkg/main.py" in told["top.py"]
    assert told["pkg/__init__.py"][0] == "- 0 words, 0 headings"


def test_the_digest_is_replaced_whole_once_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calls = tmp_path / "digest.md", list[str]()
    out.write_text("old")
    sync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        assert os.fstat(fd).st_size == 3
        assert out.read_text() == "old"
        calls.append("fsync")
        sync(fd)

    def replaced(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    digest.write_atomically(out, "new")
    assert calls == ["fsync", "replace"]
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("digest.md", "new")]


def test_key_sentences_are_those_that_say_most() -> None:
    filler = " ".join(f"Sentence number {word} is here for filling up the text." for word in ("one", "two", "three"))
    said = "The lighthouse keeper repaired the lighthouse lamp during winter."
    assert digest.key_sentences(f"{filler} {said} {filler} {said}", count=1) == [said]
    assert digest.key_sentences("Short. No end and much too few words") == []
