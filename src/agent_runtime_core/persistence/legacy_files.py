"""Find the files of version 0.5.2, and check whether they were migrated.

    <directory>/memory/<key>.json  conversations/<id>.json  tasks/<id>.json  preferences.json

The present files are in `<directory>/v1`. The file `v1/carried-over.json` exists once the old files were migrated.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Final

from ..errors import StorageOutdated, StorageTooNew
from .documents.file_directory import storage_errors

DIRECTORY: Final = ".agent_runtime"
LAYOUT: Final = 1
CARRIED: Final = "carried-over.json"
FOLDERS: Final = ("memory", "conversations", "tasks")
PREFERENCES: Final = "preferences.json"

_LAYOUT: Final = re.compile(r"v([0-9]{1,9})")


def root_of(directory: str) -> str:
    """Return the directory with the present documents."""
    return os.path.join(directory, f"v{LAYOUT}")


def old_files(directory: str) -> list[str]:
    """Return the files of version 0.5.2, relative to the directory."""
    found = [f"{folder}/{name}" for folder in FOLDERS for name in _names(os.path.join(directory, folder))]
    return [
        *(each for each in found if each.endswith(".json")),
        *([PREFERENCES] if os.path.lexists(os.path.join(directory, PREFERENCES)) else []),
    ]


def _names(folder: str) -> list[str]:
    with storage_errors(folder):
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


def check_layout(directory: str) -> None:
    """Reject a directory with files of another version. Reading it would look as if it was empty.

    Raises:
        StorageOutdated: It has files of version 0.5.2 that were not migrated.
        StorageTooNew: It has files of a later version.
    """
    newer = [name for name in _names(directory) if (layout := _LAYOUT.fullmatch(name)) and int(layout[1]) > LAYOUT]
    if newer:
        raise StorageTooNew(
            f"{os.path.join(directory, newer[-1])} was written by a later version of this library, "
            f"this one reads v{LAYOUT}. Upgrade agent-runtime-core."
        )
    if os.path.lexists(os.path.join(root_of(directory), CARRIED)):
        return
    if found := old_files(directory):
        project = shlex.quote(os.path.dirname(directory))
        raise StorageOutdated(
            f"{directory} has {len(found)} files of version 0.5.2 that were not migrated, such as {found[0]}. Nothing "
            f"was read or written. Run agent-runtime carry-over {project}"
        )
