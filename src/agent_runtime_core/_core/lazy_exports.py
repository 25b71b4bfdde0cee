"""The public names of a package, each of which is loaded on first use.

This module imports nothing of the library: a name such as `RunStatus` then costs only its module.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(
    package: str, modules: Mapping[str, str], defined: str = "", renamed: Mapping[str, str] | None = None
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package.

    `tests/test_public_api.py` compares `modules` with the imports that the package contains for type checkers.

    Args:
        package: The package's `__name__`.
        modules: The names that each module defines, with spaces between them. The module is relative to `package`.
        defined: The public names that the package itself defines or imports.
        renamed: New names by old name. An old name raises a DeprecationWarning.
    """
    where = {name: module for module, names in modules.items() for name in names.split()}
    public = sorted([*where, *defined.split()], key=_order)

    def load_name(name: str) -> object:
        if renamed is not None and name in renamed:
            new = renamed[name]
            warnings.warn(f"{package}.{name} is now called {new}: use that name", DeprecationWarning, stacklevel=2)
            return getattr(sys.modules[package], new)
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            found = getattr(import_module(where[name], package), name)
        except ModuleNotFoundError:  # the error of `load` names the extra that installs the missing package
            found = import_module(".lazy_import", __package__).load(f"{where[name]}:{name}", package=package)
        setattr(sys.modules[package], name, found)
        return found

    return public, load_name, lambda: public


def _order(name: str) -> tuple[int, str]:
    """Sort constants first, then classes, then the rest, as the linter does."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name
