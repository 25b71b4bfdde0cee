"""`agent-runtime serve`: one process that serves the HTTP API and executes runs until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .._core.log import log
from .._core.validation import must
from .._views.page import is_loopback
from ..config import get_config
from ..errors import InvalidArgument
from ..orchestrator import Orchestrator
from ..registry import Registry
from ..runner.runner import AgentRunner
from ..runner.settings import RunnerConfig
from ..server.access import Caller, Tokens
from ..server.app import create_app
from ..server.serving import Server, listening_socket, url_of, within_descriptors
from ..server.settings import MOST_BODY_BYTES, ServerSettings
from ..server.state import ServerState
from ..server.token_file import Token, default_path
from ..turns.manager import TurnManager
from .app_loader import agents_in, loaded, runner_of
from .output import json_line, print_line
from .store import display_name, open_store, refuse_url
from .worker import end_in_spite_of_tasks, freeze_imports, metrics_of, set_up_logging, worker_name

TOKEN_VARIABLE = "AGENT_RUNTIME_TOKEN"
_ANY_ADDRESS = ("0.0.0.0", "::", "")


@dataclass
class Served:
    """What a server serves."""

    runner: AgentRunner
    orchestrator: Orchestrator | None = None
    turns: TurnManager | None = None


async def serve(args: Namespace) -> int:
    """Print a line with the URL when ready; serve and execute runs until SIGTERM or SIGINT.

    Then new requests get 503, streams end, and active runs finish. A second signal does not wait for active runs.
    """
    set_up_logging(args)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _check_authentication(args)
    # The handlers stay until the runner is closed: before that, a second signal must not kill the process.
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(contextlib.closing(listening_socket(args.host, args.port)))
        settings = _settings(args)
        served = _served(args)
        async with served.runner as runner:
            await runner.queue.next_due()  # raises for an unreadable store before the ready line
            tokens = _authentication(args, runner, settings)
            app = create_app(
                runner, orchestrator=served.orchestrator, turns=served.turns, settings=settings,
                authenticate=tokens or (lambda _: Caller("anyone")),
                metrics=None if args.metrics is None else metrics_of(runner),
            )  # fmt: skip
            freeze_imports()
            server, state = Server(app), app.state.server
            stack.enter_context(_on_signals(server, state))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            await _started(server, serving)
            _print_ready(args, runner, url_of(listening, args.host), tokens)
            await _until_stopped(args, server, serving, state)
    log.info("server %s has stopped", runner.config.worker_id)
    await end_in_spite_of_tasks()
    return 0


async def _started(server: Server, serving: asyncio.Task[None]) -> None:
    waiting = asyncio.create_task(server.ready.wait())
    await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        waiting.cancel()
        serving.result()


async def _until_stopped(args: Namespace, server: Server, serving: asyncio.Task[None], state: ServerState) -> None:
    """Execute runs until a signal, then let active runs finish and end the server. Until then, it rejects requests."""
    draining = asyncio.create_task(state.draining.wait())
    tasks: set[asyncio.Task[Any]] = {draining, serving}
    if not args.no_worker:
        working = asyncio.create_task(
            state.runner.run_loop(args.poll, concurrency=args.concurrency, handle_signals=False)
        )
        tasks.add(working)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        state.draining.set()
        if not args.no_worker:
            if not working.done():
                state.runner.stop()
            await working
    finally:
        draining.cancel()
        server.should_exit = True
        await serving


@contextlib.contextmanager
def _on_signals(server: Server, state: ServerState) -> Iterator[None]:
    """Begin to shut down on SIGTERM or SIGINT; a second signal does not wait for runs and responses."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not state.draining.is_set():
            state.draining.set()
            return
        server.force_exit = True
        state.runner.stop()

    def handle(*_: object) -> None:
        loop.call_soon_threadsafe(stop)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_authentication(args: Namespace) -> None:
    if args.no_auth and not is_loopback(args.host):
        raise InvalidArgument(
            f"--no-auth must not be used with --host {args.host}, where other machines could use the server. "
            "Use --host 127.0.0.1, or a token"
        )


def _settings(args: Namespace) -> ServerSettings:
    if args.host in _ANY_ADDRESS and not args.trusted_host:
        log.warning(
            "requests from other machines get status 421, because no --trusted-host is set. "
            "Add --trusted-host NAME for each name or address of this server"
        )
    trusted = [*args.trusted_host, *([args.host] if args.host not in _ANY_ADDRESS else [])]
    if args.max_body > MOST_BODY_BYTES:
        raise must("--max-body", f"be at most {MOST_BODY_BYTES}", args.max_body)
    settings = ServerSettings(
        cors=args.cors, trusted_hosts=trusted, trusted_proxies=args.trusted_proxy, max_pending=args.max_pending,
        max_body_bytes=args.max_body, metrics_open=args.metrics == "open",
    )  # fmt: skip
    return within_descriptors(settings)


def _authentication(args: Namespace, runner: AgentRunner, settings: ServerSettings) -> Tokens | None:
    if args.no_auth:
        return None
    store = getattr(runner.queue.commits, "path", None)
    if (
        args.token_file
        and store is not None
        and os.path.exists(args.token_file)
        and os.path.samefile(args.token_file, store)
    ):
        # Closing a second descriptor of a database gives up the locks of this process.
        raise InvalidArgument("--token-file must not be the file of the store. Use another name, such as agents.token")
    text = args.token
    if text is None and args.token_file is None:
        text = os.environ.get(TOKEN_VARIABLE, "").strip() or None
    source = args.token_file or default_path(runner) if text is None else [Token.of(text)]
    if args.token is not None:
        log.warning(
            "other users of this machine can read --token in the list of processes. Use --token-file, or set %s",
            TOKEN_VARIABLE,
        )
    return Tokens(source, cookie_seconds=settings.cookie_seconds, clock=runner.queue.clock)


def _print_ready(args: Namespace, runner: AgentRunner, url: str, tokens: Tokens | None) -> None:
    keys, place = runner.registry.keys(), display_name(runner, args.db or args.url)
    sign_in = url if tokens is None else f"{url}/#code={tokens.new_code()}"
    file = None if tokens is None or tokens.file is None else str(tokens.file.path)
    concurrency = 0 if args.no_worker else args.concurrency
    if args.json:
        json_line({
            "server": runner.config.worker_id, "ready": True, "url": url, "sign_in": sign_in, "token_file": file,
            "store": place, "agents": list(keys), "concurrency": concurrency,
        })  # fmt: skip
    else:
        worker = "no worker" if args.no_worker else f"concurrency {concurrency}"
        print_line(
            f"server {runner.config.worker_id} is ready: {place}, "
            f"{'agent' if len(keys) == 1 else 'agents'} {', '.join(keys)}, {worker}"
        )
        print_line(f"listening on {url}")
        if tokens is not None and sys.stdout.isatty():  # a log that is kept must not have a code that signs in
            print_line(f"open {sign_in} to sign in")
        if file is not None:
            print_line(f"token file {file}")
    sys.stdout.flush()


def _served(args: Namespace) -> Served:
    """Return what the target names, or without a target the Orchestrator and the turns of the library."""
    url = args.db or args.url
    target = None if args.target is None else loaded(args.target, args.agent_path)
    found = None if target is None else agents_in(target, args.target)
    if isinstance(found, AgentRunner):
        refuse_url(args)
        orchestrator = target if isinstance(target, Orchestrator) else None
        return Served(found, orchestrator, target if isinstance(target, TurnManager) else None)
    changes: dict[str, Any] = {"worker_id": worker_name()}
    if args.grace is not None:
        changes["grace_seconds"] = args.grace
    config = RunnerConfig.of(get_config())
    runner = open_store(url, found or Registry(), dataclasses.replace(config, **changes))
    if found is not None:
        return Served(runner)
    orchestrator = Orchestrator(runner=runner, work=False)
    runner_of(orchestrator)
    return Served(runner, orchestrator, TurnManager(runner))
