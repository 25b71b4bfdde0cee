"""Validate values against a JSON Schema."""

from __future__ import annotations

from ._core.json_schema import choice, misfit, misfits

__all__ = ["choice", "misfit", "misfits"]
