"""Runs: executed here, submitted to workers, watched, cancelled, resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_exports import lazy_exports
from .approvals import ApprovalRequest as ApprovalRequest
from .finding import RunList as RunList
from .open_run import SyncRun as SyncRun
from .open_run import open_run as open_run
from .open_run import open_run_sync as open_run_sync
from .pools import PoolInfo as PoolInfo
from .processes import ProcessInfo as ProcessInfo
from .runner import AgentRunner as AgentRunner
from .schedules import Schedule as Schedule
from .schedules import Schedules as Schedules
from .schedules import schedule as schedule
from .settings import RunInfo as RunInfo
from .settings import RunnerConfig as RunnerConfig

if TYPE_CHECKING:
    from .reencryption import Reencryption as Reencryption
    from .reencryption import reencrypt as reencrypt
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {".reencryption": "Reencryption reencrypt"},
        "AgentRunner ApprovalRequest PoolInfo ProcessInfo RunInfo RunList RunnerConfig Schedule Schedules SyncRun "
        "open_run open_run_sync schedule",
    )
