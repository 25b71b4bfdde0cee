"""Processes that import what takes long once, and then fork for each program that a test starts.

A fork is a child of the test's process, with an environment, pipes and signals of its own, as `subprocess.Popen` starts
it. It executes a module as `python -m` does. Only the imports are those of the process that it was forked from.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

from tests.support.processes import ROOT, Command

PATIENCE = 120  # seconds that the imports may take
PR_SET_CHILD_SUBREAPER = 36


class Forked(subprocess.Popen[bytes]):
    """A child of this process that another process has forked."""

    def __init__(self, pid: int, name: str, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid, self.args = pid, name
        self.stdin, self.stdout, self.stderr = stdin, stdout, None
        self.returncode: Any = None
        # What `Popen.__init__`, which would start a process, makes for the methods of `Popen`.
        self._waitpid_lock = threading.Lock()
        self._child_created, self._communication_started, self._sigint_wait_secs = True, False, 0.25


class Warm(Command):
    """A process that has imported these modules and runs nothing."""

    def __init__(self, *modules: str) -> None:
        super().__init__("tests.support.warm", *modules)
        self._lock = threading.Lock()

    def _started(self, module: str, *args: str, **environment: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *args],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env={**os.environ, **environment},
        )  # fmt: skip

    def fork(self, module: str, *arguments: object, output: str | None = None, **environment: str) -> Forked:
        """Execute a module in a fork; its output goes to that file, or to the pipe `stdout` of what is returned."""
        their_input, stdin = os.pipe()
        stdout, their_output = os.pipe()
        try:
            own = f"/proc/{os.getpid()}/fd"
            descriptors = [f"{own}/{their_input}", output or f"{own}/{their_output}", output or f"{own}/2"]
            with self._lock, _adopting():
                self.tell(json.dumps([module, [*map(str, arguments)], {**os.environ, **environment}, descriptors]))
                pid = self.poll_line(PATIENCE)
            assert pid is not None, f"no fork of {module}; exit code {self.process.poll()}"
        finally:
            os.close(their_input)
            os.close(their_output)
        return Forked(int(pid), module, os.fdopen(stdin, "wb", 0), os.fdopen(stdout, "rb", 0))


@functools.cache
def warm(*modules: str) -> Warm:
    """A process with these imports, which ends with this process."""
    started = Warm(*modules)
    atexit.register(started.__exit__, None, None, None)
    return started


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of processes below it whose parent ends meanwhile."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def main() -> None:
    """Fork for each line of the standard input, and print the process id of the fork."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all that was imported
    for line in iter(sys.stdin.readline, ""):
        module, arguments, environment, descriptors = json.loads(line)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a fork has none of the other threads of its process: {threads}"
        flags = (os.O_RDONLY, *(os.O_WRONLY | os.O_APPEND | os.O_CREAT,) * 2)
        opened = [os.open(path, flag, 0o600) for path, flag in zip(descriptors, flags, strict=True)]
        if (pid := _orphan()) == 0:
            for number, descriptor in enumerate(opened):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv[1:] = arguments
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            return
        for descriptor in opened:
            os.close(descriptor)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _orphan() -> int:
    """Fork twice, so that the parent of this process adopts the second fork; its id, or 0 in the second fork."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        if (pid := os.fork()) == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return int(pipe.read())


if __name__ == "__main__":
    main()
