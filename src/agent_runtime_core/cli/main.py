"""The command line: run one command and return its exit code.

Exit code 0: done. 1: a run was not found, a run or file was not in the required state, or a check failed. 2: nothing
was done, one line on stderr shows the reason. 130: Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

from .._core.lazy_import import load
from .._core.log import log
from ..errors import AgentRuntimeError, MissingDependency, UnknownRun, is_interrupt
from .output import trace, warn
from .parser import parsed


def _run(work: Coroutine[Any, Any, int], preferred_loop: str | None) -> int:
    """Run a coroutine like asyncio.run, but handle a Ctrl-C at the very end of `work` like any other.

    Args:
        work: The coroutine.
        preferred_loop: What makes the event loop that the command prefers, if its package is installed.
    """
    tasks: list[asyncio.Task[Any]] = []

    async def main() -> int:
        tasks.append(cast("asyncio.Task[Any]", asyncio.current_task()))
        return await work

    with asyncio.Runner(loop_factory=_loop_factory(preferred_loop)) as runner:
        run: Callable[[], int] = partial(runner.run, main())
        try:
            while True:
                try:
                    return run()
                except BaseException as error:
                    if isinstance(error, Exception) or is_interrupt(error) or not tasks or tasks[0].done():
                        raise
                    # Raised by a task that code of an agent has started. The loop has stopped, and is started again.
                    log.error("a task must not end the process, got %s. Handle it in the code", type(error).__name__)
                    run = partial(_go_on, runner.get_loop(), tasks[0])
        finally:
            # A Ctrl-C may have left the loop marked to stop, which would end the first run of its shutdown at once.
            loop = runner.get_loop()
            loop.call_soon(loop.stop)
            loop.run_forever()


def _go_on(loop: asyncio.AbstractEventLoop, task: asyncio.Task[int]) -> int:
    task.add_done_callback(lambda _: loop.stop())
    loop.run_forever()
    return task.result()


def _loop_factory(loop: str | None) -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(MissingDependency):
        return None if loop is None else cast("Callable[[], asyncio.AbstractEventLoop]", load(loop))
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Execute one command.

    Args:
        argv: The arguments; by default the arguments of the process.

    Returns:
        The exit code.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    args = Namespace(debug=False)
    try:
        args = parsed(argv)
        command = cast("Callable[..., Coroutine[Any, Any, int]]", load(args.command, package=__package__))
        code = _run(command(args), getattr(args, "loop", None))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe. The interpreter would fail again when it flushes the rest at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (AgentRuntimeError, OSError) as error:
        if args.debug:
            trace(error)
        else:
            warn(str(error))
        return 1 if isinstance(error, UnknownRun) else 2
    except Exception as error:  # noqa: BLE001 - written like the interpreter does, but without secrets
        trace(error)
        return 1
    return code
