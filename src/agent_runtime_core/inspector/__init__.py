"""The inspector: a page that shows runs, served by `inspect` and `serve`, or exported as one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily

if TYPE_CHECKING:
    from .export import run_html as run_html

_NAMES = {"run_html": ".export:run_html"}
__all__ = ["run_html"]


def __getattr__(name: str) -> object:
    return lazily(__name__, _NAMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
