"""Runs: executed here, submitted to workers, watched, cancelled, resumed."""

from __future__ import annotations

from .approvals import ApprovalRequest
from .open_run import SyncRun, open_run, open_run_sync
from .runner import AgentRunner
from .settings import RunInfo, RunnerConfig

__all__ = ["AgentRunner", "ApprovalRequest", "RunInfo", "RunnerConfig", "SyncRun", "open_run", "open_run_sync"]
