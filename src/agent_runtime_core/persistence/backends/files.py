"""The six stores in files: of a project in its directory, of a user in the home directory."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from ..._core.clock import Clock
from ..._core.ids import path_text
from ...errors import InvalidArgument, brief
from ..document_stores.audit import StoredAudit
from ..document_stores.base import DocumentHome
from ..document_stores.conversations import StoredConversations
from ..document_stores.knowledge import StoredKnowledge
from ..document_stores.memory import StoredMemory
from ..document_stores.preferences import StoredPreferences
from ..document_stores.tasks import StoredTasks
from ..documents.files import FileDocuments
from ..documents.memory import MemoryDocuments
from ..legacy_files import DIRECTORY, check_layout, root_of


class FileHome(DocumentHome):
    """In `<project_dir>/.agent_runtime/`, by default that of the current directory; GLOBAL in that of the user's home.

    A session is in memory, and ends with the store. Nothing is made on disk before the first write.
    """

    def __init__(self, project_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        project, home = project_directory(project_dir), home_directory()
        in_project = documents_in(project, self.clock)
        in_home = in_project if home == project else documents_in(home, self.clock)
        self.keep_in(in_project, in_home=in_home, in_session=MemoryDocuments(clock=self.clock))


def project_directory(project_dir: str | os.PathLike[str] | None) -> str:
    """Return the directory with the stores of a project."""
    where = os.getcwd() if project_dir is None else path_text(project_dir)
    if where is None:
        raise InvalidArgument(f"project_dir={brief(project_dir, 500)} is no path of a directory")
    return os.path.join(os.path.abspath(where), DIRECTORY)


def home_directory() -> str:
    """Return the directory with the stores of this user."""
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise InvalidArgument(f"{brief(home, 500)} is no home directory: set HOME to an absolute path")
    return os.path.join(os.path.normpath(home), DIRECTORY)


def documents_in(directory: str, clock: Clock) -> FileDocuments:
    return FileDocuments(root_of(directory), ready=partial(check_layout, directory), clock=clock)


class FileMemoryStore(StoredMemory, home=FileHome):
    """What an agent remembers by key, in files."""


class FileConversationStore(StoredConversations, home=FileHome):
    """Conversations and their messages, in files."""


class FileTaskStore(StoredTasks, home=FileHome):
    """Tasks, in lists, in files."""


class FilePreferencesStore(StoredPreferences, home=FileHome):
    """What a user prefers, in files."""


class FileKnowledgeStore(StoredKnowledge, home=FileHome):
    """Facts, summaries and embeddings, in files."""


class FileAuditStore(StoredAudit, home=FileHome):
    """What happened, what went wrong and how long it took, in files."""
