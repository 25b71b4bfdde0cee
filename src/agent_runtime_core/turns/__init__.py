"""Turns: their settings in config.toml, and the personalities that answer them."""

from __future__ import annotations

from .config_loader import (
    ConfigChanged,
    ConfigLoader,
    PersonalitySettings,
    ProviderSettings,
    Settings,
    TurnSettings,
)
from .personality import MemorySettings, PackSet, PersonalityInstance, PersonalityPackManager, Sampling

__all__ = [
    "ConfigChanged",
    "ConfigLoader",
    "MemorySettings",
    "PackSet",
    "PersonalityInstance",
    "PersonalityPackManager",
    "PersonalitySettings",
    "ProviderSettings",
    "Sampling",
    "Settings",
    "TurnSettings",
]
