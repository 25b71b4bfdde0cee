"""The command line: what it takes, and how it ends.

Exit codes: 0 done; 1 a run was not there, or a run or a file not as it had to be; 2 nothing was done, one line on
stderr says why.
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
from .control import approve, cancel, carried, fork, resume, signal, vacuum
from .dead_letters import discarded, listed, requeued
from .output import escaped, trace, warn
from .runs import runs, show
from .worker import work

#: What looks like `user:password@` without a scheme. A wrong call may hold a URL that lost its first half.
_CREDENTIALS = re.compile(r"(?<![^\s='\"])[^\s='\":]*:(?!//)\S*(?=@)")


class _Parser(argparse.ArgumentParser):
    """Tells of a wrong call in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, escaped(f"{self.prog}: {_CREDENTIALS.sub('***', redacted(message))} (see {self.prog} --help)") + "\n"
        )


def parser() -> argparse.ArgumentParser:
    """All commands; `command` is the coroutine function that a call names."""
    top = _Parser(prog="agent-runtime", description="Work off, look at and repair durable agent runs.")
    top.add_argument("--version", action="version", version=f"%(prog)s {load('agent_runtime_core:__version__')}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--url", help="where runs are kept: agents.db, sqlite:///agents.db, redis://localhost:6379/0; "
                        "default: AGENT_RUNTIME_BACKEND_URL")  # fmt: skip
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    told = argparse.ArgumentParser(add_help=False, parents=[common])
    told.add_argument("--json", action="store_true", help="write JSON")
    _worker(commands, common)
    _dead(commands, told)
    _looking(commands, told)
    _acting(commands, told)
    _carrying(commands)
    return top


def _worker(commands: Any, common: argparse.ArgumentParser) -> None:
    told = commands.add_parser("worker", parents=[common], help="work off runs until told to stop")
    told.add_argument("target", metavar="module:attr", help="an agent, a list of agents, a Registry, an AgentRunner, "
                      "or a function that returns one of these")  # fmt: skip
    told.add_argument("--concurrency", type=_whole, default=1, help="runs at once (1)")
    told.add_argument("--agent-path", metavar="DIR", default=".", help="where the module is found (this directory)")
    told.add_argument("--grace", type=_seconds, metavar="SECONDS", help="for running work when told to stop (25)")
    told.add_argument("--poll", type=_moment, metavar="SECONDS", default=1.0, help="between looks for work (1)")
    told.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(info)")
    told.set_defaults(command=work)


def _dead(commands: Any, told: argparse.ArgumentParser) -> None:
    dead = commands.add_parser("dead", help="dead letters: runs that killed their process, or failed for good")
    verbs = dead.add_subparsers(title="commands", required=True, metavar="COMMAND")
    status = argparse.ArgumentParser(add_help=False, parents=[told])
    status.add_argument("--status", choices=("dead", "failed"), default="dead", help="which runs (dead)")
    verbs.add_parser("list", parents=[status], help="list them").set_defaults(command=listed)
    for verb, command, parents, what in (
        ("requeue", requeued, [status, _limits()], "have workers take them up again; completed steps are kept"),
        ("discard", discarded, [status], "delete them, with their journal and their events"),
    ):
        each = verbs.add_parser(verb, parents=parents, help=what)
        each.add_argument("ids", nargs="*", metavar="ID")
        each.add_argument("--all", action="store_true", help="all of that status")
        each.set_defaults(command=command)


def _looking(commands: Any, told: argparse.ArgumentParser) -> None:
    listing = commands.add_parser("runs", parents=[told], help="list runs, the last ones last")
    listing.add_argument("--status", choices=[each.value for each in RunStatus], metavar="STATUS")
    listing.add_argument("--agent", metavar="KEY")
    listing.add_argument("--limit", type=_whole, default=50, metavar="N", help="only the last N (50)")
    listing.set_defaults(command=runs)
    one = commands.add_parser("show", parents=[told], help="where a run stands: its steps, its error, what it used")
    one.add_argument("id", metavar="ID")
    one.add_argument("--events", action="store_true", help="its events too")
    one.set_defaults(command=show)


def _acting(commands: Any, told: argparse.ArgumentParser) -> None:
    one = argparse.ArgumentParser(add_help=False, parents=[told])
    one.add_argument("id", metavar="ID")
    stop = commands.add_parser("cancel", parents=[one], help="ask for a run and its children to be cancelled")
    stop.set_defaults(command=cancel)
    for verb, command, default, what in (
        ("signal", signal, None, "give a run a signal, with null or another payload"),
        ("approve", approve, True, "answer what a run asks to be approved, with true or another answer"),
    ):
        each = commands.add_parser(verb, parents=[one], help=what)
        each.add_argument("name", metavar="NAME")
        each.add_argument("payload", nargs="?", type=_json, default=default, metavar="JSON")
        each.set_defaults(command=command)
        if verb == "approve":
            each.add_argument("--force", action="store_true", help="store the answer also if the run has not asked yet")
    again = commands.add_parser("resume", parents=[one, _limits()], help="have workers go on with a run that failed, "
                                "timed out, was cancelled or is dead; completed steps are kept")  # fmt: skip
    again.set_defaults(command=resume)
    other = commands.add_parser("fork", parents=[one], help="make a new run that begins where this one stood")
    other.add_argument("--after", metavar="STEP", help="the name or the id of a step (all that is recorded)")
    other.add_argument("--new-run-id", metavar="ID", help="of the new run (a fresh one)")
    other.add_argument("--effects", choices=EFFECTS, default="refuse",
                       help="what it does at a guarded step that was done before: fail, take the result, request an "
                       "approval, or run it (refuse)")  # fmt: skip
    other.set_defaults(command=fork)
    old = commands.add_parser("vacuum", parents=[told], help="delete ended runs that are older than is said")
    old.add_argument("--retention", type=_retention, action="append", required=True, metavar="STATUS=SECONDS",
                     help="how long runs of that status are kept, others for ever; repeatable")  # fmt: skip
    old.set_defaults(command=vacuum)


def _limits() -> argparse.ArgumentParser:
    """Options that replace limits of a run; the ones that are given are in `args` under their names in RunLimits."""
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("limits", "New limits of the run, in the place of those of its agent.")
    for name, type_, unit in (
        ("max_turns", _whole, "N"), ("max_tool_calls", _whole, "N"), ("max_tokens", _whole, "N"),
        ("max_cost_usd", _usd, "USD"), ("turn_timeout", _moment, "SECONDS"), ("run_timeout", _moment, "SECONDS"),
    ):  # fmt: skip
        group.add_argument(f"--{name.replace('_', '-')}", type=type_, metavar=unit)
    return options


def _carrying(commands: Any) -> None:
    told = commands.add_parser("carry-over", help="put the files of version 0.5.2 into the stores of today")
    told.add_argument("directory", nargs="?", metavar="DIR", help="where .agent_runtime lies (this directory)")
    told.add_argument("--debug", action="store_true", help="show the traceback of an error")
    told.add_argument("--json", action="store_true", help="write JSON")
    told.set_defaults(command=carried)


def _whole(text: str) -> int:
    # int() takes 4,300 digits at most, and no command counts so far.
    if not text.isdecimal() or not (number := int(text[:18])):
        raise argparse.ArgumentTypeError(f"{brief(redacted(text))} is no whole number above 0")
    return number


def _number(text: str, what: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{brief(redacted(text))} is no {what} of at least 0")


def _seconds(text: str) -> float:
    return _number(text, "number of seconds")


def _usd(text: str) -> float:
    return _number(text, "amount in USD")


def _moment(text: str) -> float:
    if not (seconds := _seconds(text)):
        raise argparse.ArgumentTypeError(f"{brief(redacted(text))} is no number of seconds above 0")
    return seconds


def _json(text: str) -> Any:
    try:
        return loads_strict(text)
    except (ValueError, RecursionError) as error:
        why = f"{brief(redacted(text))} is no JSON ({error}): a text goes into quotes of its own, as in '\"yes\"'"
        raise argparse.ArgumentTypeError(why) from None


def _retention(text: str) -> tuple[str, float]:
    status, _, kept = text.partition("=")
    with contextlib.suppress(argparse.ArgumentTypeError):
        return status, _seconds(kept)
    raise argparse.ArgumentTypeError(f"{brief(redacted(text))} is no STATUS=SECONDS, as in succeeded=86400")


def _run(work: Coroutine[Any, Any, int]) -> int:
    """As asyncio.run, but a Ctrl-C in the last moment of `work` is one like any other."""
    with asyncio.Runner() as runner:
        try:
            return runner.run(work)
        finally:
            # That the loop is to stop may still be in it, and would end the first turn of its farewell.
            loop = runner.get_loop()
            loop.call_soon(loop.stop)
            loop.run_forever()


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command; its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # who started this has closed it: nobody reads
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the end
    args = parser().parse_args(argv)
    try:
        code = _run(args.command(args))
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on; the interpreter would fail once more when it closes what is left.
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
    except Exception as error:  # noqa: BLE001 - written as the interpreter would, but without secrets
        trace(error)
        return 1
    return code
