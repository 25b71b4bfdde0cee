"""The inspector: a page that shows runs, served by `inspect` and `serve`, or exported as one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .export import run_html as run_html
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, {".export": "run_html"})
