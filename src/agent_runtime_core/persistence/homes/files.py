"""Stores in plain files: of a project in its directory, of a user in the home directory."""

from __future__ import annotations

import os
from typing import Any

from ...errors import InvalidArgument
from ..documents.base import DocumentStore
from ..documents.files import FileDocuments
from ..documents.memory import MemoryDocuments
from ..models import Scope
from ..stored.base import Home

DIRECTORY = ".agent_runtime"
LAYOUT = "v1"


class FileHome(Home):
    """In `<project_dir>/.agent_runtime/`, by default that of the current directory; GLOBAL in that of the user's home.

    A session is in memory, gone with the store. Nothing is made on disk before the first write.
    """

    def __init__(self, project_dir: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.project_dir: str = os.path.abspath(os.fspath(project_dir) if project_dir is not None else os.getcwd())
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise InvalidArgument(f"{home!r} is no home directory: set HOME to an absolute path")
        self._project = FileDocuments(os.path.join(self.project_dir, DIRECTORY, LAYOUT), clock=self.clock)
        self._global = FileDocuments(os.path.join(home, DIRECTORY, LAYOUT), clock=self.clock)
        self._session = MemoryDocuments(clock=self.clock)

    def documents(self, scope: Scope) -> DocumentStore:
        match scope:
            case Scope.GLOBAL:
                return self._global
            case Scope.PROJECT:
                return self._project
            case Scope.SESSION:
                return self._session
