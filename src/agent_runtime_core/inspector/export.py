"""Export a run as an HTML file."""

from __future__ import annotations

from uuid import UUID

from ..runner.run_client import RunClient
from .exported_data import exported_data
from .html_file import html_page


async def run_html(runner: RunClient, run_id: UUID | str, *, redact: bool = False) -> str:
    """Return an HTML file that shows a run and its child runs, as the command `export RUN --html` writes it.

    The file opens from disk and needs no network. It has all that is stored of the run. Secrets in URLs are replaced
    by ***.

    Args:
        runner: The runner on the store, which may be read-only.
        run_id: The run, or the id you passed as `run_id`.
        redact: Leave out contents: inputs, outputs, payloads of events, messages, error messages and metadata. Names,
            states, times, tokens, costs and types of errors stay. Keys are replaced by a hash.

    Raises:
        UnknownRun: No such run is stored.

    Example:
        >>> import asyncio
        >>> from agent_runtime_core import AgentRunner
        >>> from agent_runtime_core.inspector import run_html
        >>> async def main():
        ...     async with AgentRunner.open("agents.db", read_only=True) as runner:
        ...         return await run_html(runner, "order-7", redact=True)
        >>> text = asyncio.run(main())  # doctest: +SKIP
    """
    return html_page(await exported_data(runner, await runner.queue.require(run_id), redact=redact))
