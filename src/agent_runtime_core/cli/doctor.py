"""`agent-runtime doctor`: check versions, settings, file permissions and the store."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sqlite3
import stat
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from .._core.clock import SYSTEM, shown_duration
from .._core.lazy_import import BUILT_IN, check_scheme, installed_schemes, load, package_of
from .._engines.payloads import UNREADABLE
from ..config import FIELDS, PREFIX, SETTINGS, VARIABLES, from_environment, get_config, misspelt, place_of, variable_of
from ..errors import AgentRuntimeError, StorageOutdated, brief
from ..queue.records import RunRow
from ..registry import Registry
from ..runner.left_runs import REASON as OTHER_CODE
from ..runner.runner import AgentRunner
from ..status import RunStatus
from .output import human_size, only_logged, print_columns, print_json, print_line
from .store import display_name, is_postgres, open_store, require_file, rows_of

OK: Final = "ok"
WARNING: Final = "warning"
ERROR: Final = "error"


class Finding(NamedTuple):
    """The result of one check."""

    status: str
    check: str
    detail: str
    fix: str = ""


_MOUNTS: Final = "/proc/self/mountinfo"
#: File systems on which several machines, or a guest and its host, share files. SQLite's locks are not safe there.
_NETWORK: Final = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs", "lustre",
    "gfs2", "ocfs2", "beegfs", "fuse.s3fs", "fuse.gcsfuse", "vboxsf", "virtiofs", "prl_fs", "drvfs",
})  # fmt: skip
_LEAST_FREE: Final = 256 * 1024 * 1024  # bytes


def file_checks(path: str) -> Iterator[Finding]:
    """Yield what is right and wrong with the database file at that path."""
    path = os.path.realpath(path)
    if not os.path.isfile(path):
        return
    directory = os.path.dirname(path)
    yield from _permissions(path, directory)
    yield _journal_mode(path)
    yield from _free_space(path, directory)
    kind = file_system_of(path)
    if kind in _NETWORK:
        yield Finding(
            WARNING,
            "file system",
            f"{path} is on {kind}, where the locks of SQLite do not exclude other machines",
            "Move the file to a local disk, or use Redis or PostgreSQL",
        )
    elif kind is not None:
        yield Finding(OK, "file system", kind)


def _free_space(path: str, directory: str) -> Iterator[Finding]:
    if not hasattr(os, "statvfs"):
        return
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    size = sum(os.path.getsize(each) for each in (path, f"{path}-wal") if os.path.exists(each))
    about = f"{human_size(free)} free for a store of {human_size(size)}"
    enough = free > max(_LEAST_FREE, size // 10)
    yield Finding(OK if enough else WARNING, "disk", about, "" if enough else "Free some space, or run vacuum")


def _permissions(path: str, directory: str) -> Iterator[Finding]:
    there = os.stat(path)
    mode = stat.S_IMODE(there.st_mode)
    about = f"{path} belongs to user id {there.st_uid} with mode {mode:o}"
    if not os.access(path, os.R_OK | os.W_OK):
        yield Finding(ERROR, "permissions", f"{about}, and this user cannot write it", "Use the user of the workers")
    elif mode & (stat.S_IROTH | stat.S_IWOTH):
        yield Finding(WARNING, "permissions", f"{about}, so other users can read it", f"chmod 600 {path}")
    else:
        yield Finding(OK, "permissions", about)
    if not os.access(directory, os.W_OK | os.X_OK):
        yield Finding(
            ERROR, "permissions", f"this user cannot create files in {directory}", "SQLite needs that for its log"
        )
    elif os.stat(directory).st_mode & stat.S_IWOTH and not os.stat(directory).st_mode & stat.S_ISVTX:
        yield Finding(WARNING, "permissions", f"other users can replace files in {directory}", f"chmod o-w {directory}")


def _journal_mode(path: str) -> Finding:
    try:
        with contextlib.closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True)) as connection:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    except sqlite3.Error as error:
        return Finding(ERROR, "journal mode", f"{path} cannot be read: {error}", "Restore a backup")
    if mode == "wal":
        return Finding(OK, "journal mode", "wal")
    return Finding(WARNING, "journal mode", f"{mode}; the next process that opens the file changes it to wal")


def file_system_of(path: str, mounts: str = _MOUNTS) -> str | None:
    """Return the type of the file system of a path, as Linux names it; None if it is unknown."""
    try:
        lines = Path(mounts).read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    best, kind = -1, None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= best:
            best, kind = len(point), after.split()[0]
    return kind


_OF_EXTRA: Final = re.compile(r"""(?P<package>[\w.-]+).*;.*\bextra == ['"](?P<extra>[^'"]+)""")
_COLLECTIONS: Final = frozenset({"all", "dev", "docs"})  # extras that install other extras
_COUNTED: Final = 10_000  # runs of each status that are counted, at most
_LONG: Final = 3600.0  # seconds after which a run that could execute, or is blocked, is reported
_WAITING: Final = 7 * 86_400.0  # the same for a run that waits
_LACKS_KEY: Final = frozenset(each.__name__ for each in UNREADABLE)  # reasons of runs that a worker could not read
_NAMED: Final = 5  # runs that a finding names


async def doctor(args: Namespace) -> int:
    """Print one line for each check; return 1 if there is an error."""
    settings: list[dict[str, Any]] = []
    with only_logged():
        findings = [*_versions(), *_schemes(), *_unknown_variables(os.environ)]
        try:
            settings = _settings(os.environ)
        except AgentRuntimeError as error:
            findings.append(Finding(ERROR, "settings", str(error), "Correct the environment variable"))
        else:
            findings += [_about_settings(settings), *_opentelemetry(), *await _store(args)]
    failed = any(each.status == ERROR for each in findings)
    if args.json:
        for setting in settings:
            setting["value"] = "inf" if setting["value"] == math.inf else setting["value"]  # JSON has no infinity
        print_json({"ok": not failed, "checks": [each._asdict() for each in findings], "settings": settings})
        return int(failed)
    for each in findings:
        print_columns((each.status, 7), (each.check, 12), (f"{each.detail}{f'. {each.fix}' if each.fix else ''}", 0))
    counts = Counter(each.status for each in findings)
    print_line(f"{_plural(counts[ERROR], ERROR)}, {_plural(counts[WARNING], WARNING)}")
    return int(failed)


def _plural(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# -- this installation


def _versions() -> Iterator[Finding]:
    yield Finding(OK, "library", f"agent-runtime-core {load('agent_runtime_core:__version__')}")
    yield Finding(
        OK, "python", f"{platform.python_implementation()} {platform.python_version()} on {platform.platform()}"
    )
    yield Finding(OK, "sqlite", sqlite3.sqlite_version)
    versions = _extras()
    found = ", ".join(f"{extra} {version}" for extra, version in versions.items() if version)
    missing = ", ".join(extra for extra, version in versions.items() if not version)
    text = f"installed: {found or 'none'}; not installed: {missing or 'none'}"
    yield Finding(OK, "extras", text if versions else "unknown, because this copy of the library was not installed")


def _extras() -> dict[str, str | None]:
    """Return the version of the first package of each extra; None for an extra that is not installed completely."""
    versions: dict[str, list[str | None]] = {}
    with suppress(metadata.PackageNotFoundError):  # a copy of the source that is not installed
        for requirement in metadata.requires("agent-runtime-core") or ():
            found = _OF_EXTRA.match(requirement)
            if found is not None and found["extra"] not in _COLLECTIONS:
                versions.setdefault(found["extra"], []).append(_version(found["package"]))
    return {extra: each[0] if all(each) else None for extra, each in versions.items()}


#: The packages that `OpenTelemetrySink()` needs, with what installs each.
_FOR_OPENTELEMETRY: Final = {
    "opentelemetry-api": "'agent-runtime-core[otel]'",
    "opentelemetry-sdk": "'agent-runtime-core[otel]'",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry-exporter-otlp-proto-http",
}


def _opentelemetry() -> Iterator[Finding]:
    """Return which parts of OpenTelemetry are installed. It is an error to lack a part that a setting needs."""
    config, versions = get_config(), {each: _version(each) for each in _FOR_OPENTELEMETRY}
    names = [each for each in (*config.trace_sinks, config.tracing_backend) if isinstance(each, str)]
    is_used = any(each == "opentelemetry" or each.endswith(":OpenTelemetrySink") for each in names)
    if not is_used and not any(versions.values()):
        return
    found = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    missing = [package for package, version in versions.items() if not version]
    text, fix = f"installed: {found or 'none'}; not installed: {', '.join(missing) or 'none'}", ""
    if missing:
        alone = "opentelemetry-sdk" not in missing and not is_used
        fix = f"OpenTelemetrySink{' without exporter=' if alone else ''} needs: pip install "
        fix += " ".join(dict.fromkeys(_FOR_OPENTELEMETRY[each] for each in missing))
    yield Finding(ERROR if missing and is_used else OK, "otel", text, fix)


def _schemes() -> Iterator[Finding]:
    """Return a finding for each store scheme that another package adds."""
    for scheme, points in installed_schemes().items():
        package = " and ".join(map(package_of, points))
        if scheme in BUILT_IN:
            text = f"store scheme {scheme!r} of the package {package} is not used: it is one of this library"
            yield Finding(WARNING, "scheme", text, "Ask its authors for another name")
        elif (error := check_scheme(scheme)) is not None:
            yield Finding(WARNING, "scheme", str(error))
        else:
            yield Finding(OK, "scheme", f"{scheme}:// of the package {package}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _settings(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the value of each setting, without secrets, and where it comes from."""
    config, there = get_config(), from_environment(environment)
    found = []
    for name, kind in SETTINGS.items():
        value = getattr(config, name)
        if name in there and value == there[name]:
            source = variable_of(name, environment) or "default"
        else:
            source = "default" if value in (FIELDS[name].default, {}, ()) else "configure"
        found.append({"name": name, "value": kind.shown(value), "source": source})
    return found


def _about_settings(settings: list[dict[str, Any]]) -> Finding:
    changed = [f"{each['name']}={brief(each['value'], 200)} ({each['source']})" for each in settings
               if each["source"] != "default"]  # fmt: skip
    rest = f"{len(settings) - len(changed)} settings have their defaults"
    return Finding(OK, "settings", f"{', '.join(changed)}; {rest}" if changed else rest)


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    known = set(VARIABLES.values())
    for name in sorted(environment):
        if (
            name.startswith(PREFIX)
            and name not in known
            and not name.startswith((f"{PREFIX}TURNS_", f"{PREFIX}PERSONALITY_"))
        ):
            meant = VARIABLES.get(name.removeprefix(PREFIX).lower()) or dict(misspelt([name])).get(name)
            fix = f"Did you mean {meant!r}?" if meant else "Remove it, unless another program reads it"
            yield Finding(WARNING, "variable", f"environment variable {name} is not a setting", fix)


# -- the store


async def _store(args: Namespace) -> list[Finding]:
    settings = get_config()
    url = args.url or settings.backend_url
    if url is None and settings.queue_backend == "memory":
        fix = "Use --url agents.db, or set AGENT_RUNTIME_BACKEND_URL"
        return [Finding(WARNING, "store", "runs are in memory and are lost when their process ends", fix)]
    path = _database(url, settings.sqlite_path if settings.queue_backend == "sqlite" else None)
    try:
        require_file(url or "")
    except AgentRuntimeError as error:
        return [Finding(ERROR, "store", str(error))]
    files = list(file_checks(path)) if path is not None else []
    if path is not None and _is_empty(path):  # opening it would create its tables
        return [Finding(WARNING, "store", f"{path} is empty: no process has stored a run in it"), *files]
    try:
        # A reader does not create the schema of a PostgreSQL store, and needs no right to write.
        async with open_store(args.url, Registry(), read_only=is_postgres(url)) as runner:
            await runner.queue.next_due()
            found = [Finding(OK, "store", f"{display_name(runner, args.url)} can be read"), *files]
            found += await _server(runner)
            found += await _runs(runner)
            if (index := await runner.search_index.read()) is not None:
                about = f"goes to run number {index.upto:,} of {index.last:,}"
                found.append(Finding(OK, "search", f"the full-text index {about}"))
            return found
    except StorageOutdated as error:
        return [Finding(WARNING, "store", str(error)), *files]
    except (AgentRuntimeError, OSError) as error:
        return [Finding(ERROR, "store", str(error)), *files]


def _is_empty(path: str) -> bool:
    return os.path.isfile(path) and not any(
        os.path.getsize(each) for each in (path, f"{path}-wal") if os.path.exists(each)
    )


def _database(url: str | None, path: str | None) -> str | None:
    """Return the path of the store, if it is a SQLite file."""
    if url is None:
        return path
    try:
        backend, location = place_of(url)
    except AgentRuntimeError:
        return None
    return location["path"] if backend == "sqlite" else None


async def _server(runner: AgentRunner) -> list[Finding]:
    engine: Any = runner.queue.commits
    kind = getattr(engine, "kind", "")
    if kind == "postgres":
        diagnose: Any = load(".._engines.postgres.diagnosis:diagnose", package=__package__)
        return [Finding(each.status, kind, each.detail, each.fix) for each in await diagnose(engine)]
    return [
        Finding(ERROR if each.severity == "refuse" else WARNING, kind, f"{each.setting} is {each.value!r}, {each.why}",
                each.remedy)
        for each in getattr(engine, "safety_findings", ())
    ]  # fmt: skip


class _Counts(NamedTuple):
    by_status: dict[str, str]
    workers: dict[str, float]  # when each last claimed or updated a run
    overdue: list[str]  # pending, and could have started long ago
    blocked: list[str]
    waiting: list[str]
    left: list[str]  # pending, because the code of workers does not fit
    encrypted: list[str]  # pending, because workers lack a key


async def _runs(runner: AgentRunner) -> list[Finding]:
    counts = await _counts(runner)
    statuses = ", ".join(f"{count} {status}" for status, count in counts.by_status.items() if count != "0")
    found = [Finding(OK, "runs", statuses or "none")]
    if counts.workers:
        names = ", ".join(sorted(counts.workers)[:_NAMED])
        found.append(Finding(OK, "workers", f"{len(counts.workers)} with running runs: {names}"))
    for names_, what, fix in (
        (counts.overdue, f"pending for more than {shown_duration(_LONG)}", "Start a worker that has their agents"),
        (counts.blocked, f"blocked by their concurrency key for more than {shown_duration(_LONG)}",
         "Look at the run that holds the concurrency slot"),
        (counts.waiting, f"waiting for more than {shown_duration(_WAITING)}",
         "See what they wait for with: agent-runtime show RUN"),
        (counts.left, "left by workers whose code is of another version",
         "Start a worker whose code fits. What does not fit is shown by: agent-runtime check"),
        (counts.encrypted, "left by workers that lack their key", "Start a worker that has the payload codec"),
    ):  # fmt: skip
        if names_:
            more = f" and {len(names_) - _NAMED} more" if len(names_) > _NAMED else ""
            found.append(Finding(WARNING, "runs", f"{', '.join(names_[:_NAMED])}{more}: {what}", fix))
    if counts.by_status["dead"] != "0":
        fix = "List them with: agent-runtime dead list"
        found.append(Finding(WARNING, "runs", f"{counts.by_status['dead']} in the dead-letter queue", fix))
    return found


async def _counts(runner: AgentRunner) -> _Counts:
    counts, now = _Counts({}, {}, [], [], [], [], []), SYSTEM.wall()
    for status in RunStatus:
        number = 0
        async for row in rows_of(runner, status.value, limit=_COUNTED):
            number += 1
            _look(row, now, counts)
        counts.by_status[status.value] = f"{number}{'+' if number >= _COUNTED else ''}"
    return counts


def _look(row: RunRow, now: float, counts: _Counts) -> None:
    name = row.run_key or row.run_id
    match row.status:
        case "running":
            if row.worker:
                counts.workers[row.worker] = max(counts.workers.get(row.worker, 0.0), row.updated_at)
        case "waiting":
            if now - row.updated_at > _WAITING:
                counts.waiting.append(name)
        case "pending" if row.blocked:
            if now - row.updated_at > _LONG:
                counts.blocked.append(name)
        case "pending" if row.reason == OTHER_CODE:
            counts.left.append(name)
        case "pending" if row.reason in _LACKS_KEY:
            counts.encrypted.append(name)
        case "pending":
            if now - max(row.updated_at, row.due_at) > _LONG:
                counts.overdue.append(name)
