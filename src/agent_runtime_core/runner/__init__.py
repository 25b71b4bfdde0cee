"""Runs: executed here, submitted to workers, watched, cancelled, resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily
from .approvals import ApprovalRequest
from .open_run import SyncRun, open_run, open_run_sync
from .processes import ProcessInfo
from .runner import AgentRunner
from .settings import RunInfo, RunnerConfig

if TYPE_CHECKING:
    from .reencryption import Reencryption, reencrypt

__all__ = [
    "AgentRunner",
    "ApprovalRequest",
    "ProcessInfo",
    "Reencryption",
    "RunInfo",
    "RunnerConfig",
    "SyncRun",
    "open_run",
    "open_run_sync",
    "reencrypt",
]

_LAZY = {name: f".reencryption:{name}" for name in ("Reencryption", "reencrypt")}


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
