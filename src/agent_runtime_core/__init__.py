"""Durable agent runs: every public name, each loaded when it is first used."""

from __future__ import annotations

from importlib import import_module

__version__ = "0.6.0"

__all__ = [
    "AgentRunner",
    "AgentRuntime",
    "AgentRuntimeError",
    "Backoff",
    "ErrorInfo",
    "EventType",
    "ExecutionState",
    "Happened",
    "IdempotencyConflict",
    "IllegalTransition",
    "InvalidArgument",
    "JournalMismatch",
    "LLMClient",
    "LLMResponse",
    "LLMStreamChunk",
    "LeaseLost",
    "Message",
    "MissingDependency",
    "MockRunContext",
    "NotSupported",
    "PortalMisuse",
    "RunBusy",
    "RunContext",
    "RunContextImpl",
    "RunFailed",
    "RunInfo",
    "RunResult",
    "RunStatus",
    "RunnerConfig",
    "RuntimeConfig",
    "Step",
    "StepCancelledError",
    "StepExecutionError",
    "StepExecutor",
    "StepInDoubt",
    "StepResult",
    "StepStatus",
    "StorageBusy",
    "StorageClosed",
    "StorageCorrupt",
    "StorageError",
    "StorageFull",
    "StorageTooNew",
    "Tool",
    "ToolDefinition",
    "ToolRegistry",
    "TraceSink",
    "UnknownAgent",
    "UnknownRun",
    "UnknownSetting",
    "UnknownTool",
    "UnserialisableResult",
    "WaitTimeout",
    "__version__",
    "clear_registry",
    "configure",
    "create_test_context",
    "get_config",
    "get_runtime",
    "list_runtimes",
    "open_run",
    "open_run_sync",
    "register_runtime",
    "register_type",
    "reset_config",
    "run_agent_test",
    "unregister_runtime",
]

# Not typing's: importing typing would cost more than all of this module. Type checkers know the name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from .config import RuntimeConfig, configure, get_config, reset_config
    from .context import RunContextImpl
    from .errors import (
        AgentRuntimeError,
        IdempotencyConflict,
        IllegalTransition,
        InvalidArgument,
        JournalMismatch,
        LeaseLost,
        MissingDependency,
        NotSupported,
        PortalMisuse,
        RunBusy,
        RunFailed,
        StepCancelledError,
        StepExecutionError,
        StepInDoubt,
        StorageBusy,
        StorageClosed,
        StorageCorrupt,
        StorageError,
        StorageFull,
        StorageTooNew,
        UnknownAgent,
        UnknownRun,
        UnknownSetting,
        UnknownTool,
        UnserialisableResult,
        WaitTimeout,
    )
    from .interfaces import (
        AgentRuntime,
        ErrorInfo,
        EventType,
        LLMClient,
        LLMResponse,
        LLMStreamChunk,
        Message,
        RunContext,
        RunResult,
        Tool,
        ToolDefinition,
        ToolRegistry,
        TraceSink,
    )
    from .registry import clear_registry, get_runtime, list_runtimes, register_runtime, unregister_runtime
    from .runner import AgentRunner, RunInfo, RunnerConfig, open_run, open_run_sync
    from .status import RunStatus, StepStatus
    from .steps import Backoff, ExecutionState, Happened, Step, StepExecutor, StepResult, register_type
    from .testing import MockRunContext, create_test_context, run_agent_test
else:
    _MODULES = {
        "config": "RuntimeConfig configure get_config reset_config",
        "context": "RunContextImpl",
        "errors": "AgentRuntimeError IdempotencyConflict IllegalTransition InvalidArgument JournalMismatch LeaseLost "
        "MissingDependency NotSupported PortalMisuse RunBusy RunFailed StepCancelledError StepExecutionError "
        "StepInDoubt StorageBusy StorageClosed StorageCorrupt StorageError StorageFull StorageTooNew UnknownAgent "
        "UnknownRun UnknownSetting UnknownTool UnserialisableResult WaitTimeout",
        "interfaces": "AgentRuntime ErrorInfo EventType LLMClient LLMResponse LLMStreamChunk Message RunContext "
        "RunResult Tool ToolDefinition ToolRegistry TraceSink",
        "registry": "clear_registry get_runtime list_runtimes register_runtime unregister_runtime",
        "runner": "AgentRunner RunInfo RunnerConfig open_run open_run_sync",
        "status": "RunStatus StepStatus",
        "steps": "Backoff ExecutionState Happened Step StepExecutor StepResult register_type",
        "testing": "MockRunContext create_test_context run_agent_test",
    }
    _WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}

    def __getattr__(name):
        module = _WHERE.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{module}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__} - {"_MODULES", "_WHERE", "TYPE_CHECKING", "annotations", "import_module"})
