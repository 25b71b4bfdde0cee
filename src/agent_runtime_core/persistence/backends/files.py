"""The six stores in files: in the directory of a project, and in the home directory of the user."""

from __future__ import annotations

import os
import re
import shlex
from functools import partial
from typing import Any, Final, Unpack, cast

from ..._core.clock import Clock
from ..._core.ids import path_text
from ..._core.validation import must
from ...errors import StorageOutdated, StorageTooNew
from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome, HomeOptions
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import MAX_VECTORS, StoredKnowledge, StoredMemory, StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.file_directory import storage_errors
from ..documents.files import FileDocuments
from ..documents.memory import MemoryDocuments

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
        StorageOutdated: It contains files of version 0.5.2 that were not migrated.
        StorageTooNew: It contains files of a later version.
    """
    newer = [name for name in _names(directory) if (layout := _LAYOUT.fullmatch(name)) and int(layout[1]) > LAYOUT]
    if newer:
        raise StorageTooNew(
            f"{os.path.join(directory, newer[-1])} was written by a later version of this library, "
            f"this version reads v{LAYOUT}. Upgrade agent-runtime-core."
        )
    if os.path.lexists(os.path.join(root_of(directory), CARRIED)):
        return
    if found := old_files(directory):
        project = shlex.quote(os.path.dirname(directory))
        raise StorageOutdated(
            f"{directory} has {len(found)} files of version 0.5.2 that were not migrated, such as {found[0]}. Nothing "
            f"was read or written. Run agent-runtime carry-over {project}"
        )


class FilePlace:
    """Keeps the documents of a store in files.

    Scope.GLOBAL is in `.agent_runtime` of the user's home directory. Scope.SESSION is in memory, and ends with the
    store. The first write creates the directories.

    Args:
        project_dir: Scope.PROJECT is in `<project_dir>/.agent_runtime`. None is the current directory.
        **options: See `HomeOptions`.
    """

    def __init__(self, project_dir: str | os.PathLike[str] | None = None, **options: Unpack[HomeOptions]) -> None:
        home = DocumentHome(**options)
        project, user = project_directory(project_dir), home_directory()
        in_project = documents_in(project, home.clock)
        in_home = in_project if user == project else documents_in(user, home.clock)
        cast(Any, super()).__init__(
            home.keep_in(in_project, in_home=in_home, in_session=MemoryDocuments(clock=home.clock))
        )


def project_directory(project_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory with the stores of a project."""
    path = os.getcwd() if project_dir is None else path_text(project_dir)
    if path is None:
        raise must("project_dir", "be the path of a directory", project_dir)
    return os.path.join(os.path.abspath(path), DIRECTORY)


def home_directory() -> str:
    """Return the directory with the stores of this user."""
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise must("the home directory", "be an absolute path", home, "Set HOME")
    return os.path.join(os.path.normpath(home), DIRECTORY)


def documents_in(directory: str, clock: Clock) -> FileDocuments:
    """Return the document store of a directory. It rejects files of another version."""
    return FileDocuments(root_of(directory), ready=partial(check_layout, directory), clock=clock)


class FileMemoryStore(FilePlace, StoredMemory):
    """Stores the memory of agents, by key, in files."""


class FileConversationStore(FilePlace, StoredConversations):
    """Stores conversations and their messages in files."""


class FileTaskStore(FilePlace, StoredTasks):
    """Stores lists of tasks in files."""


class FilePreferencesStore(FilePlace, StoredPreferences):
    """Stores preferences, by key, in files."""


class FileKnowledgeStore(FilePlace, StoredKnowledge):
    """Stores facts, summaries and embeddings in files.

    Args:
        project_dir: The directory of the project. None is the current directory.
        max_vectors: The most embeddings of a scope.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, project_dir: str | os.PathLike[str] | None = None, *, max_vectors: int = MAX_VECTORS,
        **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        super().__init__(project_dir, **options)
        self.max_vectors = max_vectors


class FileAuditStore(FilePlace, StoredAudit):
    """Stores audit entries, errors and metrics in files.

    Args:
        project_dir: The directory of the project. None is the current directory.
        max_age: Seconds after which entries are deleted; None keeps them.
        max_entries: How many entries of each kind and scope are kept; None keeps all.
        options: `session_id`, `project`, `session_ttl` in seconds, and `clock`, as `DocumentBackedStore` takes them.
    """

    def __init__(
        self, project_dir: str | os.PathLike[str] | None = None, *, max_age: float | None = None,
        max_entries: int | None = None, **options: Unpack[HomeOptions],
    ) -> None:  # fmt: skip
        self.keep_at_most(max_age, max_entries)
        super().__init__(project_dir, **options)
