"""A database under a second name: hard links and bind mounts are refused, copies are not."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner, open_run
from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.sqlite import database
from agent_runtime_core.errors import StorageBusy, StorageError
from tests.unit.test_engine_sqlite import get, opened

LINKS = r"b\.db must have one name, got 2 hard links.*Use the name under which it was opened first.*copy it: cp "


async def write(path: Path, key: str) -> None:
    engine = opened(path)
    try:
        await engine.commit(None, [Op("put", (key, 1))])
    finally:
        await engine.close()


async def read(path: Path, key: str) -> object:
    engine = opened(path)
    try:
        return await engine.read(get, key)
    finally:
        await engine.close()


@pytest.fixture
def a(tmp_path: Path) -> Path:
    (tmp_path / "one").mkdir()
    return tmp_path / "one" / "a.db"


@pytest.fixture
def b(tmp_path: Path) -> Path:
    (tmp_path / "two").mkdir()
    return tmp_path / "two" / "b.db"


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_a_second_hard_link_is_refused_and_the_first_name_works_on(a: Path, b: Path, is_open: bool) -> None:
    engine = opened(a)
    await engine.commit(None, [Op("put", ("before", 1))])
    if not is_open:
        await engine.close()
    os.link(a, b)
    for _ in range(2):
        with pytest.raises(StorageError, match=LINKS):
            opened(b)
    assert [each.name for each in b.parent.iterdir()] == ["b.db"], "nothing is created there"
    if is_open:
        await engine.commit(None, [Op("put", ("after", 1))])
        await engine.close()
    await write(a, "again")
    b.unlink()
    assert await read(a, "again") == 1


async def test_other_processes_of_the_first_name_may_come(a: Path, b: Path) -> None:
    await write(a, "x")
    os.link(a, b)
    code = (
        "import sys; from agent_runtime_core._engines.sqlite.engine import SQLiteEngine; SQLiteEngine.open(sys.argv[1])"
    )
    engine = opened(a)
    first, second = (
        subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)
        for name in (str(a), str(b))
    )
    assert (first.returncode, second.returncode) == (0, 1), first.stderr
    assert "must have one name" in second.stderr
    await engine.commit(None, [Op("put", ("y", 1))])
    await engine.close()


async def test_a_link_that_is_left_alone_is_the_file(a: Path, b: Path) -> None:
    await write(a, "x")
    os.link(a, b)
    a.unlink()
    assert await read(b, "x") == 1
    os.link(b, a)
    assert await read(b, "x") == 1, "it is the first name now"


async def test_a_directory_of_links_is_refused(tmp_path: Path, a: Path) -> None:
    """As `cp -al` and the snapshots of `rsync --link-dest` make it: the lock file is a link too."""
    await write(a, "x")
    shutil.copytree(a.parent, tmp_path / "copy", copy_function=os.link)
    with pytest.raises(StorageError, match=r"copy/a\.db must have one name, got 2 hard links"):
        opened(tmp_path / "copy" / "a.db")
    await write(a, "y")


async def test_a_file_that_replaced_one_is_not_taken_for_it(a: Path, b: Path) -> None:
    await write(a, "x")
    await write(b, "x")
    b.unlink()
    os.link(a, b)
    with pytest.raises(StorageError, match=LINKS):
        opened(b)
    await write(a, "y")


async def test_two_links_that_were_never_open_are_both_refused(a: Path, b: Path) -> None:
    sqlite3.connect(a).close()
    a.touch()
    os.link(a, b)
    for path in (a, b):
        with pytest.raises(StorageError, match="must have one name"):
            opened(path)


@pytest.mark.parametrize("how", ["copied", "copied with its directory", "moved", "moved with its directory"])
async def test_what_was_copied_or_moved_while_nothing_had_it_open_is_opened(
    tmp_path: Path, a: Path, b: Path, how: str
) -> None:
    await write(a, "x")
    if how == "copied":
        shutil.copy(a, b)
    elif how == "moved":
        a.rename(b)
    elif how == "copied with its directory":
        b = Path(shutil.copytree(a.parent, tmp_path / "copy")) / a.name
    else:
        b = a.parent.rename(tmp_path / "away") / a.name
    await write(b, "y")
    assert await read(b, "x") == 1
    if a.exists():
        await write(a, "z")
        assert await read(b, "z") is None


async def test_runners_and_open_run_say_the_same(a: Path, b: Path) -> None:
    await write(a, "x")
    os.link(a, b)
    with pytest.raises(StorageError, match=LINKS):
        async with open_run(b, run_id="r"):
            pass
    with pytest.raises(StorageError, match=LINKS):
        AgentRunner.open(b)


async def test_a_symbolic_link_is_the_same_name(a: Path, b: Path) -> None:
    b.symlink_to(a)
    await write(b, "x")
    assert await read(a, "x") == 1
    assert not Path(f"{b}.live").exists()


# -- moved while a process has it open


HOLDS = """
import sys
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
engine = SQLiteEngine.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
engine.close_now()
"""


async def test_a_file_that_was_moved_while_it_is_open_is_refused_until_it_is_closed(a: Path, b: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(a)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        a.rename(b)
        for _ in range(2):
            with pytest.raises(StorageBusy, match=r"b\.db is in use, but not under this name"):
                opened(b)
        assert [each.name for each in b.parent.iterdir()] == ["b.db"]
        process.communicate("")
    await write(b, "x")


@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_a_program_that_has_a_copied_file_open_does_not_keep_us_from_it(a: Path, b: Path, mode: str) -> None:
    await write(a, "x")
    shutil.copy(a, b)
    with contextlib.closing(sqlite3.connect(b, isolation_level=None)) as other:
        other.execute(f"PRAGMA journal_mode={mode}")
        assert other.execute("SELECT value FROM arc_things").fetchone() == (1,)
        assert await read(b, "x") == 1


async def test_several_processes_open_a_copied_file_at_the_same_time(a: Path, b: Path) -> None:
    await write(a, "x")
    shutil.copy(a, b)
    command = [sys.executable, "-c", HOLDS, str(b)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(4)
        ]
        assert [each.stdout.readline() for each in processes if each.stdout] == ["open\n"] * 4
        for each in processes:
            each.communicate("")


CHECKS = """
import sys
from agent_runtime_core._engines.sqlite.database import check_unused
print("ready", flush=True)
sys.stdin.readline()
check_unused(sys.argv[1], sys.argv[1] + ".live")
print("unused", flush=True)
"""


async def test_processes_that_check_a_file_at_the_same_time_do_not_block_each_other(a: Path, b: Path) -> None:
    """Each had a read lock and waited for the others to release theirs, so that all of them failed."""
    await write(a, "x")
    shutil.copy(a, b)
    command = [sys.executable, "-c", CHECKS, str(b)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(6)
        ]
        assert [each.stdout.readline() for each in processes if each.stdout] == ["ready\n"] * 6
        for each in processes:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()
        assert [each.communicate()[0] for each in processes] == ["unused\n"] * 6


# -- mounts


@pytest.mark.parametrize("name", ["a.db", "sp ace.db", "back\\slash.db", "new\nline.db", "tab\t.db"])
async def test_a_file_that_is_a_mount_point_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, mounts = tmp_path / name, tmp_path / "mountinfo"
    await write(path, "x")
    shown = str(path)
    for special, octal in (("\\", "134"), (" ", "040"), ("\t", "011"), ("\n", "012")):
        shown = shown.replace(special, f"\\{octal}")
    line = "36 35 98:0 /mnt1/a.db {} rw,noatime master:1 - ext3 /dev/root rw\n"
    monkeypatch.setattr(database, "MOUNTS", mounts)
    mounts.write_text(line.format(tmp_path) + line.format(f"{shown}.other"))
    assert await read(path, "x") == 1, "its directory may be one"
    mounts.write_text(line.format("/") + line.format(shown))
    with pytest.raises(
        StorageError, match=r"(?s)must not be a separate mount point.*Mount the directory, not the file"
    ):
        opened(path)
    mounts.unlink()
    assert await read(path, "x") == 1, "a system without the table"


MOUNT = """
set -e
mount --bind "$1" "$2"
exec "$3" -c "
import sys
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
SQLiteEngine.open(sys.argv[1]).close_now()
print('opened')" "$4"
"""


def in_a_mount(source: Path, target: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Open `path` where `source` is mounted on `target`, in a mount namespace of its own."""
    command = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", source, target, sys.executable, path]
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=60)
        if "mount:" not in done.stderr and "unshare:" not in done.stderr:
            return done
    pytest.skip("mounts need root, unshare and mount")


async def test_a_bind_mount_of_the_file_is_refused_in_its_namespace(a: Path, b: Path) -> None:
    engine = opened(a)
    await engine.commit(None, [Op("put", ("x", 1))])
    b.touch()
    done = in_a_mount(a, b, b)
    assert "b.db must not be a separate mount point" in done.stderr
    assert [each.name for each in b.parent.iterdir()] == ["b.db"]
    await engine.commit(None, [Op("put", ("y", 1))])
    await engine.close()


async def test_a_bind_mount_of_the_directory_is_fine(a: Path, b: Path) -> None:
    engine = opened(a)
    await engine.commit(None, [Op("put", ("x", 1))])
    done = in_a_mount(a.parent, b.parent, b.parent / a.name)
    assert done.stdout == "opened\n", done.stderr
    await engine.commit(None, [Op("put", ("y", 1))])
    await engine.close()
    assert await read(a, "y") == 1
