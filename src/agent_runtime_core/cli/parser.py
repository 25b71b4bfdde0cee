"""The parser of all commands: their arguments, help and examples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from .._core.lazy_import import load
from .._core.validation import did_you_mean
from .._execution.step import EFFECTS
from ..status import RunStatus
from .arguments import (
    count,
    duration,
    json_object,
    json_value,
    pair,
    point_in_time,
    port,
    positive_duration,
    positive_int,
    priority,
    retention,
    tenant,
    time_ago,
    usd,
)
from .consent import MANY
from .help import Help, Parser, show_sections

_RUN: Final = "run id, or the id you passed as run_id"
_TARGET: Final = (
    "an agent, a list of agents, a Registry, an AgentRunner, an Orchestrator, a TurnManager, or a function that "
    "returns one of these"
)
_STORE: Final = (
    "store of the runs: agents.db, sqlite:///agents.db, redis://localhost:6379/0, postgresql://localhost/app; default: "
    "AGENT_RUNTIME_BACKEND_URL"
)
_OF_TENANT: Final = "only runs of this tenant"
_STATUSES: Final = [each.value for each in RunStatus]
_LOG_FORMATS: Final = ("text", "json")
_LOG_LEVELS: Final = ("debug", "info", "warning", "error")
CONTRACTS: Final = (
    "queue", "events", "state", "llm", "documents", "audit", "conversations", "knowledge", "memory", "preferences",
    "tasks", "runs",
)  # fmt: skip
SHELLS: Final = ("bash", "zsh", "fish")
CATCH_UP: Final = ("last", "all", "none")  # of a schedule; the module of schedules is not imported for a parser
OVERLAP: Final = ("skip", "queue", "cancel_previous")

_EPILOG = """\
examples:
  agent-runtime worker my_agents:agents --url agents.db
  agent-runtime show order-7 --url agents.db
  agent-runtime dead requeue --all --url agents.db

exit codes:
  0    done
  1    a run was not found or had the wrong status, a check failed, or the awaited run did not succeed
  2    invalid arguments, or the store or module cannot be used; nothing was done
  130  interrupted with Ctrl-C

A duration is a number of seconds, or a number with a unit: 500ms, 25s, 10m, 1h30m, 30d, 2w."""


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of the process, or `argv`. Exit with 2 if they are invalid."""
    top, given = parser(), sys.argv[1:] if argv is None else list(argv)
    if given and given[0].startswith("--") and not any(each.startswith(given[0]) for each in ("--help", "--version")):
        option = given[0].partition("=")[0]
        top.error(f"options must follow the command, got {option} before it. Example: agent-runtime runs {option} …")
    args, extra = top.parse_known_args(given)
    if extra:
        used: Parser = args.parser
        options = [name for action in used._actions for name in action.option_strings]
        unknown_options = [each.partition("=")[0] for each in extra if each.startswith("--")]
        hint = f". {did_you_mean(unknown_options[0], options)}" if unknown_options else ""
        used.error(f"unrecognized arguments: {' '.join(extra)}{hint if 'Did you mean' in hint else ''}")
    return args


def parser() -> Parser:
    """Return the parser of all commands. The parsed `command` names the coroutine function to call."""
    top = Parser(
        prog="agent-runtime",
        description="Run workers, inspect runs and fix failed ones.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    version = f"%(prog)s {load('agent_runtime_core:__version__')}"
    top.add_argument("--version", action="version", version=version, help="print the version and exit")
    top.set_defaults(command=".completion:show_help", words=[], json=False, debug=False, parser=top)
    commands = top.add_subparsers(metavar="COMMAND", help="what to do")
    plain = argparse.ArgumentParser(add_help=False)
    plain.add_argument("--json", action="store_true", help="write JSON")
    plain.add_argument("--debug", action="store_true", help="show the traceback of an error")
    store = argparse.ArgumentParser(add_help=False, parents=[plain])
    store.add_argument("--url", help=_STORE)
    one = _with_tenant([store], "the tenant of the run, if its run_id is a name that several tenants use")
    one.add_argument("id", metavar="RUN", help=_RUN)
    _add_worker(commands, store)
    _add_serve(commands, plain)
    _add_submit(commands, store)
    _add_inspect(commands, plain)
    _add_inspection(commands, store, one)
    _add_export(commands, one)
    _add_control(commands, one)
    _add_dead(commands, store)
    _add_schedule(commands, store)
    _add_tenant(commands, store)
    _add_maintenance(commands, store, plain)
    _add_backup(commands, plain, store, one)
    _add_help(commands, plain)
    show_sections(top, commands)
    return top


def _with_tenant(parents: list[argparse.ArgumentParser], what: str) -> argparse.ArgumentParser:
    """Return a parser with the option `--tenant`, which every command for runs takes."""
    options = argparse.ArgumentParser(add_help=False, parents=parents)
    options.add_argument("--tenant", type=tenant, metavar="TENANT", help=what)
    return options


def _filters(parents: list[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Return a parser with the options that choose runs. `wanted_runs` of `store` reads them."""
    options = argparse.ArgumentParser(add_help=False, parents=parents)
    add = options.add_argument
    add("--status", action="append", choices=_STATUSES, metavar="STATUS",
        help=f"only runs with this status: {', '.join(_STATUSES)}; repeatable")  # fmt: skip
    add("--agent", metavar="KEY", help="only runs of the agent with this key")
    add("--since", type=time_ago, metavar="TIME",
        help="only runs created at or after this: a duration ago, or an ISO 8601 time")  # fmt: skip
    add("--until", type=time_ago, metavar="TIME",
        help="only runs created before this: a duration ago, or an ISO 8601 time")  # fmt: skip
    add("--conversation", metavar="ID", help="only runs of this conversation")
    add("--concurrency-key", metavar="KEY", help="only runs with this concurrency key")
    add("--prefix", metavar="TEXT", help="only runs whose id, or run_id you passed, begins with this")
    return options


def _command(
    commands: Any, name: str, run: str, what: str, example: str, parents: Iterable[argparse.ArgumentParser] = (),
    description: str = "",
) -> Parser:  # fmt: skip
    """Add a command.

    Args:
        commands: Where to add it.
        name: Its name.
        run: The module and function that execute it. They are imported only then, so that `--help` is fast.
        what: One line of help.
        example: The arguments of an example.
        parents: Parsers with more arguments.
        description: Longer help of the command. By default `what`.
    """
    lines = "\n".join(f"  agent-runtime {line}" for line in example.splitlines())
    added: Parser = commands.add_parser(
        name, parents=list(parents), help=what, description=description or f"{what[:1].upper()}{what[1:]}.",
        epilog=f"example:\n{lines}", formatter_class=Help,
    )  # fmt: skip
    added.set_defaults(command=run, parser=added)
    if (asks := MANY.get(added.prog.partition(" ")[2])) is not None:
        added.add_argument("--dry-run", action="store_true", help="only print what would be done")
        if asks:
            added.add_argument("--yes", action="store_true", help="do it without a question")
    return added


def _group(commands: Any, name: str, what: str, example: str) -> Any:
    """Add a command with commands below it, and return where to add these. Without one it prints its help."""
    added = commands.add_parser(
        name, help=what, description=f"{what[:1].upper()}{what[1:]}.", epilog=f"example:\n  agent-runtime {example}",
        formatter_class=Help,
    )  # fmt: skip
    added.set_defaults(command=".completion:show_help", words=[name], json=False, debug=False, parser=added)
    below = added.add_subparsers(metavar="COMMAND", help="what to do")
    added._action_groups[0].title, added._action_groups[0]._group_actions = "commands", below._choices_actions
    return below


# -- groups of commands


def _add_worker(commands: Any, store: argparse.ArgumentParser) -> None:
    worker = _command(
        commands, "worker", ".worker:work", "execute runs until SIGTERM or Ctrl-C",
        "worker my_agents:agents --url agents.db --concurrency 8", [store],
    )  # fmt: skip
    worker.add_argument("target", metavar="module:attr", help=_TARGET)
    _add_worker_options(worker, concurrency=1)
    worker.add_argument(
        "--metrics-port",
        type=port,
        metavar="N",
        help="serve metrics for Prometheus on this port; 0 chooses a free one (default: off)",
    )
    worker.add_argument(
        "--metrics-host", default="127.0.0.1", metavar="ADDRESS", help="address of the metrics (default: 127.0.0.1)"
    )


def _add_worker_options(worker: Parser, *, concurrency: int) -> None:
    worker.add_argument("--concurrency", type=positive_int, default=concurrency, metavar="N",
                        help=f"runs at once (default: {concurrency})")  # fmt: skip
    _add_agent_path(worker)
    worker.add_argument(
        "--grace", type=duration, metavar="DURATION", help="time to let active runs finish on SIGTERM (default: 25s)"
    )
    worker.add_argument("--poll", type=positive_duration, metavar="DURATION", default=1.0,
                        help="time between polls when no notification arrives (default: 1s)")  # fmt: skip
    worker.add_argument("--log-level", choices=_LOG_LEVELS, default="info", metavar="LEVEL",
                        help=f"least severe log records to write to stderr: {', '.join(_LOG_LEVELS)} "
                        "(default: info)")  # fmt: skip
    worker.add_argument("--log-format", choices=_LOG_FORMATS, metavar="FORMAT",
                        help="form of the log on stderr: text or json (default: text, with --json json)")  # fmt: skip


def _add_serve(commands: Any, plain: argparse.ArgumentParser) -> None:
    serving = _command(
        commands, "serve", ".serve:serve", "serve the HTTP API and execute runs until SIGTERM or Ctrl-C",
        """serve --db agents.db
serve my_agents:agents --url redis://localhost:6379/0 --host 0.0.0.0 --trusted-host agents.example.com""",
        [plain],
        "Serve the HTTP API and execute runs until SIGTERM or Ctrl-C. Without module:attr, the runs are prompts, which "
        "are planned with the built-in tools, and conversation turns.",
    )  # fmt: skip
    serving.set_defaults(loop="uvloop:new_event_loop")
    serving.add_argument("target", nargs="?", metavar="module:attr", help=_TARGET)
    store = serving.add_mutually_exclusive_group()
    store.add_argument("--url", help=_STORE)
    store.add_argument("--db", metavar="FILE", help="SQLite file of the runs")
    serving.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    serving.add_argument(
        "--port", type=port, default=8000, metavar="N", help="port to listen on; 0 chooses a free one (default: 8000)"
    )
    auth = serving.add_mutually_exclusive_group()
    auth.add_argument("--token", metavar="TEXT", help="the token that requests need; default: AGENT_RUNTIME_TOKEN")
    auth.add_argument("--token-file", metavar="FILE",
                      help="file with a token per line: TOKEN [NAME [SCOPES [tenant=TENANT]]]; created if it is "
                      "missing (default: the SQLite file with .token after its name, or agent-runtime/token in "
                      "XDG_STATE_HOME)")  # fmt: skip
    auth.add_argument(
        "--no-auth", action="store_true", help="accept requests without a token, on a loopback address only"
    )
    serving.add_argument("--no-worker", action="store_true", help="execute no runs in this process")
    _add_worker_options(serving, concurrency=16)
    for name, metavar, what in (
        ("--cors", "ORIGIN", "let pages of this origin call the API with a token, like https://app.example.com"),
        ("--trusted-host", "NAME", "answer requests for this host name, besides localhost"),
        ("--trusted-proxy", "ADDRESS", "believe the X-Forwarded headers of the proxy with this address"),
    ):
        serving.add_argument(name, action="append", default=[], metavar=metavar, help=f"{what}; repeatable")
    serving.add_argument("--metrics", choices=("token", "open"),
                         help="serve metrics for Prometheus at /metrics, for tokens with the scope metrics, or open "
                         "for everybody (default: off)")  # fmt: skip
    serving.add_argument("--max-pending", type=positive_int, metavar="N",
                         help="reject a new run with 429 while N runs are pending (default: no limit)")  # fmt: skip
    serving.add_argument("--max-body", type=positive_int, default=1 << 20, metavar="BYTES",
                         help="largest body of a request, at most 16777216 (default: 1048576)")  # fmt: skip


def _add_inspect(commands: Any, plain: argparse.ArgumentParser) -> None:
    inspecting = _command(
        commands, "inspect", ".inspect:inspect", "show the runs of a store in the browser, and change nothing",
        "inspect agents.db --open", [plain],
        "Serve pages that show the runs of a store, for this machine only, until SIGTERM or Ctrl-C. The store is "
        "opened read-only: neither its file nor its directory is written.",
    )  # fmt: skip
    inspecting.add_argument(
        "store",
        nargs="?",
        metavar="FILE",
        help="SQLite file of the runs, or the URL of a store; default: AGENT_RUNTIME_BACKEND_URL",
    )
    inspecting.add_argument("--open", action="store_true", dest="open_browser", help="open the default browser")
    inspecting.add_argument(
        "--port", type=port, default=0, metavar="N", help="port to listen on; 0 chooses a free one (default: 0)"
    )


def _add_agent_path(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--agent-path", metavar="DIR", default=".", help="directory of the module (default: the current directory)"
    )


def _add_order(add: Callable[..., Any]) -> None:
    """Add the options that say when workers start a run, and by which tags it is found."""
    add("--priority", type=priority, default=0, metavar="N", help="runs with a greater one start first (default: 0)")
    add("--concurrency-key", metavar="KEY", help="runs with the same key execute one at a time")
    add("--concurrency-limit", type=positive_int, default=1, metavar="N", help="active runs of the key (default: 1)")
    add("--tag", action="append", default=[], metavar="TAG", help="a tag of the runs; repeatable")


def _add_submit(commands: Any, store: argparse.ArgumentParser) -> None:
    submitting = _command(
        commands, "submit", ".submit:submit", "store a run for a worker",
        """submit greeter --input '{"name": "Ada"}' --url agents.db
submit my_agents:Greeter --message "Hello" --run-id hello-1 --wait --url agents.db""",
        [_with_tenant([store], "whose run it is; run ids and other keys are names within the tenant"),
         _limits("Limits of the run. They only tighten those of its worker.")],
        "Store a run for a worker. With an agent key, no code is imported.",
    )  # fmt: skip
    add = submitting.add_argument
    add("target", nargs="?", metavar="AGENT", help="agent key, or module:attr of the agent")
    _add_agent_path(submitting)
    add("--agent", metavar="KEY", help="agent key, if module:attr has several agents or the key has a colon")
    add("--input", type=json_object, default={}, metavar="JSON", help="input of the run, a JSON object (default: {})")
    add("--params", type=json_object, metavar="JSON", help='"params" of the input, a JSON object')
    add("--message", metavar="TEXT", help='a message of the user, added to the "messages" of the input')
    add("--run-id", metavar="ID", help="names the run; a second submit with the same id stores nothing")
    add("--idempotency-key", metavar="KEY", help="a second submit with the same key stores nothing, shows the first")
    add("--delay", type=duration, default=0.0, metavar="DURATION", help="time until the run may start (default: 0)")
    add("--deadline", type=point_in_time, metavar="TIME",
        help="when the run is stopped: a duration from now, or an ISO 8601 time")  # fmt: skip
    _add_order(add)
    add("--wait", action="store_true", help="wait until the run has finished; exit code 1 unless it succeeded")


def _add_inspection(commands: Any, store: argparse.ArgumentParser, run: argparse.ArgumentParser) -> None:
    add = _command(
        commands, "runs", ".runs:runs", "list runs, newest last", "runs --status failed --limit 20 --url agents.db",
        [_filters([_with_tenant([store], _OF_TENANT)])],
    ).add_argument  # fmt: skip
    add("--limit", type=positive_int, default=50, metavar="N", help="only the newest N (default: 50)")
    add("--search", metavar="TEXT", help="only runs with this text in id, input, result, errors, messages, metadata")
    add("--tag", metavar="TAG", help="only runs with this tag")
    add("--metadata", action="append", type=pair, default=[], metavar="KEY=VALUE", help="in the metadata; repeatable")
    add("--min-attempts", type=positive_int, default=1, metavar="N", help="only runs with at least N attempts")
    add("--error-type", metavar="TYPE", help="only runs whose last error has this type, such as ConnectionError")
    add("--code-version", metavar="VERSION", help="only runs that code of this version began or continues")
    add("--parent", metavar="ID", help="only child runs of this run")
    add("--sort", choices=("age", "duration", "cost", "attempts"), help="list the greatest values first")
    _command(
        commands, "workers", ".runs:workers", "list the processes that claim runs", "workers --url agents.db", [store]
    )
    _command(
        commands, "pools", ".runs:pools", "list the pools of runs with what is spent, reserved and left",
        "pools --url agents.db", [_with_tenant([store], "only the pools of this tenant")],
    )  # fmt: skip
    _command(
        commands, "show", ".runs:show", "show a run: its status, steps, error and usage",
        "show order-7 --events --url agents.db", [run],
    ).add_argument("--events", action="store_true", help="also show its events")  # fmt: skip
    events = _command(
        commands, "events", ".runs:events", "show the events of a run, or follow them",
        "events order-7 --follow --url agents.db", [run],
    )  # fmt: skip
    events.add_argument("--follow", action="store_true", help="also show new events until the run has finished")
    first = events.add_mutually_exclusive_group()
    first.add_argument(
        "--since", type=count, default=0, metavar="N", help="sequence number of the first event (default: 0)"
    )
    first.add_argument(
        "--after", type=count, metavar="N", help="only events after this sequence number, the last one that you have"
    )
    events.add_argument("--type", action="append", metavar="TYPE",
                        help='only events of this type, such as step.completed; "step.*" is a pattern; '
                        "repeatable")  # fmt: skip


def _add_export(commands: Any, run: argparse.ArgumentParser) -> None:
    exporting = _command(
        commands, "export", ".inspect:export", "write a run with its steps, journal, events and messages",
        """export order-7 --jsonl --url agents.db > order-7.jsonl
export order-7 --html --redact --output order-7.html --url agents.db""", [run],
        "Write a run with all that is stored of it, as JSON or as an HTML file. As JSON it is one object on each "
        "line, whose `kind` is run, step, record, event or message. An HTML file shows the run and its child runs in "
        "a browser, without a network. Secrets in URLs are replaced by ***.",
    )  # fmt: skip
    form = exporting.add_mutually_exclusive_group()
    form.add_argument("--jsonl", action="store_true", help="one JSON object on each line (the default)")
    form.add_argument("--html", action="store_true", help="an HTML file that shows the run in a browser")
    exporting.add_argument("--redact", action="store_true",
                           help="leave out inputs, outputs, payloads, messages, error messages and metadata, and "
                           "replace keys by a hash; needs --html")  # fmt: skip
    exporting.add_argument("--output", metavar="FILE", help="file to write (default: stdout)")


def _add_control(commands: Any, one: argparse.ArgumentParser) -> None:
    _command(
        commands, "cancel", ".control:cancel", "request cancellation of a run and its child runs",
        "cancel order-7 --url agents.db", [one],
    )  # fmt: skip
    sending = _command(
        commands, "send", ".control:send", "send a message to the agent of a run",
        'send order-7 "Use the blue one" --url agents.db', [one],
    )  # fmt: skip
    sending.add_argument("text", metavar="TEXT", help="the message of the user")
    sending.add_argument("--interrupt", action="store_true", help="end the model call in flight")
    sending.add_argument("--message-id", metavar="ID", help="messages with the same id are stored once")
    signaling = _command(
        commands, "signal", ".control:signal", "send a signal to a run",
        """signal order-7 paid '{"amount": 20}' --url agents.db""", [one],
    )  # fmt: skip
    signaling.add_argument("name", metavar="NAME", help="signal name")
    signaling.add_argument("payload", nargs="?", type=json_value, metavar="PAYLOAD", help="as JSON (default: null)")
    approving = _command(
        commands, "approve", ".control:approve", "answer an approval that a run has requested",
        "approve order-7 plan --url agents.db", [one],
    )  # fmt: skip
    approving.add_argument("name", metavar="NAME", help='approval name (see "agent-runtime show RUN")')
    add = approving.add_argument
    add("payload", nargs="?", type=json_value, default=True, metavar="ANSWER", help="as JSON (default: true)")
    add("--request-id", metavar="ID", help='which question is meant, if several with this name are open (see "show")')
    add("--force", action="store_true", help="store the answer even if the run has not requested it")
    resuming = _command(
        commands, "resume", ".control:resume", "let workers resume a run that did not succeed",
        "resume order-7 --max-cost-usd 2 --url agents.db", [one, _limits("New limits of the run.")],
        "Let workers resume a failed, timed-out, cancelled or dead run. Completed steps keep their results.",
    )  # fmt: skip
    resuming.add_argument(
        "--code-version", metavar="VERSION", help="the code_version of the agent whose code continues the run"
    )
    forking = _command(
        commands, "fork", ".control:fork", "create a run that starts from the state of another run",
        "fork order-7 --after fetch --new-run-id order-7-again --url agents.db", [one],
    )  # fmt: skip
    forking.add_argument(
        "--after", metavar="STEP", help="copy up to this step, by name or id (default: all recorded steps)"
    )
    forking.add_argument("--new-run-id", metavar="ID", help="id of the new run (default: a new id)")
    forking.add_argument("--effects", choices=EFFECTS, default="refuse", metavar="MODE",
                         help="what to do at a guarded step that another run has done: refuse (fail), reuse (its "
                         "result), ask (for an approval), repeat (default: refuse)")  # fmt: skip


def _add_dead(commands: Any, store: argparse.ArgumentParser) -> None:
    verbs = _group(commands, "dead", "list, requeue or delete dead-letter runs", "dead list --url agents.db")
    status = _with_tenant([store], _OF_TENANT)
    status.add_argument("--status", choices=("dead", "failed"), default="dead", metavar="STATUS",
                        help="only runs with this status: dead, failed (default: dead)")  # fmt: skip
    _command(verbs, "list", ".runs:list_dead", "list the runs", "dead list --status failed --url agents.db", [status])
    for verb, parents, what in (
        ("requeue", [status, _limits("New limits of the run.")],
         "let workers resume the runs; completed steps keep their results"),
        ("discard", [status], "delete the runs, with their journal and events"),
    ):  # fmt: skip
        example = f"dead {verb} order-7 --url agents.db\ndead {verb} --all --dry-run --url agents.db"
        each = _command(verbs, verb, f".runs:{verb}", what, example, parents)
        each.add_argument("ids", nargs="*", metavar="RUN", help=_RUN)
        each.add_argument("--all", action="store_true", help="all runs with that status")


def _add_schedule(commands: Any, store: argparse.ArgumentParser) -> None:
    example = "schedule put report-daily report --cron '0 9 * * mon-fri' --timezone Europe/Berlin --url agents.db"
    verbs = _group(commands, "schedule", "list, store, pause, run or delete schedules, which start runs", example)
    every = _with_tenant([store], "only schedules of this tenant")
    _command(verbs, "list", ".schedules:list_schedules", "list the schedules", "schedule list --url agents.db", [every])
    one = _with_tenant([store], "the tenant that the schedule belongs to")
    one.add_argument("id", metavar="ID", help="name of the schedule")
    putting = _command(
        verbs, "put", ".schedules:put", "store a schedule, or replace the schedule with that name",
        f"{example}\nschedule put poll poller --every 30s --overlap queue --url agents.db", [one],
        "Store a schedule, or replace the schedule with that name. Workers start a run at each tick. After a change, "
        "the first tick is the first one after now.",
    )  # fmt: skip
    add = putting.add_argument
    add("agent", metavar="AGENT", help="key of the agent")
    when = putting.add_mutually_exclusive_group(required=True)
    when.add_argument("--cron", metavar="TEXT", help="cron expression of five fields")
    when.add_argument("--every", type=positive_duration, metavar="DURATION", help="time between two ticks")
    add("--timezone", default="UTC", metavar="NAME", help="time zone of --cron, such as Europe/Berlin (default: UTC)")
    add("--input", type=json_object, default={}, metavar="JSON", help="input of the runs (default: {})")
    add("--metadata", type=json_object, default={}, metavar="JSON", help="metadata of the runs (default: {})")
    _add_order(add)
    for name, values, what in (
        ("--catch-up", CATCH_UP, "which ticks are fired that passed while no worker ran"),
        ("--overlap", OVERLAP, "what happens to a tick while the run of the tick before is live"),
    ):
        add(name, choices=values, default=values[0], metavar="HOW",
            help=f"{what}: {', '.join(values)} (default: {values[0]})")  # fmt: skip
    add("--jitter", type=duration, default=0.0, metavar="DURATION",
        help="delay each tick by a part of this time (default: 0)")  # fmt: skip
    add("--start", type=point_in_time, metavar="TIME", help="no tick is before this time")
    add("--end", type=point_in_time, metavar="TIME", help="no tick is after this time")
    add("--paused", action="store_true", help="fire no tick until the schedule is resumed")
    for verb, run, what in (
        ("show", "show", "show a schedule with its next ticks and last runs"),
        ("pause", "pause", "fire no tick until the schedule is resumed"),
        ("resume", "resume", "fire ticks again, from the first tick after now"),
        ("run", "run", "start a run of the schedule now, besides its ticks"),
        ("delete", "delete", "delete a schedule; its runs stay"),
        ("next", "next_ticks", "print the next ticks of a schedule"),
    ):
        each = _command(verbs, verb, f".schedules:{run}", what, f"schedule {verb} report-daily --url agents.db", [one])
    each.add_argument("--count", type=positive_int, default=5, metavar="N", help="how many ticks (default: 5)")
    each.add_argument("--after", type=point_in_time, metavar="TIME",
                      help="ticks after this: a duration from now, or an ISO 8601 time (default: now)")  # fmt: skip


def _add_tenant(commands: Any, store: argparse.ArgumentParser) -> None:
    verbs = _group(commands, "tenant", "give runs to a tenant", "tenant set acme --prefix acme- --url agents.db")
    setting = _command(
        verbs, "set", ".tenants:set_tenant", "give stored runs and their conversations to a tenant",
        """tenant set acme --prefix acme- --dry-run --url agents.db
tenant set acme --prefix acme- --url agents.db""", [_filters([store])],
        "Give stored runs and their conversations to a tenant, such as runs of releases without tenants. Child runs "
        "follow their run. A run that a worker executes is skipped: run the command again later. A run is not moved "
        "if the tenant uses one of its keys. The command may be interrupted, and run again.",
    )  # fmt: skip
    add = setting.add_argument
    add("tenant", type=tenant, metavar="TENANT", help="the tenant that the runs belong to afterwards")
    add("--from", type=tenant, dest="source", metavar="TENANT",
        help="take runs of this tenant (default: runs without a tenant)")  # fmt: skip


def _add_maintenance(commands: Any, store: argparse.ArgumentParser, plain: argparse.ArgumentParser) -> None:
    deleting = _command(
        commands, "vacuum", ".control:vacuum", "delete finished runs older than --retention",
        "vacuum --retention succeeded=30d --retention failed=90d --url agents.db", [store],
    )  # fmt: skip
    deleting.add_argument("--retention", type=retention, action="append", required=True, metavar="STATUS=DURATION",
                          help="how long to keep runs with this status (others are kept); repeatable")  # fmt: skip
    _command(
        commands, "doctor", ".doctor:doctor", "check versions, settings, file permissions and the store",
        "doctor --url agents.db", [store],
    )  # fmt: skip
    _add_migrate(commands, plain)
    _command(
        commands, "index", ".index:index", "index the contents of runs, to search all of them", "index --url agents.db",
        [store],
    ).add_argument("--drop", action="store_true", help="delete the index")  # fmt: skip
    _add_erase(commands, plain)
    _add_reencrypt(commands, plain)
    _add_check(commands, store)
    conforming = _command(
        commands, "conformance", ".conformance:conformance", "run the conformance tests for a store or a backend class",
        "conformance my_backends.queue:MyQueue --option path={tmp}/queue.db", [plain],
        "Run the conformance tests for a store URL or a custom backend class. Each test creates new and empty "
        "backends. Some tests open further objects on the same store.",
    )  # fmt: skip
    conforming.add_argument("target", metavar="TARGET",
                            help="a store URL, a class as module:Class, or a function that returns a backend; "
                            "{tmp} and {n} in a URL as for --option")  # fmt: skip
    _add_agent_path(conforming)
    conforming.add_argument("--contract", choices=CONTRACTS, metavar="NAME",
                            help=f"tests to run: {', '.join(CONTRACTS)}; default: those of its base class")  # fmt: skip
    conforming.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                            help="argument of the class, JSON or a string; {tmp} is a new directory and {n} a new "
                            "number for each backend; repeatable")  # fmt: skip
    conforming.add_argument("--case", metavar="TEXT", help="only tests whose name contains this text")
    migrating = _command(
        commands, "carry-over", ".control:migrate_files", "migrate the files of version 0.5.2 to the present stores",
        "carry-over ~/my_project", [plain],
    )  # fmt: skip
    migrating.add_argument("directory", nargs="?", metavar="DIR",
                           help="directory that contains .agent_runtime (default: the current directory)")  # fmt: skip


def _add_help(commands: Any, plain: argparse.ArgumentParser) -> None:
    showing = _command(
        commands, "help", ".completion:show_help", "show the help of a command", "help dead discard", [plain]
    )
    showing.add_argument("words", nargs="*", metavar="COMMAND", help="the command (default: all commands)")
    _command(commands, "version", ".completion:version", "print the version", "version", [plain])
    scripting = _command(
        commands, "completion", ".completion:completion", "print a script for completion in a shell",
        "completion bash > ~/.local/share/bash-completion/completions/agent-runtime", [plain],
    )  # fmt: skip
    scripting.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _add_backup(
    commands: Any, plain: argparse.ArgumentParser, store: argparse.ArgumentParser, one: argparse.ArgumentParser
) -> None:
    copying = _command(
        commands, "backup", ".backup:backup", "copy a SQLite file while workers use it, and check the copy",
        "backup agents.db backups/agents-2026-11-29.db", [plain],
    )  # fmt: skip
    copying.add_argument("source", metavar="FILE", help="SQLite file of the runs")
    copying.add_argument("copy", metavar="COPY", help="the new file; only its owner can read it")
    restoring = _command(
        commands, "restore", ".backup:restore", "make a store of a copy, and mark the runs that had not ended",
        "restore backups/agents-2026-11-29.db agents.db", [plain],
    )  # fmt: skip
    restoring.add_argument("copy", metavar="COPY", help="what backup has written")
    restoring.add_argument("file", metavar="FILE", help="the new SQLite file; it must not exist")
    _command(
        commands, "mark-restored", ".backup:mark", "mark the runs of a store that was restored by other means",
        "mark-restored --url redis://localhost:6379/0", [store],
    ).add_argument("--force", action="store_true", help="although the store lists living workers")  # fmt: skip
    confirming = _command(
        commands, "restored", ".backup:restored", "confirm that a restored store lacks nothing of a run",
        "restored order-7 --confirm --url agents.db", [one],
    )  # fmt: skip
    confirming.add_argument("--confirm", action="store_true", help="confirm it; a run that has failed is resumed")
    confirming.add_argument("--by", metavar="NAME", help="who confirms it")
    moving = _command(
        commands, "copy", ".backup:copy", "move a store to another file or server",
        "copy agents.db postgresql://localhost/app\ncopy agents.db --undo", [plain],
        "Move a store between SQLite, Redis and PostgreSQL: copy everything in FROM to the empty store TO, and refuse "
        "all later writes to FROM. Stop the workers first. The command compares both stores at the end. It may be "
        "interrupted, and run again.",
    )  # fmt: skip
    moving.add_argument("source", metavar="FROM", help="SQLite file or URL of the old store")
    moving.add_argument("target", nargs="?", metavar="TO", help="new SQLite file, or URL of an empty store")
    moving.add_argument(
        "--force", action="store_true", help="move the store although workers use it; their steps are in doubt"
    )
    moving.add_argument(
        "--undo", action="store_true", help="let FROM accept writes again after a copy that was not finished"
    )
    checking = _command(
        commands, "verify", ".backup:verify", "read everything in a store, and say what is damaged",
        "verify agents.db", [plain],
    )  # fmt: skip
    where = checking.add_mutually_exclusive_group()
    where.add_argument(
        "store", nargs="?", metavar="STORE", help="SQLite file or URL of the store; default: AGENT_RUNTIME_BACKEND_URL"
    )
    where.add_argument("--url", help="another way to name STORE")


def _add_migrate(commands: Any, plain: argparse.ArgumentParser) -> None:
    migrating = _command(
        commands, "migrate", ".migrate:migrate", "create or update the schema of a PostgreSQL store",
        """migrate postgresql://owner@db.example.com/app --role worker --reader inspector
migrate postgresql://owner@db.example.com/app --dry-run""", [plain],
        "Create or update the schema of a PostgreSQL store, and grant it to a role of workers and to a role that only "
        "reads. A worker whose role may create a schema does that itself. Use the command before a deploy, or if the "
        "role may not.",
    )  # fmt: skip
    add = migrating.add_argument
    where = migrating.add_mutually_exclusive_group()
    where.add_argument("store", nargs="?", metavar="STORE",
                       help="URL of the store, with the user that owns the schema; default: "
                       "AGENT_RUNTIME_BACKEND_URL")  # fmt: skip
    where.add_argument("--url", help="another way to name STORE")
    add("--role", metavar="NAME", help="role of workers, which gets the rights to read and write, and none to create")
    add("--reader", metavar="NAME", help='role that gets the right to read, for "inspect" and for the views')
    add("--dry-run", action="store_true", help="only print the SQL statements")


def _add_erase(commands: Any, plain: argparse.ArgumentParser) -> None:
    erasing = _command(
        commands, "erase", ".erase:erase", "erase what a tenant, a conversation or runs have stored",
        """erase agents.db --tenant acme --dry-run
erase agents.db --conversation "room 7" --cancel
erase agents.db --run order-7 --run order-8 --tenant acme --yes""", [plain],
        "Erase runs with their child runs, forks, journals, events and messages, and the documents that belong to the "
        "tenant or name the conversation or a run. The digests of guarded steps stay, so that no effect happens a "
        "second time. The command may be interrupted, and run again.",
    )  # fmt: skip
    add = erasing.add_argument
    where = erasing.add_mutually_exclusive_group()
    where.add_argument(
        "store", nargs="?", metavar="STORE", help="SQLite file or URL of the store; default: AGENT_RUNTIME_BACKEND_URL"
    )
    where.add_argument("--url", help="another way to name STORE")
    add("--tenant", type=tenant, metavar="TENANT",
        help="all of this tenant; with --conversation or --run, the tenant whose names these are")  # fmt: skip
    add("--conversation", metavar="ID", help="the conversation with this name or id, and its forks")
    add("--run", action="append", default=[], metavar="RUN", help="the run with this id or key; repeatable")
    add("--cancel", action="store_true", help="cancel live runs and wait for their end (default: refuse)")
    add("--compact", action="store_true",
        help="write a SQLite file of more than 64 MiB again too, so that its free pages hold no old text")  # fmt: skip


def _add_reencrypt(commands: Any, plain: argparse.ArgumentParser) -> None:
    encrypting = _command(
        commands, "reencrypt", ".reencrypt:reencrypt", "encrypt all stored contents with the current key",
        "reencrypt agents.db --compact", [plain],
        "Encrypt all stored contents with the current key of the payload codec, also those that are not encrypted. The "
        "codec is the setting AGENT_RUNTIME_PAYLOAD_CODEC. Runs that a worker owns are skipped: run the command again "
        "later. It may be interrupted, and run again.",
    )  # fmt: skip
    where = encrypting.add_mutually_exclusive_group()
    where.add_argument("store", nargs="?", metavar="STORE",
                       help="SQLite file or URL of the store, or files:///path for a directory of documents; default: "
                       "AGENT_RUNTIME_BACKEND_URL")  # fmt: skip
    where.add_argument("--url", help="another way to name STORE")
    encrypting.add_argument(
        "--batch", type=positive_int, default=500, metavar="N", help="texts in one commit, at most (default: 500)"
    )
    encrypting.add_argument("--compact", action="store_true",
                            help="write a SQLite file again afterwards, so that its free pages hold no old text; no "
                            "process can write to it during that time")  # fmt: skip
    _add_agent_path(encrypting)


def _add_check(commands: Any, store: argparse.ArgumentParser) -> None:
    checking = _command(
        commands, "check", ".check:check", "find live runs that this code cannot resume",
        "check my_agents:agents --url agents.db", [_with_tenant([store], _OF_TENANT)],
        "Find live runs that this code cannot resume. Each run is replayed from its saved results up to the first step "
        "without one. Nothing is stored, and no step, model or tool is called. Code between steps is executed: do not "
        "check code that has effects outside of steps.",
    )  # fmt: skip
    checking.add_argument("target", metavar="module:attr", help=_TARGET)
    _add_agent_path(checking)
    checking.add_argument("--failed", action="store_true", help="also check failed, timed-out, cancelled and dead runs")
    checking.add_argument("--run", metavar="RUN", help="check only this run")
    checking.add_argument("--timeout", type=positive_duration, default=10.0, metavar="DURATION",
                          help="time to replay one run (default: 10s)")  # fmt: skip


def _limits(description: str) -> argparse.ArgumentParser:
    """Return the options for limits of a run, parsed under their names in RunLimits."""
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("limits", description)
    for name, type_, unit, what in (
        ("max_turns", positive_int, "N", "model calls of the run"),
        ("max_tool_calls", positive_int, "N", "tool calls of the run"),
        ("max_tokens", positive_int, "N", "tokens of all model calls"),
        ("max_cost_usd", usd, "USD", "cost of all model calls, in USD"),
        ("turn_timeout", positive_duration, "DURATION", "time for one model call and its tool calls"),
        ("run_timeout", positive_duration, "DURATION", "time for the work of the run, without waits"),
    ):
        group.add_argument(f"--{name.replace('_', '-')}", type=type_, metavar=unit, help=what)
    return options
