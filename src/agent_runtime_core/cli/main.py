"""The command line: arguments and exit codes.

Exit code 0: done. 1: a run was not found, or a run or file was not in the required state. 2: nothing was done, one line
on stderr has the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn

from .._core.codec.json import loads_strict
from .._core.lazy_import import load
from .._core.validation import redacted
from .._execution.step_policy import EFFECTS
from ..errors import AgentRuntimeError, UnknownRun, brief
from ..status import RunStatus
from .control import approve, cancel, fork, migrate_files, resume, send, signal, vacuum
from .dead_letters import discard, list_dead, requeue
from .output import escaped, trace, warn
from .runs import runs, show
from .worker import work

_RUN = "run id, or the id you passed as run_id"
#: Text like `user:password@` without a scheme, because a mistyped argument may be the end of a URL.
_CREDENTIALS = re.compile(r"(?<![^\s='\"])[^\s='\":]*:(?!//)\S*(?=@)")


_EXAMPLES = """\
examples:
  agent-runtime worker my_agents:agents --url agents.db
  agent-runtime show order-7 --url agents.db
  agent-runtime dead requeue --all --url agents.db"""


class _Parser(argparse.ArgumentParser):
    """Reports invalid arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, escaped(f"{self.prog}: {_CREDENTIALS.sub('***', redacted(message))} (see {self.prog} --help)") + "\n"
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. The parsed `command` is the coroutine function to call."""
    top = _Parser(
        prog="agent-runtime", description="Run workers, inspect runs and fix failed ones.", epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=f"%(prog)s {load('agent_runtime_core:__version__')}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--url", help="store of the runs: agents.db, sqlite:///agents.db, redis://localhost:6379/0; "
                        "default: AGENT_RUNTIME_BACKEND_URL")  # fmt: skip
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parent = argparse.ArgumentParser(add_help=False, parents=[common])
    parent.add_argument("--json", action="store_true", help="write JSON")
    _add_worker(commands, common)
    _add_dead(commands, parent)
    _add_inspection(commands, parent)
    _add_control(commands, parent)
    _add_carry_over(commands)
    return top


def _add_worker(commands: Any, common: argparse.ArgumentParser) -> None:
    worker = commands.add_parser("worker", parents=[common], help="execute runs until SIGTERM or Ctrl-C")
    worker.add_argument("target", metavar="module:attr", help="an agent, a list of agents, a Registry, an AgentRunner, "
                      "or a function that returns one of these")  # fmt: skip
    worker.add_argument("--concurrency", type=_positive_int, default=1, help="runs at once (default: 1)")
    worker.add_argument("--agent-path", metavar="DIR", default=".", help="directory of the module (default: this one)")
    worker.add_argument("--grace", type=_seconds, metavar="SECONDS",
                      help="seconds to let active runs finish on SIGTERM (default: 25)")  # fmt: skip
    worker.add_argument("--poll", type=_positive_seconds, metavar="SECONDS", default=1.0,
                      help="seconds between polls when no notification arrives (default: 1)")  # fmt: skip
    worker.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info",
                      help="least severe log records to write (default: info)")  # fmt: skip
    worker.set_defaults(command=work)


def _add_dead(commands: Any, parent: argparse.ArgumentParser) -> None:
    dead = commands.add_parser("dead", help="list, requeue or delete dead-letter runs")
    verbs = dead.add_subparsers(title="commands", required=True, metavar="COMMAND")
    status = argparse.ArgumentParser(add_help=False, parents=[parent])
    status.add_argument(
        "--status", choices=("dead", "failed"), default="dead", help="only runs with this status (default: dead)"
    )
    verbs.add_parser("list", parents=[status], help="list them").set_defaults(command=list_dead)
    for verb, command, parents, what in (
        ("requeue", requeue, [status, _limits()], "let workers resume them; completed steps keep their results"),
        ("discard", discard, [status], "delete them, with their journal and events"),
    ):
        each = verbs.add_parser(verb, parents=parents, help=what)
        each.add_argument("ids", nargs="*", metavar="RUN", help=_RUN)
        each.add_argument("--all", action="store_true", help="all runs with that status")
        each.set_defaults(command=command)


def _add_inspection(commands: Any, parent: argparse.ArgumentParser) -> None:
    listing = commands.add_parser("runs", parents=[parent], help="list runs, newest last")
    statuses = [each.value for each in RunStatus]
    listing.add_argument("--status", choices=statuses, metavar="STATUS",
                         help=f"only runs with this status: {', '.join(statuses)}")  # fmt: skip
    listing.add_argument("--agent", metavar="KEY", help="only runs of the agent with this key")
    listing.add_argument("--limit", type=_positive_int, default=50, metavar="N", help="only the newest N (default: 50)")
    listing.set_defaults(command=runs)
    one = commands.add_parser("show", parents=[parent], help="show a run: its status, steps, error and usage")
    one.add_argument("id", metavar="RUN", help=_RUN)
    one.add_argument("--events", action="store_true", help="also show its events")
    one.set_defaults(command=show)


def _add_control(commands: Any, parent: argparse.ArgumentParser) -> None:
    one = argparse.ArgumentParser(add_help=False, parents=[parent])
    one.add_argument("id", metavar="RUN", help=_RUN)
    cancelling = commands.add_parser("cancel", parents=[one], help="request cancellation of a run and its child runs")
    cancelling.set_defaults(command=cancel)
    sending = commands.add_parser("send", parents=[one], help="send a message to the agent of a run")
    sending.add_argument("text", metavar="TEXT", help="the message of the user")
    sending.add_argument("--interrupt", action="store_true", help="end the model call in flight")
    sending.add_argument("--message-id", metavar="ID", help="messages with the same id are stored once")
    sending.set_defaults(command=send)
    for verb, command, default, what, name, payload in (
        ("signal", signal, None, "send a signal to a run", "signal name", "payload, default null"),
        ("approve", approve, True, "answer an approval that a run has requested",
         'approval name (see "agent-runtime show RUN")', "answer, default true"),
    ):  # fmt: skip
        each = commands.add_parser(verb, parents=[one], help=what)
        each.add_argument("name", metavar="NAME", help=name)
        each.add_argument("payload", nargs="?", type=_json, default=default, metavar="JSON", help=payload)
        each.set_defaults(command=command)
        if verb == "approve":
            each.add_argument(
                "--force", action="store_true", help="store the answer even if the run has not requested it"
            )
    resuming = commands.add_parser("resume", parents=[one, _limits()], help="let workers resume a failed, "
                                   "timed-out, cancelled or dead run; completed steps keep their results")  # fmt: skip
    resuming.set_defaults(command=resume)
    forking = commands.add_parser("fork", parents=[one], help="create a run that starts from the state of another run")
    forking.add_argument("--after", metavar="STEP",
                         help="copy up to this step, by name or id (default: all recorded steps)")  # fmt: skip
    forking.add_argument("--new-run-id", metavar="ID", help="id of the new run (default: a new id)")
    forking.add_argument("--effects", choices=EFFECTS, default="refuse",
                         help="what to do at a guarded step that another run has done: fail, use its result, request "
                         "an approval, or run it (default: refuse)")  # fmt: skip
    forking.set_defaults(command=fork)
    deleting = commands.add_parser("vacuum", parents=[parent], help="delete finished runs older than --retention")
    deleting.add_argument("--retention", type=_retention, action="append", required=True, metavar="STATUS=SECONDS",
                          help="how long to keep runs with this status (others are kept); repeatable")  # fmt: skip
    deleting.set_defaults(command=vacuum)


def _limits() -> argparse.ArgumentParser:
    """Return the options for limits of a run, parsed under their names in RunLimits."""
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("limits", "New limits of the run, instead of those of its agent.")
    for name, type_, unit in (
        ("max_turns", _positive_int, "N"), ("max_tool_calls", _positive_int, "N"), ("max_tokens", _positive_int, "N"),
        ("max_cost_usd", _usd, "USD"), ("turn_timeout", _positive_seconds, "SECONDS"),
        ("run_timeout", _positive_seconds, "SECONDS"),
    ):  # fmt: skip
        group.add_argument(f"--{name.replace('_', '-')}", type=type_, metavar=unit)
    return options


def _add_carry_over(commands: Any) -> None:
    migrating = commands.add_parser("carry-over", help="migrate the files of version 0.5.2 to the present stores")
    migrating.add_argument("directory", nargs="?", metavar="DIR",
                      help="directory that contains .agent_runtime (default: this one)")  # fmt: skip
    migrating.add_argument("--debug", action="store_true", help="show the traceback of an error")
    migrating.add_argument("--json", action="store_true", help="write JSON")
    migrating.set_defaults(command=migrate_files)


def _positive_int(text: str) -> int:
    # int() raises ValueError for more than 4,300 digits; 18 digits are more than any count needs.
    if not text.isdecimal() or not (number := int(text[:18])):
        raise argparse.ArgumentTypeError(f"must be an integer above 0, got {brief(redacted(text))}")
    return number


def _number(text: str, what: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"must be {what} of at least 0, got {brief(redacted(text))}")


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds")


def _usd(text: str) -> float:
    return _number(text, "an amount in USD")


def _positive_seconds(text: str) -> float:
    if not (seconds := _seconds(text)):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {brief(redacted(text))}")
    return seconds


def _json(text: str) -> Any:
    try:
        return loads_strict(text)
    except (ValueError, RecursionError) as error:
        message = f"must be JSON, got {brief(redacted(text))} ({error}). Put quotes around a string: '\"yes\"'"
        raise argparse.ArgumentTypeError(message) from None


def _retention(text: str) -> tuple[str, float]:
    status, _, seconds = text.partition("=")
    with contextlib.suppress(argparse.ArgumentTypeError):
        return status, _seconds(seconds)
    raise argparse.ArgumentTypeError(f"must be STATUS=SECONDS, got {brief(redacted(text))}. Example: succeeded=86400")


def _run(work: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine like asyncio.run, but handle a Ctrl-C at the very end of `work` like any other."""
    with asyncio.Runner() as runner:
        try:
            return runner.run(work)
        finally:
            # A Ctrl-C may have left the loop marked to stop, which would end the first run of its shutdown at once.
            loop = runner.get_loop()
            loop.call_soon(loop.stop)
            loop.run_forever()


def main(argv: Sequence[str] | None = None) -> int:
    """Execute one command.

    Args:
        argv: The arguments; by default those of the process.

    Returns:
        The exit code.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    args = parser().parse_args(argv)
    try:
        code = _run(args.command(args))
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
