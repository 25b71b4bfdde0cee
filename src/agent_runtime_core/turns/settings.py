"""All settings of one moment, built from their sources: defaults, default personality, config.toml, environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._refusals import redacted
from ..config import FIELDS, PREFIX, RuntimeConfig, check_setting, from_environment, number_in, truth_in
from ..errors import InvalidArgument, UnknownSetting, brief
from .personality import PackSet
from .tables import POSITIVE, SECRET, TABLE, TEXT, TRUTH, Key, checked, known, take_table

__all__ = ["PersonalitySettings", "ProviderSettings", "Settings", "TurnSettings"]

SECTIONS = ("runtime", "model_prices", "turns", "personality", "providers")

_TURNS = {"max_in_flight": POSITIVE, "remote_steps": TRUTH, "max_unsent_bytes": POSITIVE}
_PERSONALITY = {"default": TEXT, "folder": TEXT}
_PROVIDER = {"api_key": SECRET, "base_url": TEXT, "default_model": TEXT}
_PROVIDERS = {"openai": {**_PROVIDER, "organization": TEXT}}
_READ: dict[Key, Callable[[str], Any]] = {TRUTH: truth_in, POSITIVE: number_in}


@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """How turns are worked off: steps in flight at once, whether other workers may take them, bytes of lag."""

    max_in_flight: int = 16
    remote_steps: bool = False
    max_unsent_bytes: int = 131072


@dataclass(frozen=True, kw_only=True)
class PersonalitySettings:
    """The default personality, None for the one that says so itself; the folder of packs, if there is one."""

    default: str | None = None
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class ProviderSettings:
    """What a client of one provider is made with; its text shows no key."""

    api_key: str | None = None
    base_url: str | None = None
    default_model: str | None = None
    organization: str | None = None

    def options(self) -> dict[str, Any]:
        """What there is of it, as `get_llm_client(name, **options)` takes it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def __repr__(self) -> str:
        shown = {n: "'***'" if n == "api_key" else repr(redacted(v)) for n, v in self.options().items()}
        return f"ProviderSettings({', '.join(f'{name}={value}' for name, value in shown.items())})"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every setting and every pack as of one moment; it never changes. `version` counts from 1."""

    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    turns: TurnSettings = TurnSettings()
    personality: PersonalitySettings = PersonalitySettings()
    providers: Mapping[str, ProviderSettings] = field(default_factory=dict)
    packs: PackSet = field(default_factory=lambda: PackSet.of(None))
    version: int = 1


@dataclass(frozen=True)
class Sources:
    """What config.toml says, its keys known and its values checked, and over it the environment."""

    #: Settings of RuntimeConfig that the file says, and that the environment says.
    runtime: Mapping[str, Any]
    environment: Mapping[str, Any]
    turns: Mapping[str, Any]
    personality: PersonalitySettings
    providers: Mapping[str, ProviderSettings]

    @classmethod
    def of(cls, document: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Sources:
        """InvalidArgument names the file or the variable, the key and the value; a folder is meant from the file's."""
        where, rest = "" if path is None else path.name, dict(document)
        for name in rest:
            if name in FIELDS and name not in SECTIONS:
                raise UnknownSetting(f"{where}: {brief(name)} is a setting of [runtime]: write it there")
            known(name, SECTIONS, where, "section")
        runtime = _runtime_of(rest, where)
        turns = checked(take_table(rest, "turns", where), _TURNS, f"{where}: turns")
        if "max_unsent_bytes" in turns:
            _once("max_unsent_bytes", runtime, f"{where}: turns.max_unsent_bytes stands in [runtime] too")
            runtime["max_unsent_bytes"] = turns.pop("max_unsent_bytes")
        personality = checked(take_table(rest, "personality", where), _PERSONALITY, f"{where}: personality")
        personality |= _variables("personality", _PERSONALITY, environ)
        home = Path() if path is None else path.parent
        folder = (home / personality["folder"]).absolute() if "folder" in personality else None
        return cls(
            runtime=runtime,
            environment=from_environment(environ),
            turns=turns | _variables("turns", {n: k for n, k in _TURNS.items() if n != "max_unsent_bytes"}, environ),
            personality=PersonalitySettings(default=personality.get("default"), folder=folder),
            providers=_providers_of(take_table(rest, "providers", where), f"{where}: providers"),
        )

    def with_packs(self, packs: PackSet) -> Settings:
        """The settings; the provider and model of the default personality stand under what the file says."""
        said = {**self.runtime, **self.environment}
        runtime = RuntimeConfig(**{**_of_pack(packs, said), **said})
        turns = TurnSettings(**{**self.turns, "max_unsent_bytes": runtime.max_unsent_bytes})
        return Settings(
            runtime=runtime, turns=turns, personality=self.personality, providers=self.providers, packs=packs
        )


def _of_pack(packs: PackSet, said: Mapping[str, Any]) -> dict[str, str]:
    pack, found = packs.get(), dict[str, str]()
    if pack.provider is not None:
        found["model_provider"] = pack.provider
    # A model means nothing to another provider than the one it was named for.
    if pack.model is not None and pack.provider in (None, said.get("model_provider", pack.provider)):
        found["default_model"] = pack.model
    return found


def _runtime_of(rest: dict[str, Any], where: str) -> dict[str, Any]:
    runtime = take_table(rest, "runtime", where)
    if "model_prices" in rest:
        _once("model_prices", runtime, f"{where}: [model_prices] stands in [runtime] too")
        runtime["model_prices"] = rest["model_prices"]
    for name, value in runtime.items():
        known(name, FIELDS, f"{where}: runtime")
        check_setting(name, f"{where}: {name}", value)
    if "trace_sinks" in runtime:
        runtime["trace_sinks"] = tuple(runtime["trace_sinks"])
    return runtime


def _once(name: str, runtime: Mapping[str, Any], message: str) -> None:
    if name in runtime:
        raise InvalidArgument(f"{message}: leave one of them out")


def _providers_of(tables: Mapping[str, Any], called: str) -> dict[str, ProviderSettings]:
    checked(tables, dict.fromkeys(tables, TABLE), called)
    return {
        name: ProviderSettings(**checked(table, _PROVIDERS.get(name, _PROVIDER), f"{called}.{name}"))
        for name, table in tables.items()
    }


def _variables(section: str, keys: Mapping[str, Key], environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says of a section, as in AGENT_RUNTIME_TURNS_MAX_IN_FLIGHT; empty is not set."""
    found: dict[str, Any] = {}
    for name, key in keys.items():
        variable = f"{PREFIX}{section}_{name}".upper()
        text = environ.get(variable, "").strip()
        if text:
            found[name] = _READ.get(key, str)(text)
            checked({variable: found[name]}, {variable: key}, "the environment")
    return found


def changes(old: Settings, new: Settings) -> list[str]:
    """The dotted names of what differs: `runtime.max_retries`, `packs.helper`."""
    changed: list[str] = []
    for section in ("runtime", "turns", "personality"):
        one, other = getattr(old, section), getattr(new, section)
        fields = [each.name for each in dataclasses.fields(one)]
        changed += [f"{section}.{name}" for name in fields if getattr(one, name) != getattr(other, name)]
    for section, there, now in (
        ("providers", old.providers, new.providers),
        ("packs", old.packs.packs, new.packs.packs),
    ):
        names = sorted({*there, *now})
        changed += [f"{section}.{name}" for name in names if there.get(name) != now.get(name)]
    if old.packs.default != new.packs.default:
        changed.append("packs.default")
    return changed
