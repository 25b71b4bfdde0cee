"""The files of version 0.5.2: where they are, and whether a directory has any that were not carried over.

    <directory>/memory/<key>.json  conversations/<id>.json  tasks/<id>.json  preferences.json

Ours are in the directory `v1` beside them, in which the file `carried-over.json` says that theirs are, too.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Final

from ..errors import StorageOutdated, StorageTooNew
from .documents.file_directory import told

DIRECTORY: Final = ".agent_runtime"
LAYOUT: Final = 1
CARRIED: Final = "carried-over.json"
FOLDERS: Final = ("memory", "conversations", "tasks")
PREFERENCES: Final = "preferences.json"

_LAYOUT: Final = re.compile(r"v([0-9]{1,9})")


def root_of(directory: str) -> str:
    """Where our documents are in it."""
    return os.path.join(directory, f"v{LAYOUT}")


def old_files(directory: str) -> list[str]:
    """The files of version 0.5.2 in it, by their paths from there."""
    found = [f"{folder}/{name}" for folder in FOLDERS for name in _names(os.path.join(directory, folder))]
    return [*(each for each in found if each.endswith(".json")), *(
        [PREFERENCES] if os.path.lexists(os.path.join(directory, PREFERENCES)) else []
    )]  # fmt: skip


def _names(folder: str) -> list[str]:
    with told(folder):
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


def check_layout(directory: str) -> None:
    """StorageOutdated, StorageTooNew: it has files of another version, which must not pass for none."""
    newer = [name for name in _names(directory) if (layout := _LAYOUT.fullmatch(name)) and int(layout[1]) > LAYOUT]
    if newer:
        raise StorageTooNew(
            f"{os.path.join(directory, newer[-1])} was written by a later version of this library, "
            f"which knows v{LAYOUT}: upgrade agent-runtime-core"
        )
    if os.path.lexists(os.path.join(root_of(directory), CARRIED)):
        return
    if found := old_files(directory):
        place = shlex.quote(os.path.dirname(directory))
        raise StorageOutdated(
            f"{directory} has files of version 0.5.2 ({found[0]} and others, {len(found)} in all), which were not "
            f"carried over yet; nothing was read or written: run agent-runtime carry-over {place}"
        )
