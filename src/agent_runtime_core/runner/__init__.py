"""Runs: executed here, submitted to workers, watched, cancelled, resumed."""

from __future__ import annotations

from .core import AgentRunner
from .door import SyncRun, open_run, open_run_sync
from .settings import RunInfo, RunnerConfig

__all__ = ["AgentRunner", "RunInfo", "RunnerConfig", "SyncRun", "open_run", "open_run_sync"]
