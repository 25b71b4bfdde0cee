"""The URL schemes of stores that other installed packages add, by entry points."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from ..errors import InvalidArgument, brief
from .lazy_import import load
from .validation import Shown, must, redacted, type_name

GROUP: Final = "agent_runtime_core.backends"
#: The schemes of this library. No package can replace them.
BUILT_IN: Final = frozenset({"memory", "sqlite", "redis", "rediss", "unix", "file", "files"})


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
    """Return the name and version of the package that has this entry point."""
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
