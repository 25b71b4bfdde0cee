"""Two hundred edits under load: half of them broken, one event for each change, and no reader sees a mixture."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent_runtime_core.portal import in_thread
from agent_runtime_core.turns import ConfigChanged, ConfigLoader, PersonalityPackManager, Settings
from agent_runtime_core.turns.personality import PackSet

EDITS = 200


class Files:
    """config.toml and a pack, each good version of which says its number in two places."""

    def __init__(self, home: Path) -> None:
        self.home, self.config, self.packs = home, home / "config.toml", home / "packs"
        (self.packs / ".versions").mkdir(parents=True)
        self._ways = itertools.cycle([self._in_place, self._replaced])
        self.good_config(0)
        self.good_pack(0)

    def _in_place(self, text: str) -> None:
        self.config.write_text(text)

    def _replaced(self, text: str) -> None:
        new = self.home / "config.new"
        new.write_text(text)
        new.replace(self.config)

    def _text(self, number: int) -> str:
        return (
            f"[runtime]\nretry_backoff_max = {number}\n"
            '[personality]\nfolder = "packs"\n'
            f"[turns]\nremote_steps = false\nmax_in_flight = {number + 1}\n"
        )

    def good_config(self, number: int) -> None:
        if self.config.is_dir():
            self.config.rmdir()
        next(self._ways)(self._text(number))

    def good_pack(self, number: int) -> None:
        """Both files of the pack at once, as a link that is replaced."""
        home = self.packs / ".versions" / str(number)
        home.mkdir()
        (home / "pack.toml").write_text(f'name = "helper"\nmodel = "m-{number}"\nsystem = "system.md"\n')
        (home / "system.md").write_text(str(number))
        link = self.home / "link"
        link.symlink_to(Path(".versions") / str(number))
        here = self.packs / "helper"
        if here.is_dir() and not here.is_symlink():
            shutil.rmtree(here)
        os.replace(link, here)

    def broken_config(self, kind: int, number: int) -> None:
        text = self._text(number)
        if self.config.is_dir():
            self.config.rmdir()
        match kind:
            case 0:
                self.config.write_text(text[:-4])  # ends with "max_in_flight ="
            case 1:
                next(self._ways)(text.replace(f"= {number}\n", '= "many"\n', 1))
            case 2:
                next(self._ways)(text.replace("remote_steps", "remote_stps"))
            case 3:
                self.config.unlink(missing_ok=True)
            case _:
                self.config.unlink(missing_ok=True)
                self.config.mkdir()

    def broken_pack(self, kind: int, number: int) -> None:
        """Each kind in a folder of its own, so that no good version is touched."""
        home = self.packs / ".versions" / f"broken-{number}"
        home.mkdir()
        good = f'name = "helper"\nmodel = "m-{number}"\nsystem = "system.md"\n'
        texts = [good[:-3], good.replace(f'"m-{number}"', "7"), f"modl = 1\n{good}", good, ""]
        (home / "pack.toml").write_text(texts[kind])
        if kind != 3:
            (home / "system.md").write_text(str(number))
        link = self.home / "link"
        link.symlink_to(Path(".versions") / home.name)
        os.replace(link, self.packs / "helper")


def number_of(settings: Settings) -> tuple[int, int]:
    """The numbers of the file and the pack that these settings are of; AssertionError where they are of two."""
    assert settings.turns.max_in_flight == settings.runtime.retry_backoff_max + 1
    instance = settings.packs.get()
    assert instance.model == settings.runtime.default_model == f"m-{instance.system_prompt}"
    return int(settings.runtime.retry_backoff_max), pack_number(settings.packs)


def pack_number(packs: PackSet) -> int:
    instance = packs.get()
    assert instance.model == f"m-{instance.system_prompt}"
    return int(instance.system_prompt)


class Readers:
    """Eight readers, half of them threads and half of them tasks, which take settings and packs until told to stop."""

    def __init__(self, loader: ConfigLoader, manager: PersonalityPackManager) -> None:
        self._loader, self._manager = loader, manager
        self.over = threading.Event()
        self.failures: list[BaseException] = []
        self.looks = [0] * 8

    def _look(self, number: int, last: tuple[int, int]) -> tuple[int, int]:
        now = number_of(self._loader.current)
        assert now >= last, "an older one came back"
        pack_number(self._manager.current)
        self.looks[number] += 1
        return now

    def _thread(self, number: int) -> None:
        last = (0, 0)
        try:
            while not self.over.wait(0.0002 * number):  # one that never pauses, and others that do
                last = self._look(number, last)
        except BaseException as failure:  # noqa: BLE001 - told to the test
            self.failures.append(failure)

    async def _task(self, number: int) -> None:
        last = (0, 0)
        while not self.over.is_set():
            last = self._look(number, last)
            await asyncio.sleep(0)

    async def during(self, work: Callable[[], None]) -> None:
        """Do the work in a thread while all of them read."""
        threads = [threading.Thread(target=self._thread, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        tasks = [asyncio.create_task(self._task(number)) for number in range(4, 8)]
        try:
            await in_thread(work)
        finally:
            self.over.set()
            for thread in threads:
                thread.join()
        await asyncio.gather(*tasks)
        assert self.failures == []
        assert min(self.looks) > 0


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    """Else one that reads files waits 5 ms for each of those that never pause."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.sentence("001", "ConfigLoader: atomic swap; last-good fallback")
@pytest.mark.parametrize("meddling", [False, True], ids=["alone", "beside another thread that reloads"])
async def test_two_hundred_edits_under_load(tmp_path: Path, meddling: bool) -> None:
    files = Files(tmp_path)
    loader, manager = ConfigLoader(files.config, environ={}), PersonalityPackManager(files.packs)
    events, good, readers = list[ConfigChanged](), [0, 0], Readers(loader, manager)
    # In a thread, where there is no loop: called by whoever reloads, one event at a time.
    await in_thread(lambda: loader.subscribe(events.append))

    def edit() -> None:
        for number in range(1, EDITS + 1):
            which, kind = number // 2 % 2, number // 4 % 5
            if number % 2:
                (files.good_pack if which else files.good_config)(number)
                good[which] = number
            else:
                (files.broken_pack if which else files.broken_config)(kind, number)
            before = loader.current
            changed = [loader.reload(), manager.reload()]
            if not meddling:
                assert changed == [bool(number % 2), bool(number % 2 and which)]
                assert (loader.current is before) == (number % 2 == 0)
            assert number_of(loader.current) == tuple(good)
            assert pack_number(manager.current) == good[1]
            if number % 2 == 0:
                assert loader.last_error is not None

    def reload_too() -> None:
        while not readers.over.is_set():
            loader.reload()
            manager.reload()

    meddler = threading.Thread(target=reload_too)
    if meddling:
        meddler.start()
    await readers.during(edit)
    if meddling:
        meddler.join()
    assert [event.version for event in events] == list(range(2, EDITS // 2 + 2))
    assert loader.current.version == EDITS // 2 + 1
