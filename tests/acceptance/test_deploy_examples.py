"""The files of examples/deploy, as far as they can be checked without a Docker daemon and without root.

The RUN and CMD lines of the Dockerfile run in a fresh directory and virtual environment. The worker of compose.yaml
runs on a server with the settings of its Redis. systemd checks the unit.
"""

from __future__ import annotations

import asyncio
import configparser
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunnerConfig
from agent_runtime_core.cli.parser import parser
from agent_runtime_core.runner.settings import SHUTDOWN_SECONDS
from tests.support.processes import PATIENCE, ROOT, becomes, until
from tests.support.redis_servers import RedisServer

DEPLOY = ROOT / "examples" / "deploy"
COMPOSE_FILES = ("compose.yaml", "compose.sqlite.yaml")
UNIT = DEPLOY / "agent-worker@.service"
#: Programs of a RUN line that need root or a network. Their arguments are recorded.
REPLACED = ("pip", "useradd", "chown")
PASSWORD = "secret"


@dataclass
class Image:
    """What a Dockerfile says, read as `docker build` reads it."""

    runs: list[str] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    command: list[str] = field(default_factory=list)


def dockerfile(path: Path) -> Image:
    image = Image()
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    for line in filter(None, "\n".join(lines).replace("\\\n", " ").splitlines()):
        word, _, rest = line.partition(" ")
        match word:
            case "FROM":
                assert re.fullmatch(r"python:3\.\d+-slim", rest), rest
            case "RUN":
                image.runs.append(rest)
            case "COPY":
                source, target = rest.split()
                image.copies.append((source, target))
            case "ENV":
                name, _, value = rest.partition("=")
                image.environment[name] = value
            case "WORKDIR":
                image.workdir = rest
            case "USER":
                image.user = rest
            case "CMD":
                image.command = json.loads(rest)
            case _:
                raise AssertionError(f"an instruction that this test does not know: {line}")
    return image


def compose(name: str) -> dict[str, Any]:
    """A compose file as `docker compose` reads it, with its variables replaced."""
    text = re.sub(r"\$\{REDIS_PASSWORD:\?[^}]*\}", PASSWORD, (DEPLOY / name).read_text("utf-8"))
    assert "${" not in text
    found = yaml_of(text)
    assert isinstance(found, dict)
    return found


def yaml_of(text: str) -> Any:
    """The value of a file in the part of YAML that these files use, because no YAML package is required here."""
    lines = [
        (len(line) - len(line.lstrip()), line.strip())
        for line in text.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    return _block(lines, 0)


def _block(lines: list[tuple[int, str]], indent: int) -> Any:
    """Read the mapping or list at the begin of `lines`, and remove its lines."""
    found: Any = [] if lines[0][1].startswith("- ") else {}
    while lines and lines[0][0] == indent:
        text = lines.pop(0)[1]
        if isinstance(found, list):
            found.append(_scalar(text.removeprefix("- ")))
            continue
        name, _, rest = text.partition(": ")
        deeper = bool(lines) and lines[0][0] > indent
        found[name.removesuffix(":")] = _scalar(rest) if rest else _block(lines, lines[0][0]) if deeper else None
    return found


def _scalar(text: str) -> Any:
    if text.startswith("["):
        return [_scalar(each.strip()) for each in text.strip("[]").split(",")]
    if text[0] in "\"'":
        return text.strip(text[0])
    if text.isdecimal():
        return int(text)
    return {"true": True, "false": False}.get(text, text)


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_a_compose_file_is_yaml(name: str) -> None:
    pytest.importorskip("yaml")
    text = (DEPLOY / name).read_text("utf-8")
    assert yaml_of(text) == importlib.import_module("yaml").safe_load(text)


def seconds(text: str) -> float:
    assert re.fullmatch(r"\d+s", text), text
    return float(text[:-1])


def worker_options(command: Sequence[str]) -> Any:
    """The parsed arguments of a worker's command line."""
    assert Path(command[0]).name == "agent-runtime"
    options = parser().parse_args(command[1:])
    assert options.target == "shop:agents"
    return options


@contextmanager
def worker(command: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path) -> Any:
    """A worker that is ready; its log is written to `log`."""
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=directory, env={**os.environ, **environment}, stdout=sink, stderr=subprocess.STDOUT
        )
    try:
        until(lambda: "is ready:" in log.read_text() or process.poll() is not None, "the worker to be ready")
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def fresh_environment(directory: Path) -> Path:
    """The programs of a new virtual environment that has this library and redis-py, as `pip` would install them."""
    venv.create(directory, symlinks=True)
    [packages] = directory.glob("lib/python*/site-packages")
    redis = find_spec("redis")
    assert redis is not None
    assert redis.origin is not None
    (packages / "installed.pth").write_text(f"{ROOT / 'src'}\n{Path(redis.origin).parents[1]}\n")
    script(directory / "bin" / "agent-runtime", f'exec {directory}/bin/python -m agent_runtime_core "$@"')
    return directory / "bin"


@pytest.mark.redis
def test_the_lines_of_the_dockerfile_run(tmp_path: Path) -> None:
    if find_spec("redis") is None:
        pytest.skip("needs redis-py")
    image = dockerfile(DEPLOY / "Dockerfile")
    programs = fresh_environment(tmp_path / "venv")
    replaced, calls = tmp_path / "replaced", tmp_path / "calls"
    replaced.mkdir()
    for name in REPLACED:
        script(replaced / name, f'printf "%s " {name} "$@" >> {calls}; echo >> {calls}')
    app = tmp_path / "app"
    app.mkdir()
    [wheel] = [source for source, _ in image.copies if source.endswith(".whl")]
    (app / wheel.replace("*", "1.0")).touch()
    path = {"PATH": f"{replaced}:{programs}:{os.environ['PATH']}"}
    for line in image.runs:
        subprocess.run(["sh", "-e", "-c", line.replace("/app", str(app))], env={**os.environ, **path}, check=True)
    assert image.workdir == "/app"
    for source, target in image.copies:
        if source == wheel:
            continue
        shutil.copy(DEPLOY / source, target.replace("/app/", f"{app}/"))
    environment = {**path, **image.environment, "AGENT_RUNTIME_BACKEND_URL": f"sqlite:///{app}/data/agents.db"}
    worker_options(image.command)
    with worker(image.command, environment, app, tmp_path / "log") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert (app / "data" / "agents.db").is_file()
    done = calls.read_text()
    user = image.user
    assert f"useradd --uid 10001 --create-home {user} \n" in done
    assert f"chown {user} {app}/data \n" in done
    installed(done)


def installed(calls: str) -> None:
    """What pip is asked for is this package, with an extra that it has."""
    [line] = [each for each in calls.splitlines() if each.startswith("pip ")]
    found = re.fullmatch(r"pip install --no-cache-dir \S+/(\w+)-[\d.]+\.whl\[(\w+)\] ", line)
    assert found, line
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert found[1] == project["name"].replace("-", "_")
    assert found[2] in project["optional-dependencies"]


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_a_compose_file_starts_the_worker_of_the_image(name: str) -> None:
    composed = compose(name)
    service = composed["services"]["worker"]
    assert service["command"] == dockerfile(DEPLOY / "Dockerfile").command
    assert seconds(service["stop_grace_period"]) > worker_options(service["command"]).grace + SHUTDOWN_SECONDS + 1
    used = [volume.partition(":")[0] for each in composed["services"].values() for volume in each.get("volumes", ())]
    assert set(used) == composed["volumes"].keys()


def test_the_sqlite_file_is_on_the_volume() -> None:
    service = compose("compose.sqlite.yaml")["services"]["worker"]
    [volume] = service["volumes"]
    directory = volume.partition(":")[2]
    assert service["environment"]["AGENT_RUNTIME_BACKEND_URL"] == f"sqlite:///{directory}/agents.db"
    assert any(f"mkdir -p {directory} " in line for line in dockerfile(DEPLOY / "Dockerfile").runs)


def redis_options(command: Sequence[str]) -> dict[str, object]:
    program, *words = command
    assert program == "redis-server"
    names, values = words[::2], words[1::2]
    return {name.removeprefix("--").replace("-", "_"): value for name, value in zip(names, values, strict=True)}


@pytest.mark.redis
async def test_the_worker_of_the_compose_file_drains_on_its_redis(tmp_path: Path) -> None:
    services = compose("compose.yaml")["services"]
    service = services["worker"]
    options = redis_options(services["redis"]["command"])
    assert options["appendonly"] == "yes"
    with RedisServer(**options) as server:
        url = service["environment"]["AGENT_RUNTIME_BACKEND_URL"]
        assert url == f"redis://:{PASSWORD}@redis:6379/0"
        command = [sys.executable, "-m", "agent_runtime_core", *service["command"][1:]]
        environment = {"AGENT_RUNTIME_BACKEND_URL": server.url, "PYTHONPATH": str(ROOT / "src")}
        log = tmp_path / "log"
        async with AgentRunner.open(server.url, config=RunnerConfig(park_after=0)) as runner:
            for name in ("first", "second"):
                await runner.submit("order", {"params": {"article": "lamp"}}, run_id=name)
            with worker(command, environment, DEPLOY, log) as process:
                await runner.signal("first", "paid", "in full")
                result = await runner.wait("first", PATIENCE)
                assert result.final_output == {"price": 40, "payment": "in full"}

                async def waits() -> bool:
                    return (await runner.get_run("second")).status in ("running", "waiting")

                await becomes(waits, "the second run to be claimed")
                process.send_signal(signal.SIGTERM)
                limit = seconds(service["stop_grace_period"])
                assert await asyncio.to_thread(process.wait, limit) == 0
            await runner.signal("second", "paid", "later")
            with worker(command, environment, DEPLOY, tmp_path / "log2"):
                assert (await runner.wait("second", PATIENCE)).final_output["payment"] == "later"
            assert (await runner.get_run("second")).attempt == 1
        # A setting of this Redis that could lose runs would be logged.
        assert "WARNING" not in log.read_text()


def unit() -> configparser.ConfigParser:
    read = configparser.ConfigParser(interpolation=None, strict=False)
    read.optionxform = str  # type: ignore[assignment,method-assign]  # systemd distinguishes upper and lower case
    read.read(UNIT, "utf-8")
    return read


def test_the_unit_gives_the_worker_its_grace_time() -> None:
    service = unit()["Service"]
    options = worker_options(shlex.split(service["ExecStart"]))
    assert float(service["TimeoutStopSec"]) > options.grace + SHUTDOWN_SECONDS + 1
    assert service["User"] != "root"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze")
    command = shlex.split(unit()["Service"]["ExecStart"])[0]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text("utf-8").replace(command, sys.executable))
    checked = subprocess.run([program, "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("KillMode=mixed", "KillMode=gentle"))
    checked = subprocess.run([program, "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert "gentle" in checked.stderr, "this systemd-analyze reports nothing"


def shown(page: str, language: str) -> list[str]:
    """The blocks of a page in this language."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_pages_show_these_files() -> None:
    [lines] = shown("tutorial.md", "ini")
    assert set(lines.splitlines()) <= set(UNIT.read_text("utf-8").splitlines())
    assert shown("guide/containers.md", "dockerfile") == [(DEPLOY / "Dockerfile").read_text("utf-8")]
    assert shown("guide/containers.md", "yaml")[:2] == [(DEPLOY / each).read_text("utf-8") for each in COMPOSE_FILES]
