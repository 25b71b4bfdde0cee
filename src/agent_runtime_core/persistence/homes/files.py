"""Stores in plain files: of a project in its directory, of a user in the home directory."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from ..._clock import Clock
from ..._ids import path_text
from ...errors import InvalidArgument, brief
from ..documents.base import DocumentStore
from ..documents.files import FileDocuments
from ..documents.memory import MemoryDocuments
from ..models import Scope
from ..stored.base import Home
from .old_files import DIRECTORY, check_layout, root_of


class FileHome(Home):
    """In `<project_dir>/.agent_runtime/`, by default that of the current directory; GLOBAL in that of the user's home.

    A session is in memory, gone with the store. Nothing is made on disk before the first write.
    """

    def __init__(self, project_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        project, home = project_directory(project_dir), home_directory()
        self._project = documents_in(project, self.clock)
        self._global = self._project if home == project else documents_in(home, self.clock)
        self._session = MemoryDocuments(clock=self.clock)

    def documents(self, scope: Scope) -> DocumentStore:
        match scope:
            case Scope.GLOBAL:
                return self._global
            case Scope.PROJECT:
                return self._project
            case Scope.SESSION:
                return self._session


def project_directory(project_dir: str | os.PathLike[str] | None) -> str:
    """Where the stores of a project are."""
    where = os.getcwd() if project_dir is None else path_text(project_dir)
    if where is None:
        raise InvalidArgument(f"project_dir={brief(project_dir, 500)} is no path of a directory")
    return os.path.join(os.path.abspath(where), DIRECTORY)


def home_directory() -> str:
    """Where the stores of this user are."""
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise InvalidArgument(f"{brief(home, 500)} is no home directory: set HOME to an absolute path")
    return os.path.join(os.path.normpath(home), DIRECTORY)


def documents_in(directory: str, clock: Clock) -> FileDocuments:
    return FileDocuments(root_of(directory), ready=partial(check_layout, directory), clock=clock)
