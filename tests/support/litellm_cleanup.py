"""What litellm leaves behind in a loop, put away: it keeps its connections for the whole process."""

from __future__ import annotations

import asyncio
import sys
from typing import Any


async def settled() -> None:
    """To be awaited in the loop that asked, when it is done."""
    litellm: Any = sys.modules.get("litellm")
    if litellm is None:
        return
    # It logs each call in tasks of its own.
    await asyncio.sleep(0.05)
    await litellm.close_litellm_async_clients()
    litellm.in_memory_llm_clients_cache.flush_cache()
