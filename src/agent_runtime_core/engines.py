"""What a custom storage engine is made of: threads, the order of commits, repeats, guards and batches.

`ThreadedEngine` is the engine, and `EngineBackend` the base class of the backends on it. The guide is
docs/guide/write-a-backend.md.
"""

from ._engines.backend import EngineBackend
from ._engines.base import Batch, FunctionFailed, Guard, NotApplied, Op, OperationSet
from ._engines.commit_request import CommitRequest
from ._engines.threaded import ThreadedEngine, ThreadedTx

__all__ = [
    "Batch",
    "CommitRequest",
    "EngineBackend",
    "FunctionFailed",
    "Guard",
    "NotApplied",
    "Op",
    "OperationSet",
    "ThreadedEngine",
    "ThreadedTx",
]
