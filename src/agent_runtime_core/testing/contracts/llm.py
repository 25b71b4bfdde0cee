"""What every LLMClient must do; run each of `CASES` on your own with `await case(make)`.

`make(script)` is an async context manager: it gives a client whose provider answers the n-th request with the n-th
reply of the script and all later ones with the last, and puts both away. The replies are plain values (`TextReply`,
`Echo`, `Disconnect`, `Hang`, `HttpError`; `Embedding`, `Verdict`, `TokenUsage`), which you map on the wire of your
provider: a server on loopback, or a transport inside the client. The client asks once, or waits next to nothing
between its tries; it gives up on a stream that is silent for a second at most; where it has a key, that is `KEY`.

stream, embed, moderate and count_tokens are optional: a case about one is passed over where the client, or `make` for
its script, raises NotSupported. Where the client breaks the contract a case raises AssertionError, or the error that
the client raised and should not have; `check(make)` runs them all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..._core.lazy_import import lazily
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
from .llm_others import CASES as OTHERS
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
_RENAMED = {
    "Breaks": "Disconnect",
    "Counts": "TokenUsage",
    "Echoes": "Echo",
    "Embeds": "Embedding",
    "Judges": "Verdict",
    "Refuses": "HttpError",
    "Says": "TextReply",
    "Stalls": "Hang",
}

CASES: Cases[Case] = Cases([*ANSWERS, *TOOLS, *FAILURES, *STREAMS, *OTHERS])
check: Callable[[Make], Awaitable[None]] = CASES.check


def __getattr__(name: str) -> object:
    return lazily(__name__, {}, name, _RENAMED)
