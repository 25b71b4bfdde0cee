"""A model server nobody here wrote (@copilotkit/aimock), from the committed lock: one process for a session."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSTALL_SECONDS = 120.0
START_SECONDS = 20.0
FLAGS = (
    *("--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"),
    *("--fetch-retries=1", "--fetch-retry-mintimeout=1000"),
)


class Absent(Exception):
    """The server cannot be had here."""


class Aimock:
    """The server's addresses for both wires, and its control interface."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.openai = f"{url}/v1"
        self.anthropic = url

    def control(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=10)
        with contextlib.closing(connection):
            connection.request(
                method,
                f"/__aimock{path}",
                None if body is None else json.dumps(body),
                {"content-type": "application/json"},
            )
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status != 200:
            raise AssertionError(f"{method} {path}: {answer.status} {text}")
        return json.loads(text)

    def reset(self) -> None:
        """No fixtures, no faults, an empty journal."""
        self.control("POST", "/reset")
        self.control("DELETE", "/chaos")

    def play(self, name: str) -> None:
        """Answer from fixtures/`name`.json, before that from what was played earlier."""
        self.script(*json.loads((HERE / "fixtures" / f"{name}.json").read_text("utf-8"))["fixtures"])

    def script(self, *fixtures: dict[str, Any]) -> None:
        self.control("POST", "/fixtures", {"fixtures": list(fixtures)})

    def journal(self) -> list[dict[str, Any]]:
        """Every request so far with the status it got; the server notes Anthropic's bodies in OpenAI's format."""
        entries: list[dict[str, Any]] = self.control("GET", "/journal")
        return entries

    def sent(self) -> list[dict[str, Any]]:
        """The bodies of the journal."""
        return [entry["body"] for entry in self.journal()]

    def statuses(self) -> list[int]:
        return [entry["response"]["status"] for entry in self.journal()]


def install() -> Path:
    """The server's command line script, installed by `npm ci` outside the tree where no earlier session did."""
    lock = (HERE / "package-lock.json").read_bytes()
    place = (
        Path(tempfile.gettempdir()) / f"agent-runtime-core-wire-{os.getuid()}-{hashlib.sha256(lock).hexdigest()[:16]}"
    )
    script = Path("node_modules", "@copilotkit", "aimock", "dist", "aimock-cli.js")
    if (place / script).is_file() and place.stat().st_uid == os.getuid():
        return place / script
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise Absent("node and npm are not installed")
    # In a place of its own until it is whole: another session may be at the same thing.
    fresh = Path(tempfile.mkdtemp(prefix="agent-runtime-core-wire-"))
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, fresh)
        try:
            done = subprocess.run(
                # npm itself would wait for minutes where there is no network.
                [npm, "ci", *FLAGS],
                cwd=fresh,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Absent(f"npm ci did not end within {INSTALL_SECONDS:g} s") from error
        if done.returncode:
            raise Absent(f"npm ci failed: {' '.join(done.stderr.split())[:500]}")
        with contextlib.suppress(OSError):  # the other session was first
            fresh.rename(place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if not (place / script).is_file():
        raise Absent(f"{place} holds no {script}: remove it")
    return place / script


@contextlib.contextmanager
def running() -> Iterator[Aimock]:
    """The server on a free port of 127.0.0.1 while the block runs; Absent where it cannot be had."""
    script = install()
    node = shutil.which("node")
    if node is None:
        raise Absent("node is not installed")
    # Its other variables would change it: AIMOCK_API_KEYS makes it ask for keys.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [node, str(script), "--config", str(HERE / "aimock.json"), "--host", "127.0.0.1", "--port", "0"],
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={name: value for name, value in os.environ.items() if name in {"PATH", "HOME", "TMPDIR", "LANG"}},
        )
        try:
            yield Aimock(_address(process, errors))
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _address(process: subprocess.Popen[bytes], errors: Any) -> str:
    """What the server says it listens on, which is the port it was given."""
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            piece = os.read(process.stdout.fileno(), 65536)
            said += piece
            for line in said.decode(errors="replace").splitlines(keepends=True):
                if "listening on http" in line and line.endswith("\n"):
                    return line.split("listening on ")[1].strip()
            if not piece:
                break
    errors.seek(0)
    raise Absent(
        f"aimock did not start: {said.decode(errors='replace')}{errors.read().decode(errors='replace')}"[-2000:]
    )
