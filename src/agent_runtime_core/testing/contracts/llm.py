"""Conformance tests for LLMClients. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make(script)` is an async context manager. It yields a client whose provider answers the n-th request with the n-th
reply of the script, and all later requests with the last reply; it closes both. The replies are plain values
(`TextReply`, `Echo`, `Disconnect`, `Hang`, `HttpError`; `Embedding`, `Verdict`, `TokenUsage`) that you map to your
provider's wire format, in a server on loopback or in a transport of the client. The client must not retry, or retry
with almost no delay. It must give up on a silent stream after at most a second. Its API key, if any, is `KEY`.

stream, embed, moderate and count_tokens are optional: a case is skipped if the client, or `make` for its script,
raises NotSupported. A failing case raises AssertionError, or the unexpected error of the client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..._core.lazy_exports import lazy_exports
from .checks import Cases
from .llm_answers import CASES as ANSWERS
from .llm_failures import CASES as FAILURES
from .llm_fixtures import (
    KEY,
    MODEL,
    Call,
    Case,
    Disconnect,
    Echo,
    Embedding,
    Hang,
    HttpError,
    Make,
    Reply,
    TextReply,
    TokenUsage,
    Usage,
    Verdict,
)
from .llm_optional import CASES as OTHERS
from .llm_streams import CASES as STREAMS
from .llm_tools import CASES as TOOLS

__all__ = [
    "CASES",
    "KEY",
    "MODEL",
    "Call",
    "Case",
    "Disconnect",
    "Echo",
    "Embedding",
    "Hang",
    "HttpError",
    "Make",
    "Reply",
    "TextReply",
    "TokenUsage",
    "Usage",
    "Verdict",
    "check",
]

#: Names of 0.6.0.
__getattr__ = lazy_exports(
    __name__,
    {},
    renamed={
        "Breaks": "Disconnect",
        "Counts": "TokenUsage",
        "Echoes": "Echo",
        "Embeds": "Embedding",
        "Judges": "Verdict",
        "Refuses": "HttpError",
        "Says": "TextReply",
        "Stalls": "Hang",
    },
)[1]

CASES: Cases[Case] = Cases([*ANSWERS, *TOOLS, *FAILURES, *STREAMS, *OTHERS])
check: Callable[[Make], Awaitable[None]] = CASES.check
