"""Imports at call time: optional packages, and backends named by a string. No other module does that."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Mapping
from types import ModuleType

from ..errors import InvalidArgument, MissingDependency, brief
from .validation import must, unknown, without_credentials

# Import name of an optional package -> the extra that installs it.
EXTRAS = {
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
    "pydantic_ai": "pydantic-ai",
    "redis": "redis",
    "uvicorn": "server",
    "websockets": "server",
}
# A module that no extra installs -> its package.
_PACKAGES = {"opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http"}
_IN_NO_NAME = re.compile(r"[\s@/?#&=:]")


def load(dotted: str, *, package: str | None = None, needed_by: str | None = None) -> object:
    """Import an attribute (`"pkg.mod:Attr"`), or without a colon a module.

    Args:
        dotted: The name. A leading dot is relative to `package`.
        package: The package of a relative name.
        needed_by: Names the feature in errors; by default the loaded name.

    Raises:
        MissingDependency: The package is not installed.
        InvalidArgument: The package is installed and has no such module or name.
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
        is_lacking = _package_of(missing) is not None or sys.modules.get(missing.partition(".")[0]) is None
        if is_lacking or not f"{wanted}.".startswith(f"{missing}."):
            raise MissingDependency(f"{needed_by} needs {_lacking(missing)}", name=missing) from error
        parent, _, child = missing.rpartition(".")
        there = [each.name for each in pkgutil.iter_modules(getattr(sys.modules[parent], "__path__", ()))]
        raise InvalidArgument(f"package {parent!r}: {unknown('module', child, there)}") from None


def _package_of(module: str) -> str | None:
    """Return the package of a module that no extra installs."""
    return next((package for name, package in _PACKAGES.items() if f"{module}.".startswith(f"{name}.")), None)


def _lacking(module: str) -> str:
    """Return what is missing and how to install it. A module and its distribution may have different names."""
    top = module.partition(".")[0]
    if (package := _package_of(module)) is not None:
        return f"the module {module!r}: pip install {package}"
    if top in EXTRAS:
        return f"the {top!r} package: pip install 'agent-runtime-core[{EXTRAS[top]}]'"
    return (
        f"the module {module!r}, which cannot be imported here. Check the spelling, and that it is installed or its "
        "folder is on sys.path"
    )
