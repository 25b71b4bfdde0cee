"""Run the code blocks of a Markdown page, in order, as a reader would who pastes them.

Python blocks share one namespace. `console` and `bash` blocks run in a shell, in the same directory:

    ```output      what the Python block above prints
    ```console     lines that begin with "$ " are commands, the lines below a command are its output
    ```bash        commands whose output is not compared

A server that a shell block starts in the background (`agent-runtime serve`, `agent-runtime inspect`, `uvicorn`) gets a
free port instead of 8000, in all blocks of the page. The next block runs when the server answers.

In an expected output, `...` matches any text, and a line that is only `...` matches any lines. A comment line before
a block directs it:

    <!-- docs: skip-run REASON -->    do not run it, because of REASON; a Python block is still compiled
    <!-- docs: file NAME -->          write it to the file NAME and do not run it
    <!-- docs: setup FILE -->         first run FILE, a path from the root of the repository, in the namespace
    <!-- docs: needs redis -->        run it with a real server as localhost:6379, or only compile it if there is none
    <!-- docs: needs postgres -->     the same with a new database as postgresql://localhost/app
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import cast

from tests.support.redis_servers import free_port

ROOT = Path(__file__).parents[2]
#: The server on the pages, for each kind.
SERVERS = {"redis": "redis://localhost:6379/0", "postgres": "//localhost/app"}
PORT = "127.0.0.1:8000"
MARK = "--- block"
PYTHON, SHELL, OUTPUT = {"python", "py", "python3"}, {"bash", "console"}, "output"
#: Languages of blocks that show something and are not run.
SHOWN = {
    "", "text", "mermaid", "json", "toml", "yaml", "ini", "dockerfile", "nginx", "sql", "html", "js", "markdown",
    "http",
}  # fmt: skip
#: A shell block that takes longer hangs.
SHELL_TIMEOUT = 120.0

_FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
_DIRECTIVE = re.compile(r"<!-- docs: (?P<verb>\S+)(?: (?P<rest>.*?))? *-->")
_VERBS = {"skip-run", "file", "setup", "needs"}
_SERVER = re.compile(r"^(agent-runtime (serve|inspect)|uvicorn)\b.*&$", re.MULTILINE)
_KILLED = re.compile(r"^\S*bash: line \d+: +\d+ Killed.*$", re.MULTILINE)


class DocsError(Exception):
    """A page cannot be followed."""


@dataclass
class Block:
    line: int
    text: str
    skip_run: bool = False
    setup: list[str] = field(default_factory=list)
    needs: str = ""  # a kind of server
    language: str = "python"
    file: str = ""
    #: What a Python block must print, if an output block follows it.
    output: str | None = None


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page that are run or written to files, with their directives.

    Raises:
        DocsError: A directive is unknown or belongs to no block, or the language of a block is unknown.
    """
    found: list[Block] = []
    pending: dict[str, str] = {}
    setup: list[str] = []
    last = 0  # the line after the last block that runs, where its output block begins
    lines = iter(enumerate(page.splitlines(), 1))
    for number, line in lines:
        if directive := _DIRECTIVE.fullmatch(line.strip()):
            verb, rest = directive["verb"], directive["rest"]
            if verb not in _VERBS or not rest or (verb == "needs" and rest not in SERVERS):
                raise DocsError(
                    f"line {number}: a directive must be 'skip-run REASON', 'file NAME', 'setup FILE' or "
                    f"'needs redis' or 'needs postgres', got {line.strip()!r}"
                )
            pending[verb] = rest
            if verb == "setup":
                setup.append(rest)
            continue
        if fence := _FENCE.fullmatch(line):
            language = fence["info"].strip().partition(" ")[0]
            body = _body(lines, fence["fence"], len(fence["indent"]))
            if language == OUTPUT:
                if (
                    not found
                    or found[-1].language not in PYTHON
                    or "".join(page.splitlines()[last : number - 1]).strip()
                ):
                    raise DocsError(f"line {number}: an output block must follow a Python block")
                found[-1].output = body
            elif language in PYTHON | SHELL or "file" in pending:
                needs, skip_run = pending.get("needs", ""), "skip-run" in pending
                found.append(Block(number + 1, body, skip_run, setup, needs, language, pending.get("file", "")))
                pending, setup = {}, []
                last = number + len(body.splitlines()) + 1
            elif language not in SHOWN:
                raise DocsError(f"line {number}: the language of a block must be known, got {language!r}")
        if line.strip() and pending:
            raise DocsError(f"line {number}: the directive above belongs to no block that runs")
    if pending:
        raise DocsError("the last directive belongs to no block that runs")
    return found


def python_blocks(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language in PYTHON]


def _body(lines: Iterator[tuple[int, str]], fence: str, indent: int) -> str:
    body: list[str] = []
    for _, line in lines:
        if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            return "\n".join(body) + "\n"
        body.append(line[indent:])
    raise DocsError(f"a block opened with {fence!r} is never closed")


def in_a_file(page: str) -> str | None:
    """Return a page as one file, in the way that docs/index.md describes, or None if it is no single program.

    The file prints MARK and the line of a block before the output of that block.
    """
    blocks = [each for each in blocks_of(page) if not each.file]
    if any(each.language in SHELL or each.setup or each.needs for each in blocks if not each.skip_run):
        return None
    parts = [
        f'print("{MARK}", {each.line})\n{each.text}' for each in blocks if each.language in PYTHON and not each.skip_run
    ]
    body = re.sub(r"\basyncio\.run\((.*)\)", r"await \1", "\n".join(parts))
    return (
        f"import asyncio\n\n\nasync def main():\n{textwrap.indent(body, '    ')}\n\nasyncio.run(main())\n"
        if parts
        else None
    )


def compiled(text: str, where: str, first_line: int) -> CodeType:
    """Return the code of a block with the line numbers of its page; top-level await is allowed."""
    padded = "\n" * (first_line - 1) + text
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return cast("CodeType", compile(padded, where, "exec", flags=flags, dont_inherit=True))


def run_page(text: str, where: str, root: Path = ROOT, **servers: str) -> dict[str, object]:
    """Run the blocks of a page in the current directory, its Python blocks as the main module of this process.

    Args:
        text: The page.
        where: Its name, for tracebacks.
        root: The directory of the files of `setup` directives.
        **servers: The URL of a server of each kind, for the blocks that need it.

    Returns:
        The namespace of the Python blocks.
    """
    main = ModuleType("__main__")
    # As every module has it. Code in C that imports a module, such as `time.strptime`, looks for it in the namespace of
    # the function that called it, and raises KeyError.
    vars(main)["__builtins__"] = builtins
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    port = free_port()
    shell = Shell(Path.cwd(), port)
    text = text.replace(PORT, f"127.0.0.1:{port}")
    try:
        with asyncio.Runner(debug=False) as runner:
            for block in blocks_of(text):
                for name in block.setup:
                    _run(compiled((root / name).read_text("utf-8"), name, 1), main, runner)
                body = block.text
                for kind, url in servers.items():
                    body = body.replace(SERVERS[kind], url)
                can_run = not block.needs or block.needs in servers
                _run_block(block, where, body, main, runner, shell, can_run=can_run)
    finally:
        sys.modules["__main__"] = before
        shell.close()
    return vars(main)


def _run_block(
    block: Block, where: str, body: str, main: ModuleType, runner: asyncio.Runner, shell: Shell, *, can_run: bool
) -> None:
    code = compiled(body, where, block.line) if block.language in PYTHON else None
    if block.file:
        Path(block.file).parent.mkdir(parents=True, exist_ok=True)
        Path(block.file).write_text(body, "utf-8")
    elif block.skip_run or not can_run:
        return
    elif code is None:
        shell.run(block, body, where)
    else:
        printed = io.StringIO()
        with contextlib.nullcontext() if block.output is None else contextlib.redirect_stdout(printed):
            _run(code, main, runner)
        if block.output is not None:
            compare(block.output, printed.getvalue(), f"{where}, line {block.line}")


def _run(code: CodeType, main: ModuleType, runner: asyncio.Runner) -> None:
    outcome = FunctionType(code, vars(main))()
    # Only a block that awaits is run in the loop: one that calls asyncio.run() itself must not be.
    if asyncio.iscoroutine(outcome):
        runner.run(cast("Coroutine[object, object, object]", outcome))


class Shell:
    """Runs the shell blocks of a page. Programs that a block leaves in the background run until `close`."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory = directory
        self._port = port
        self._groups: list[int] = []

    def run(self, block: Block, body: str, where: str) -> None:
        if block.language == "bash":
            code, output = self._bash(f"set -e\n{body}")
            assert code == 0, f"{where}, line {block.line}: exit code {code}\n{output}"
            if _SERVER.search(body):
                self._wait_for_server(f"{where}, line {block.line}")
            return
        for offset, command, expected in commands_of(body):
            at = f"{where}, line {block.line + offset}"
            code, output = self._bash(command)
            killed = code == 128 + signal.SIGKILL and expected.rstrip().endswith("Killed")
            assert code == 0 or killed, f"{at}: {command}: exit code {code}\n{output}"
            if killed and not output.rstrip().endswith("Killed"):
                output += "Killed\n"  # only an interactive shell reports it
            compare(expected, output, at)

    def _write_programs(self) -> None:
        binaries = self._directory / ".bin"
        binaries.mkdir(exist_ok=True)
        port = f"--port {self._port}"
        for name, arguments, after in (
            ("python", "", ""),
            ("agent-runtime", "-m agent_runtime_core ", ""),
            ("uvicorn", "-m uvicorn ", port),
        ):
            path = binaries / name
            serves = f'case "$1" in serve|inspect) set -- "$@" {port};; esac\n' if name == "agent-runtime" else ""
            path.write_text(f'#!/bin/sh\n{serves}exec {shlex.quote(sys.executable)} {arguments}"$@" {after}\n')
            path.chmod(0o755)

    def _bash(self, script: str) -> tuple[int, str]:
        """Run a script and return its exit code and output, without waiting for what it leaves in the background."""
        if not self._groups:
            # Once, before any of them runs: a program that is being started cannot be written ("Text file busy").
            self._write_programs()
        binaries = self._directory / ".bin"
        environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}
        # A file and not a pipe: a program in the background would keep a pipe open.
        self._output = output = self._directory / ".bin" / f"output{len(self._groups)}"
        with output.open("w") as sink:
            process = subprocess.Popen(
                ["bash", "-c", script], cwd=self._directory, env=environment, stdin=subprocess.DEVNULL,
                stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self._groups.append(process.pid)
            code = process.wait(SHELL_TIMEOUT)
        code = 128 - code if code < 0 else code
        return code, _KILLED.sub("Killed", output.read_text("utf-8"))

    def _wait_for_server(self, where: str) -> None:
        deadline = time.monotonic() + SHELL_TIMEOUT
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 5) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if connection.recv(1):
                    return
            time.sleep(0.05)
        raise AssertionError(f"{where}: the server does not answer\n{self._output.read_text('utf-8')}")

    def close(self) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def commands_of(body: str) -> list[tuple[int, str, str]]:
    """Return (offset of the line, command, expected output) for each command of a console block."""
    found: list[tuple[int, str, list[str]]] = []
    lines = iter(enumerate(body.splitlines()))
    for offset, line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command += "\n" + next(lines)[1]
            found.append((offset, command, []))
        elif not found:
            raise DocsError(f"a console block must begin with a command such as '$ ls', got {line!r}")
        else:
            found[-1][2].append(line)
    return [(offset, command, "\n".join(output)) for offset, command, output in found]


def compare(expected: str, actual: str, where: str) -> None:
    """Raise AssertionError if the output does not match what the page shows."""
    wanted, got = _lines(expected), _lines(actual)
    pattern = "".join(
        "(?:.*\n)*?" if line.strip() == "..." else re.escape(line).replace(r"\.\.\.", ".*?") + "\n" for line in wanted
    )
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in got)) is None:
        raise AssertionError("\n".join([f"{where}: the page shows", *wanted, "and the output is", *got]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
