"""Where readers of other processes are in the events of a run: files in `<database>.live/`, which need no commit.

Each reader has a file `<run id>.readers/<reader>` with the sequence up to which it has read, and when. What a power
failure loses is not needed any more.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from ..._core.clock import Clock
from ...errors import StorageError
from ..base import READER_SECONDS
from .live_directory import make_directory, open_lock, remove

FORGOTTEN: Final = 60.0  # seconds after which the file of a reader that was killed is deleted
_SIZE: Final = 64


class ReaderFiles:
    """The reports of readers, of this process and of others.

    Args:
        path: The database file.
        clock: Its boot time is the same in all processes of this machine.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path, self._directory, self._clock = path, Path(f"{path}.live"), clock
        self._open: dict[tuple[str, str], int] = {}

    def report(self, run_id: str, reader: str, sequence: int) -> None:
        """Note that a reader of this process has read up to this sequence."""
        fd = self._open.get((run_id, reader))
        if fd is None:
            make_directory(self._of(run_id), self._path)
            fd = self._open[run_id, reader] = open_lock(self._of(run_id) / reader, os.O_CREAT)
        os.pwrite(fd, f"{sequence:020d} {self._clock.boot():020.6f}".encode(), 0)

    def withdraw(self, run_id: str, reader: str) -> None:
        """Note that a reader of this process does not read any more."""
        fd = self._open.pop((run_id, reader), None)
        if fd is not None:
            os.close(fd)
            self._delete(run_id, reader)

    def read(self, run_id: str) -> dict[str, int]:
        """Return the sequences of the readers that have reported within the last 2 seconds."""
        now, found = self._clock.boot(), dict[str, int]()
        with contextlib.suppress(FileNotFoundError):
            for reader in os.listdir(self._of(run_id)):
                sequence, at = self._read(self._of(run_id) / reader)
                if now - at <= READER_SECONDS:
                    found[reader] = sequence
                elif now - at > FORGOTTEN:
                    self._delete(run_id, reader)
        return found

    def close(self) -> None:
        """Withdraw all readers of this process."""
        for run_id, reader in [*self._open]:
            self.withdraw(run_id, reader)

    def _of(self, run_id: str) -> Path:
        return self._directory / f"{run_id}.readers"

    def _read(self, path: Path) -> tuple[int, float]:
        """Return what a file says; a file without a report is as old as the machine."""
        try:
            fd = open_lock(path)
        except (OSError, StorageError):
            return 0, self._clock.boot()
        try:
            sequence, _, at = os.read(fd, _SIZE).partition(b" ")
            return int(sequence), float(at)
        except ValueError:
            return 0, 0.0
        finally:
            os.close(fd)

    def _delete(self, run_id: str, reader: str) -> None:
        remove(self._of(run_id) / reader)
        with contextlib.suppress(OSError):  # there are others
            os.rmdir(self._of(run_id))
