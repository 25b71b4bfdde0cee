"""Durable agent runs. Every public name is loaded on first use."""

from __future__ import annotations

from importlib import import_module

__version__ = "0.6.0"

__all__ = [
    "AgentRunner",
    "AgentRuntime",
    "AgentRuntimeError",
    "AlreadyDone",
    "AuthenticationFailed",
    "Backoff",
    "BadArguments",
    "CancellationToken",
    "CircuitOpen",
    "ContextOverflow",
    "Conversation",
    "ConversationMessage",
    "ConversationStore",
    "EffectAlreadyDone",
    "ErrorInfo",
    "EventType",
    "ExecutionState",
    "FileConversationStore",
    "FileMemoryStore",
    "FilePreferencesStore",
    "FileTaskStore",
    "Happened",
    "IdempotencyConflict",
    "IllegalTransition",
    "InvalidArgument",
    "InvalidTurn",
    "JournalMismatch",
    "LLMClient",
    "LLMEvaluator",
    "LLMResponse",
    "LLMStreamChunk",
    "LeaseLost",
    "LimitExceeded",
    "MemoryStore",
    "Message",
    "MissingDependency",
    "MockLLMClient",
    "MockLLMResponse",
    "MockRunContext",
    "MockTool",
    "ModelNotFound",
    "NotConfigured",
    "NotSupported",
    "OutputMismatch",
    "PersistenceConfig",
    "PersistenceManager",
    "PlanningError",
    "PortalMisuse",
    "Postponed",
    "PreferencesStore",
    "ProviderError",
    "ProviderTimeout",
    "ProviderUnavailable",
    "RateLimited",
    "RequestRefused",
    "RunBusy",
    "RunContext",
    "RunContextImpl",
    "RunFailed",
    "RunInfo",
    "RunLimits",
    "RunNotFound",
    "RunResult",
    "RunStatus",
    "RunnerConfig",
    "RuntimeConfig",
    "Scope",
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
    "StorageOutdated",
    "StorageTooNew",
    "StreamCut",
    "Task",
    "TaskList",
    "TaskNotHeld",
    "TaskState",
    "TaskStore",
    "TooManyVectors",
    "Tool",
    "ToolCall",
    "ToolCallingAgent",
    "ToolDefinition",
    "ToolFailed",
    "ToolRegistry",
    "ToolResult",
    "ToolTimeout",
    "TraceSink",
    "TurnState",
    "UnknownAgent",
    "UnknownPrice",
    "UnknownRun",
    "UnknownSetting",
    "UnknownTool",
    "UnsafeRedis",
    "UnserialisableResult",
    "WaitTimeout",
    "__version__",
    "agent_tool",
    "clear_registry",
    "configure",
    "configure_persistence",
    "create_test_context",
    "get_config",
    "get_persistence_manager",
    "get_runtime",
    "list_runtimes",
    "open_run",
    "open_run_sync",
    "register_runtime",
    "register_type",
    "reset_config",
    "run_agent_test",
    "run_turn_loop",
    "tool",
    "unregister_runtime",
]

# Not imported from typing: that import would cost more than this whole module. Type checkers know the name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from ._execution.context import RunContextImpl
    from .agents import ToolCallingAgent
    from .config import RuntimeConfig, configure, get_config, reset_config
    from .errors import (
        AgentRuntimeError,
        AuthenticationFailed,
        BadArguments,
        CircuitOpen,
        ContextOverflow,
        EffectAlreadyDone,
        IdempotencyConflict,
        IllegalTransition,
        InvalidArgument,
        InvalidTurn,
        JournalMismatch,
        LeaseLost,
        LimitExceeded,
        MissingDependency,
        ModelNotFound,
        NotConfigured,
        NotSupported,
        OutputMismatch,
        PlanningError,
        PortalMisuse,
        Postponed,
        ProviderError,
        ProviderTimeout,
        ProviderUnavailable,
        RateLimited,
        RequestRefused,
        RunBusy,
        RunFailed,
        RunNotFound,
        StepCancelledError,
        StepExecutionError,
        StepInDoubt,
        StorageBusy,
        StorageClosed,
        StorageCorrupt,
        StorageError,
        StorageFull,
        StorageOutdated,
        StorageTooNew,
        StreamCut,
        TaskNotHeld,
        ToolFailed,
        ToolTimeout,
        TooManyVectors,
        UnknownAgent,
        UnknownPrice,
        UnknownRun,
        UnknownSetting,
        UnknownTool,
        UnsafeRedis,
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
    from .limits import RunLimits
    from .loop import CancellationToken, TurnState, agent_tool, run_turn_loop
    from .persistence import (
        Conversation,
        ConversationMessage,
        ConversationStore,
        FileConversationStore,
        FileMemoryStore,
        FilePreferencesStore,
        FileTaskStore,
        MemoryStore,
        PersistenceConfig,
        PersistenceManager,
        PreferencesStore,
        Scope,
        Task,
        TaskList,
        TaskState,
        TaskStore,
        ToolCall,
        ToolResult,
        configure_persistence,
        get_persistence_manager,
    )
    from .registry import clear_registry, get_runtime, list_runtimes, register_runtime, unregister_runtime
    from .runner import AgentRunner, RunInfo, RunnerConfig, open_run, open_run_sync
    from .status import RunStatus, StepStatus
    from .steps import AlreadyDone, Backoff, ExecutionState, Happened, Step, StepExecutor, StepResult, register_type
    from .testing import (
        LLMEvaluator,
        MockLLMClient,
        MockLLMResponse,
        MockRunContext,
        MockTool,
        create_test_context,
        run_agent_test,
    )
    from .tools import tool
else:
    _MODULES = {
        "agents": "ToolCallingAgent",
        "config": "RuntimeConfig configure get_config reset_config",
        "_execution.context": "RunContextImpl",
        "errors": "AgentRuntimeError AuthenticationFailed BadArguments CircuitOpen ContextOverflow EffectAlreadyDone "
        "IdempotencyConflict IllegalTransition InvalidArgument InvalidTurn JournalMismatch LeaseLost "
        "LimitExceeded MissingDependency ModelNotFound NotConfigured NotSupported OutputMismatch "
        "PlanningError PortalMisuse Postponed ProviderError ProviderTimeout ProviderUnavailable "
        "RateLimited RequestRefused RunBusy RunFailed RunNotFound StepCancelledError StepExecutionError "
        "StepInDoubt StorageBusy StorageClosed StorageCorrupt StorageError StorageFull StorageOutdated "
        "StorageTooNew StreamCut TaskNotHeld TooManyVectors ToolFailed ToolTimeout UnknownAgent "
        "UnknownPrice UnknownRun UnknownSetting UnknownTool UnsafeRedis UnserialisableResult WaitTimeout",
        "interfaces": "AgentRuntime ErrorInfo EventType LLMClient LLMResponse LLMStreamChunk Message RunContext "
        "RunResult Tool ToolDefinition ToolRegistry TraceSink",
        "limits": "RunLimits",
        "loop": "CancellationToken TurnState agent_tool run_turn_loop",
        "persistence": "Conversation ConversationMessage ConversationStore FileConversationStore FileMemoryStore "
        "FilePreferencesStore FileTaskStore MemoryStore PersistenceConfig PersistenceManager PreferencesStore Scope "
        "Task TaskList TaskState TaskStore ToolCall ToolResult configure_persistence get_persistence_manager",
        "registry": "clear_registry get_runtime list_runtimes register_runtime unregister_runtime",
        "runner": "AgentRunner RunInfo RunnerConfig open_run open_run_sync",
        "status": "RunStatus StepStatus",
        "steps": "AlreadyDone Backoff ExecutionState Happened Step StepExecutor StepResult register_type",
        "testing": "LLMEvaluator MockLLMClient MockLLMResponse MockRunContext MockTool create_test_context "
        "run_agent_test",
        "tools": "tool",
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
