"""Check, at the first connect, that the settings of a Redis server do not lose runs.

The settings come from INFO and CONFIG GET. A setting that loses or mixes up runs silently is refused. A setting that
loses runs only after another failure is a warning. A setting that the server does not report counts as the worst of
these that it could be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..._core.log import log
from ...errors import UnsafeRedis
from ..shared_engine import SafetyFinding
from .url import RedisAddress

OLDEST = (6, 2)
#: The names for CONFIG GET, one command each: before Redis 7 it takes a single name.
ASKED = (
    "maxmemory",
    "maxmemory-policy",
    "appendonly",
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "save",
    "stop-writes-on-bgsave-error",
    "min-replicas-to-write",
)
#: Settings whose warning is advice for the administrator, and no loss by itself: one process a day logs it.
DAILY = ("maxmemory",)
DAY = 86_400
_UNKNOWN = "unknown"
_VERSION = re.compile(r"(\d+)\.(\d+)")

# (server, setting, value) of each warning of this process, so that each is logged once.
_logged: set[tuple[str, str, str]] = set()


def check(info: Mapping[str, object], config: Mapping[str, object] | None, place: RedisAddress) -> list[SafetyFinding]:
    """Return all `findings`, and log each once until the server restarts, except findings of `DAILY`.

    Raises:
        UnsafeRedis: A setting is refused. With `allow_unsafe` in `place` it is only logged.
    """
    found = findings(info, config, place)
    refused = [each for each in found if each.severity == "refuse"]
    if refused and not place.allow_unsafe:
        raise UnsafeRedis(
            f"{place} would lose runs: {'; '.join(map(str, refused))}. "
            "Change the settings, or accept the loss with allow_unsafe=1 in the URL",
            {each.setting: each.value for each in refused},
        )
    for each in found:
        if each.setting not in DAILY:
            _log_once(each, info, place)
    return found


def log_daily(
    found: Iterable[SafetyFinding], info: Mapping[str, object], place: RedisAddress, first_today: Callable[[str], bool]
) -> None:
    """Log the findings of `DAILY`. `first_today(setting)` is False if a process did so in the last 24 hours."""
    for each in found:
        if each.setting in DAILY:
            _log_once(each, info, place, first_today)


def _log_once(
    finding: SafetyFinding,
    info: Mapping[str, object],
    place: RedisAddress,
    wanted: Callable[[str], bool] = lambda setting: True,
) -> None:
    warning = (f"{place} {identity(info)}", finding.setting, finding.value)
    if warning not in _logged:
        _logged.add(warning)
        if wanted(finding.setting):
            log.warning("%s: %s", place, finding)


def findings(
    info: Mapping[str, object], config: Mapping[str, object] | None, place: RedisAddress
) -> list[SafetyFinding]:
    """Return the unsafe settings of a server, refused settings first.

    Args:
        info: The parsed reply of INFO.
        config: The parsed replies of CONFIG GET; None if the user may not ask for them.
        place: The server's address.
    """
    reported = {name: _text(value) for name, value in {**_from_info(info), **(config or {})}.items()}
    found = [
        *_server(reported),
        *_memory(reported),
        *_disk(reported),
        *_replicas(reported),
        *_network(place),
        *_unreported(reported),
    ]
    return sorted(found, key=lambda each: each.severity != "refuse")


def identity(info: Mapping[str, object]) -> str:
    """Identify the server process. It changes with a restart, a failover or a replacement."""
    return f"{_text(info.get('run_id', ''))}:{_text(info.get('master_replid', ''))}"


def parsed_info(reply: bytes | str) -> dict[str, str]:
    """Parse the reply of INFO."""
    lines = (line.partition(":") for line in _text(reply).splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in lines if colon}


def parsed_config(*replies: Sequence[object]) -> dict[str, str]:
    """Parse replies of CONFIG GET: alternating names and values (RESP2)."""
    settings: dict[str, str] = {}
    for reply in replies:
        settings.update((_text(reply[i]), _text(reply[i + 1])) for i in range(0, len(reply) - 1, 2))
    return settings


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _from_info(info: Mapping[str, object]) -> dict[str, object]:
    """Return INFO, with the settings in it also under their names in CONFIG."""
    reported = dict(info)
    if "maxmemory_policy" in info:
        reported["maxmemory-policy"] = info["maxmemory_policy"]
    if "aof_enabled" in info:
        reported["appendonly"] = "no" if _text(info["aof_enabled"]) == "0" else "yes"
    if "role" in info:
        # INFO contains that field only if writes require replicas.
        reported["min-replicas-to-write"] = "1 or more" if "min_slaves_good_slaves" in info else "0"
    return reported


def _server(reported: Mapping[str, str]) -> Iterator[SafetyFinding]:
    mode = reported.get("redis_mode") or reported.get("server_mode")
    role = "sentinel" if mode == "sentinel" else reported.get("role", _UNKNOWN)
    if role != "master":
        master = ":".join(reported[name] for name in ("master_host", "master_port") if name in reported)
        at = f", at {master}" if master else ""
        yield SafetyFinding("role", role, "refuse", "which does not keep writes", f"name the master in the URL{at}")
    version = reported.get("redis_version", _UNKNOWN)
    number = _VERSION.match(version)
    if number is None or (int(number[1]), int(number[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        yield SafetyFinding(
            "version", version, "refuse", f"before {oldest}", f"upgrade to Redis {oldest} or later, or Valkey"
        )


def _memory(reported: Mapping[str, str]) -> Iterator[SafetyFinding]:
    policy = reported.get("maxmemory-policy", _UNKNOWN)
    remedy = "CONFIG SET maxmemory-policy noeviction"
    if policy.startswith("volatile-"):
        yield SafetyFinding("maxmemory-policy", policy, "warn", "which may drop keys before they expire", remedy)
    elif policy != "noeviction":
        yield SafetyFinding("maxmemory-policy", policy, "refuse", "which may drop runs when memory is short", remedy)
    if reported.get("maxmemory") == "0":
        yield SafetyFinding(
            "maxmemory", "0", "warn", "no limit: the system kills the server when memory is short",
            "CONFIG SET maxmemory to less than the machine has; writes are then refused in time",
        )  # fmt: skip


def _disk(reported: Mapping[str, str]) -> Iterator[SafetyFinding]:
    if reported.get("appendonly") == "no":
        lost = "everything" if reported.get("save") == "" else "what came after the last snapshot"
        yield SafetyFinding("appendonly", "no", "warn", f"so a restart loses {lost}", "CONFIG SET appendonly yes")
    if reported.get("appendfsync") == "no":
        yield SafetyFinding(
            "appendfsync", "no", "warn", "so a power loss may cost half a minute of writes",
            "CONFIG SET appendfsync everysec, or always",
        )  # fmt: skip
    if reported.get("no-appendfsync-on-rewrite") == "yes":
        yield SafetyFinding(
            "no-appendfsync-on-rewrite", "yes", "warn", "so a power loss may cost all since a rewrite of the log began",
            "CONFIG SET no-appendfsync-on-rewrite no",
        )  # fmt: skip
    if reported.get("stop-writes-on-bgsave-error") == "no":
        yield SafetyFinding(
            "stop-writes-on-bgsave-error", "no", "warn", "so the server accepts writes that it can no longer save",
            "CONFIG SET stop-writes-on-bgsave-error yes",
        )  # fmt: skip


def _replicas(reported: Mapping[str, str]) -> Iterator[SafetyFinding]:
    replicas = reported.get("connected_slaves", "0")
    if replicas != "0" and reported.get("min-replicas-to-write") == "0":
        yield SafetyFinding(
            "min-replicas-to-write", "0", "warn", f"so a failover ({replicas} replicas) may lose what was not copied",
            "CONFIG SET min-replicas-to-write 1",
        )  # fmt: skip


def _network(place: RedisAddress) -> Iterator[SafetyFinding]:
    if place.loopback:
        return
    if place.password is None:
        yield SafetyFinding(
            "AUTH", "none", "warn", "so every client that reaches the server can read and write all runs",
            "set a password, and write redis://user:password@host:port/db",
        )  # fmt: skip
    if not place.tls:
        yield SafetyFinding(
            "TLS", "no", "warn", "so the network between sees every run, and the password", "write rediss://"
        )


def _unreported(reported: Mapping[str, str]) -> Iterator[SafetyFinding]:
    names = [name for name in ASKED if name not in reported and name not in {"maxmemory-policy", "save"}]
    if names:
        yield SafetyFinding(
            ", ".join(names), _UNKNOWN, "warn", "for the server does not tell",
            "let our user ask (ACL SETUSER … +info +config|get), or look there yourself",
        )  # fmt: skip
