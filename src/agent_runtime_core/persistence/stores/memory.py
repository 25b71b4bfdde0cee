"""Stores in this process, gone when it ends."""

from __future__ import annotations
