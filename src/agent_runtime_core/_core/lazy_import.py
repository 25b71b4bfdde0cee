"""Imports at call time: optional packages, and backends named by a string. No other module does that."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple

from ..errors import InvalidArgument, MissingDependency, brief
from .validation import Shown, must, redacted, type_name, unknown, without_credentials

# Import name of an optional package -> the extra that installs it.
EXTRAS = {
    "cronsim": "schedules",
    "agents": "openai-agents",
    "anthropic": "anthropic",
    "apache_iggy": "iggy",
    "cryptography": "crypto",
    "fastapi": "server",
    "langchain_core": "langgraph",
    "langfuse": "langfuse",
    "langgraph": "langgraph",
    "litellm": "litellm",
    "mcp": "mcp",
    "mcp_types": "mcp",
    "openai": "openai",
    "opentelemetry": "otel",
    "prometheus_client": "metrics",
    "psycopg": "postgres",
    "pydantic_ai": "pydantic-ai",
    "redis": "redis",
    "uvicorn": "server",
    "websockets": "server",
}
# What installs a part of a package that may be there without this part. The first name that fits counts.
_INSTALLED_BY = {
    "opentelemetry.sdk": "'agent-runtime-core[otel]'",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
}
_IN_NO_NAME = re.compile(r"[\s@/?#&=:]")


def load(dotted: str, *, package: str | None = None, needed_by: str | None = None) -> object:
    """Import an attribute (`"pkg.mod:Attr"`), or without a colon a module.

    Args:
        dotted: The name. A leading dot is relative to `package`.
        package: The package of a relative name.
        needed_by: Names the feature in errors; by default the loaded name.

    Raises:
        MissingDependency: The package is not installed.
        InvalidArgument: The package is installed, but this module or name does not exist in it.
    """
    name, colon, attribute = dotted.partition(":")
    if (
        not name.strip(".") or (colon and not attribute) or (name.startswith(".") and package is None)
        # A URL or a header. Python's own error about a module of that name would show its password.
        or _IN_NO_NAME.search(name + attribute) or without_credentials(dotted) != dotted
    ):  # fmt: skip
        raise must("a name to import", "be written as 'package.module:Name'", without_credentials(dotted))
    module = _module(name, package, needed_by or attribute or name)
    if not attribute:
        return module
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [each for each in vars(module) if not each.startswith("_")]
        known = getattr(module, "__all__", public)
        raise InvalidArgument(f"module {module.__name__!r}: {unknown('name', attribute, known)}") from None


def pick(table: Mapping[str, str], name: str, *, package: str, what: str) -> type:
    """Load the class of a backend, by its name in `table` or as `"their_package.module:Class"`.

    Raises:
        InvalidArgument: There is no such backend, or it is no class.
        MissingDependency: Its package is not installed.
    """
    dotted = None if not isinstance(name, str) else name if ":" in name else table.get(name)
    if dotted is None:
        raise InvalidArgument(unknown(what, name, table, "Write 'package.module:Class' for a custom one"))
    found = load(dotted, package=package)
    if not isinstance(found, type):
        raise must(brief(name), f"be the class of a {what}", found)
    return found


def _module(name: str, package: str | None, needed_by: str) -> ModuleType:
    wanted = importlib.util.resolve_name(name, package)
    try:
        return importlib.import_module(wanted)
    except ModuleNotFoundError as error:
        missing = error.name or wanted
        added_by = _installed_by(wanted) or _installed_by(missing)
        is_lacking = added_by is not None or sys.modules.get(missing.partition(".")[0]) is None
        if is_lacking or not f"{wanted}.".startswith(f"{missing}."):
            raise MissingDependency(f"{needed_by} needs {_lacking(missing, added_by)}", name=missing) from error
        parent, _, child = missing.rpartition(".")
        there = [each.name for each in pkgutil.iter_modules(getattr(sys.modules[parent], "__path__", ()))]
        raise InvalidArgument(f"package {parent!r}: {unknown('module', child, there)}") from None


def _installed_by(module: str) -> str | None:
    """Return what installs a module that its top package may lack."""
    return next((package for name, package in _INSTALLED_BY.items() if f"{module}.".startswith(f"{name}.")), None)


def _lacking(module: str, added_by: str | None) -> str:
    """Return what is missing and how to install it. A module and its distribution may have different names."""
    top = module.partition(".")[0]
    if added_by is not None and (top not in EXTRAS or sys.modules.get(top) is not None):
        return f"the module {module!r}: pip install {added_by}"
    if top in EXTRAS:
        return f"the {top!r} package: pip install 'agent-runtime-core[{EXTRAS[top]}]'"
    return (
        f"the module {module!r}, which cannot be imported here. Check the spelling, and that it is installed or its "
        "folder is on sys.path"
    )


GROUP: Final = "agent_runtime_core.backends"
#: The schemes of this library. No package can replace them.
BUILT_IN: Final = frozenset({"memory", "sqlite", "redis", "rediss", "unix", "postgresql", "postgres", "file", "files"})


class InstalledScheme(NamedTuple):
    """A scheme and the object that opens its URLs."""

    scheme: str
    package: str
    opener: Any

    @property
    def called(self) -> str:
        """The scheme and its package, as messages name them."""
        return _called(self.scheme, self.package)


def installed_schemes() -> dict[str, list[Any]]:
    """Return the entry points of each scheme that a package adds. Nothing is imported."""
    entry_points: Any = load("importlib.metadata:entry_points")
    found: dict[str, list[Any]] = {}
    for each in sorted(entry_points(group=GROUP), key=lambda point: (point.name, package_of(point))):
        found.setdefault(each.name.lower(), []).append(each)
    return found


def package_of(entry_point: Any) -> str:
    """Return the name and version of the package with this entry point."""
    distribution = getattr(entry_point, "dist", None)
    return entry_point.value if distribution is None else f"{distribution.name} {distribution.version}"


def load_scheme(url: str) -> InstalledScheme:
    """Import the object that opens `url`.

    Raises:
        InvalidArgument: Two packages add the scheme, or the object cannot be imported or opens nothing.
    """
    scheme = url.partition("://")[0].lower()
    points = installed_schemes()[scheme]
    if len(points) > 1:
        packages = " and ".join(map(package_of, points))
        fix = "Uninstall all packages but one"
        raise must(f"store scheme {brief(scheme)}", "come from one package", Shown(packages), fix)
    found = InstalledScheme(scheme, package_of(points[0]), None)
    try:
        found = found._replace(opener=points[0].load())
    except Exception as error:  # whatever the module raises when it is imported
        fix = "Install that package again, or another version of it"
        raise must(found.called, f"be importable as {points[0].value}", reason(error), fix) from error
    if isinstance(found.opener, type) or not callable(getattr(found.opener, "open", None)):
        raise must(found.called, "be an object with a method open(url, *, max_retries)", found.opener)
    return found


def reason(error: Exception) -> Shown:
    """Return the type and the text of an error of another package, without the secrets of URLs."""
    return Shown(f"{type_name(type(error))}: {redacted(brief(str(error), 300))}")


def check_scheme(scheme: str) -> InvalidArgument | None:
    """Return what is wrong with an installed scheme, or None."""
    try:
        load_scheme(f"{scheme}://")
    except InvalidArgument as error:
        return error
    return None


def _called(scheme: str, package: str) -> str:
    return f"store scheme {brief(scheme)} of the package {package}"
