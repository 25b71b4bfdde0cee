"""Durable agent runs. Every public name is loaded on first use."""

from __future__ import annotations

from importlib import import_module

__version__ = "0.7.0.dev0"
"""The version of the package."""


# Not imported from typing: that import would cost more than this whole module. Type checkers know the name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from ._execution.context import RunContextImpl as RunContextImpl
    from ._execution.sync_context import SyncRunContext as SyncRunContext
    from .agents import ToolCallingAgent as ToolCallingAgent
    from .config import RuntimeConfig as RuntimeConfig
    from .config import configure as configure
    from .config import get_config as get_config
    from .config import reset_config as reset_config
    from .errors import AgentRuntimeError as AgentRuntimeError
    from .errors import AnswerRefused as AnswerRefused
    from .errors import AuthenticationFailed as AuthenticationFailed
    from .errors import BadArguments as BadArguments
    from .errors import CircuitOpen as CircuitOpen
    from .errors import ContextOverflow as ContextOverflow
    from .errors import EffectAlreadyDone as EffectAlreadyDone
    from .errors import IdempotencyConflict as IdempotencyConflict
    from .errors import IllegalTransition as IllegalTransition
    from .errors import InvalidArgument as InvalidArgument
    from .errors import InvalidTurn as InvalidTurn
    from .errors import JournalMismatch as JournalMismatch
    from .errors import LeaseLost as LeaseLost
    from .errors import LimitExceeded as LimitExceeded
    from .errors import MissingDependency as MissingDependency
    from .errors import ModelNotFound as ModelNotFound
    from .errors import NotConfigured as NotConfigured
    from .errors import NotSupported as NotSupported
    from .errors import OutputMismatch as OutputMismatch
    from .errors import PlanningError as PlanningError
    from .errors import PortalMisuse as PortalMisuse
    from .errors import Postponed as Postponed
    from .errors import ProviderError as ProviderError
    from .errors import ProviderTimeout as ProviderTimeout
    from .errors import ProviderUnavailable as ProviderUnavailable
    from .errors import RateLimited as RateLimited
    from .errors import RedactionFailed as RedactionFailed
    from .errors import RequestRefused as RequestRefused
    from .errors import RunBusy as RunBusy
    from .errors import RunFailed as RunFailed
    from .errors import RunNotFound as RunNotFound
    from .errors import StepCancelledError as StepCancelledError
    from .errors import StepExecutionError as StepExecutionError
    from .errors import StepInDoubt as StepInDoubt
    from .errors import StorageBusy as StorageBusy
    from .errors import StorageClosed as StorageClosed
    from .errors import StorageCorrupt as StorageCorrupt
    from .errors import StorageError as StorageError
    from .errors import StorageFull as StorageFull
    from .errors import StorageMoved as StorageMoved
    from .errors import StorageOutdated as StorageOutdated
    from .errors import StorageTooNew as StorageTooNew
    from .errors import StreamCut as StreamCut
    from .errors import TaskNotHeld as TaskNotHeld
    from .errors import ToolFailed as ToolFailed
    from .errors import ToolTimeout as ToolTimeout
    from .errors import TooManyVectors as TooManyVectors
    from .errors import UnknownAgent as UnknownAgent
    from .errors import UnknownEncryptionKey as UnknownEncryptionKey
    from .errors import UnknownPrice as UnknownPrice
    from .errors import UnknownRun as UnknownRun
    from .errors import UnknownSetting as UnknownSetting
    from .errors import UnknownTool as UnknownTool
    from .errors import UnsafePostgres as UnsafePostgres
    from .errors import UnsafeRedis as UnsafeRedis
    from .errors import UnserialisableResult as UnserialisableResult
    from .errors import WaitTimeout as WaitTimeout
    from .interfaces import AgentRuntime as AgentRuntime
    from .interfaces import ErrorInfo as ErrorInfo
    from .interfaces import EventType as EventType
    from .interfaces import LLMClient as LLMClient
    from .interfaces import LLMResponse as LLMResponse
    from .interfaces import LLMStreamChunk as LLMStreamChunk
    from .interfaces import Message as Message
    from .interfaces import RunContext as RunContext
    from .interfaces import RunResult as RunResult
    from .interfaces import Tool as Tool
    from .interfaces import ToolDefinition as ToolDefinition
    from .interfaces import ToolRegistry as ToolRegistry
    from .interfaces import TraceSink as TraceSink
    from .interfaces import current_run as current_run
    from .limits import ModelLimits as ModelLimits
    from .limits import RunLimits as RunLimits
    from .limits import SpendPool as SpendPool
    from .loop import CancellationToken as CancellationToken
    from .loop import TurnState as TurnState
    from .loop import agent_tool as agent_tool
    from .loop import run_turn_loop as run_turn_loop
    from .persistence import Conversation as Conversation
    from .persistence import ConversationMessage as ConversationMessage
    from .persistence import ConversationStore as ConversationStore
    from .persistence import FileConversationStore as FileConversationStore
    from .persistence import FileMemoryStore as FileMemoryStore
    from .persistence import FilePreferencesStore as FilePreferencesStore
    from .persistence import FileTaskStore as FileTaskStore
    from .persistence import MemoryStore as MemoryStore
    from .persistence import PersistenceConfig as PersistenceConfig
    from .persistence import PersistenceManager as PersistenceManager
    from .persistence import PreferencesStore as PreferencesStore
    from .persistence import Scope as Scope
    from .persistence import Task as Task
    from .persistence import TaskList as TaskList
    from .persistence import TaskState as TaskState
    from .persistence import TaskStore as TaskStore
    from .persistence import ToolCall as ToolCall
    from .persistence import ToolResult as ToolResult
    from .persistence import configure_persistence as configure_persistence
    from .persistence import conversation_uuid as conversation_uuid
    from .persistence import get_persistence_manager as get_persistence_manager
    from .registry import clear_registry as clear_registry
    from .registry import get_runtime as get_runtime
    from .registry import list_runtimes as list_runtimes
    from .registry import register_runtime as register_runtime
    from .registry import unregister_runtime as unregister_runtime
    from .runner import AgentRunner as AgentRunner
    from .runner import ApprovalRequest as ApprovalRequest
    from .runner import RunInfo as RunInfo
    from .runner import RunnerConfig as RunnerConfig
    from .runner import Schedule as Schedule
    from .runner import open_run as open_run
    from .runner import open_run_sync as open_run_sync
    from .runner import schedule as schedule
    from .status import RunStatus as RunStatus
    from .status import StepStatus as StepStatus
    from .steps import AlreadyDone as AlreadyDone
    from .steps import Backoff as Backoff
    from .steps import ExecutionState as ExecutionState
    from .steps import Happened as Happened
    from .steps import Step as Step
    from .steps import StepExecutor as StepExecutor
    from .steps import StepResult as StepResult
    from .steps import register_type as register_type
    from .testing import LLMEvaluator as LLMEvaluator
    from .testing import MockLLMClient as MockLLMClient
    from .testing import MockLLMResponse as MockLLMResponse
    from .testing import MockRunContext as MockRunContext
    from .testing import MockTool as MockTool
    from .testing import create_test_context as create_test_context
    from .testing import run_agent_test as run_agent_test
    from .tools import tool as tool
else:
    _MODULES = {
        "._execution.context": "RunContextImpl",
        "._execution.sync_context": "SyncRunContext",
        ".agents": "ToolCallingAgent",
        ".config": "RuntimeConfig configure get_config reset_config",
        ".errors": "AgentRuntimeError AnswerRefused AuthenticationFailed BadArguments CircuitOpen ContextOverflow "
        "EffectAlreadyDone IdempotencyConflict IllegalTransition InvalidArgument InvalidTurn JournalMismatch "
        "LeaseLost LimitExceeded MissingDependency ModelNotFound NotConfigured NotSupported OutputMismatch "
        "PlanningError PortalMisuse Postponed ProviderError ProviderTimeout ProviderUnavailable RateLimited "
        "RedactionFailed RequestRefused RunBusy RunFailed RunNotFound StepCancelledError StepExecutionError "
        "StepInDoubt StorageBusy StorageClosed StorageCorrupt StorageError StorageFull StorageMoved StorageOutdated "
        "StorageTooNew StreamCut TaskNotHeld ToolFailed ToolTimeout TooManyVectors UnknownAgent "
        "UnknownEncryptionKey UnknownPrice UnknownRun UnknownSetting UnknownTool UnsafePostgres UnsafeRedis "
        "UnserialisableResult WaitTimeout",
        ".interfaces": "AgentRuntime ErrorInfo EventType LLMClient LLMResponse LLMStreamChunk Message RunContext "
        "RunResult Tool ToolDefinition ToolRegistry TraceSink current_run",
        ".limits": "ModelLimits RunLimits SpendPool",
        ".loop": "CancellationToken TurnState agent_tool run_turn_loop",
        ".persistence": "Conversation ConversationMessage ConversationStore FileConversationStore FileMemoryStore "
        "FilePreferencesStore FileTaskStore MemoryStore PersistenceConfig PersistenceManager PreferencesStore "
        "Scope Task TaskList TaskState TaskStore ToolCall ToolResult configure_persistence conversation_uuid "
        "get_persistence_manager",
        ".registry": "clear_registry get_runtime list_runtimes register_runtime unregister_runtime",
        ".runner": "AgentRunner ApprovalRequest RunInfo RunnerConfig Schedule open_run open_run_sync schedule",
        ".status": "RunStatus StepStatus",
        ".steps": "AlreadyDone Backoff ExecutionState Happened Step StepExecutor StepResult register_type",
        ".testing": "LLMEvaluator MockLLMClient MockLLMResponse MockRunContext MockTool create_test_context "
        "run_agent_test",
        ".tools": "tool",
    }

    def __getattr__(name):
        exports = import_module("._core.lazy_exports", __name__).lazy_exports
        names, load_name, _ = exports(__name__, _MODULES, "__version__")
        return names if name == "__all__" else load_name(name)

    def __dir__():
        return __getattr__("__all__")
