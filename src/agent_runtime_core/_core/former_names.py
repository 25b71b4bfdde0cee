"""Old names of methods and fields that adapters of other packages use, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any


def warn_former(owner: str, old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that `owner.old` is now `owner.new`.

    Args:
        owner: The name of the class or module.
        old: The name in 0.6.0.
        new: The name now.
        stacklevel: The frame that the warning names; by default the caller's caller.
    """
    warnings.warn(f"{owner}.{old} is now called {new}: use that name", DeprecationWarning, stacklevel=stacklevel)


def keep_former_names(cls: type, **new_names: str) -> None:
    """Add a property for each old name of a method or field of `cls`.

    Args:
        cls: The class.
        new_names: The name now, by the name in 0.6.0.
    """
    for old, new in new_names.items():
        setattr(cls, old, property(partial(_read, old, new)))


def keep_former_arguments(cls: type, method: str, **new_names: str) -> None:
    """Let a method of `cls` take its keyword arguments by their old names too.

    Args:
        cls: The class.
        method: The name of the method.
        new_names: The name now, by the name in 0.6.0.
    """
    called = getattr(cls, method)

    def renamed(self: Any, *args: Any, **values: Any) -> Any:
        for old in values.keys() & new_names.keys():
            warn_former(cls.__name__, old, new_names[old])
            values[new_names[old]] = values.pop(old)
        return called(self, *args, **values)

    setattr(cls, method, renamed)


def _read(old: str, new: str, owner: Any) -> Any:
    warn_former(type(owner).__name__, old, new)
    return getattr(owner, new)


def renamed_attribute(owner: Any, new: str, old: str) -> Any:
    """Return an optional attribute of an adapter, also under its old name; None if neither name exists."""
    found = getattr(owner, new, None)
    if found is None and (found := getattr(owner, old, None)) is not None:
        warn_former(type(owner).__name__, old, new)
    return found
