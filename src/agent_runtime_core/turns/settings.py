"""All settings of one moment, built from their sources: defaults, default personality, config.toml, environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._core.settings import (
    POSITIVE,
    POSITIVE_SECONDS,
    SECRET,
    TABLE,
    TEXT,
    TRUTH,
    URL,
    SettingType,
    check_all,
    choice,
    from_variables,
    without_credentials_in_repr,
)
from ..config import PREFIX, SETTINGS, RuntimeConfig, from_environment
from ..errors import InvalidArgument, UnknownSetting
from ..planning.plan import StepKind
from .personality import PackSet

__all__ = ["PersonalitySettings", "ProviderSettings", "ProviderSteps", "Settings", "TurnSettings"]

_SECTIONS = dict.fromkeys(("runtime", "model_prices", "turns", "personality", "providers"), TABLE)
_KINDS = tuple(kind.value for kind in StepKind)
_PROVIDER_STEPS = {
    "kinds": SettingType(f"a list of kinds of steps, which are {', '.join(_KINDS)}", lambda value: _are_kinds(value)),
    "deadline": POSITIVE_SECONDS,
    "heartbeat": POSITIVE_SECONDS,
    "fallback": choice("fail", "here"),
}
_TURNS = {"max_in_flight": POSITIVE, "remote_steps": TRUTH, "max_unsent_bytes": POSITIVE, "provider_steps": TABLE}
_PERSONALITY = {"default": TEXT, "folder": TEXT}
_PROVIDER = {"api_key": SECRET, "base_url": URL, "default_model": TEXT}
_PROVIDERS = {"openai": {**_PROVIDER, "organization": TEXT}}
_TURN_VARIABLES = {name: f"{PREFIX}TURNS_{name.upper()}" for name in ("max_in_flight", "remote_steps")}
_PERSONALITY_VARIABLES = {name: f"{PREFIX}PERSONALITY_{name.upper()}" for name in _PERSONALITY}


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True)
class ProviderSteps:
    """Which steps of a turn are executed by an external worker, which answers on agent.step_results.

    Args:
        kinds: The kinds of these steps: "llm_call", "tool_call" or "memory_op".
        deadline: Seconds from the request of a step to its answer.
        heartbeat: Seconds that a provider worker may be silent after the first piece of its answer. A piece without
            text is enough.
        fallback: What happens without an answer: "fail" fails the attempt, "here" executes the step in the process of
            the turn.

    Raises:
        InvalidArgument: A value is invalid.
    """

    kinds: tuple[str, ...] = ("llm_call",)
    deadline: float = 300.0
    heartbeat: float = 30.0
    fallback: str = "fail"

    def __post_init__(self) -> None:
        for name, setting in _PROVIDER_STEPS.items():
            setting.check(name, getattr(self, name))
        object.__setattr__(self, "kinds", tuple(self.kinds))


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """Settings of turns.

    `max_in_flight` steps run at once. With `remote_steps`, other workers may execute steps. `max_unsent_bytes` is
    how far a reader of `stream(backpressure=True)` may lag. `provider_steps` are the steps that provider workers
    execute.
    """

    max_in_flight: int = 16
    remote_steps: bool = False
    max_unsent_bytes: int = 131072
    provider_steps: ProviderSteps | None = None


def _are_kinds(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(each in _KINDS for each in value)


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True)
class PersonalitySettings:
    """The default personality, None for the pack with `default = true`; and the folder of packs, None for no packs."""

    default: str | None = None
    folder: Path | None = None


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True, repr=False)
class ProviderSettings:
    """The options of the client of one provider. Its repr hides the API key."""

    api_key: str | None = None
    base_url: str | None = None
    default_model: str | None = None
    organization: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that are set, for `get_llm_client(name, **options)`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def __repr__(self) -> str:
        shown = (f"{n}={_PROVIDERS['openai'][n].shown(value)!r}" for n, value in self.options().items())
        return f"ProviderSettings({', '.join(shown)})"


@without_credentials_in_repr
@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings and packs of one load, immutable. `version` starts at 1."""

    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    turns: TurnSettings = TurnSettings()
    personality: PersonalitySettings = PersonalitySettings()
    providers: Mapping[str, ProviderSettings] = field(default_factory=dict)
    packs: PackSet = field(default_factory=lambda: PackSet.of(None))
    version: int = 1


@without_credentials_in_repr
@dataclass(frozen=True)
class Sources:
    """The checked values of config.toml and of the environment."""

    #: Settings of RuntimeConfig in the file, and in the environment.
    runtime: Mapping[str, Any]
    environment: Mapping[str, Any]
    turns: Mapping[str, Any]
    personality: PersonalitySettings
    providers: Mapping[str, ProviderSettings]

    @classmethod
    def of(cls, document: Mapping[str, Any], environ: Mapping[str, str], path: Path | None) -> Sources:
        """Check the tables of the file at `path`, and the environment. Relative folders start at the file's folder.

        Raises:
            InvalidArgument: Names the file or the variable, the key and the value.
        """
        where = "" if path is None else path.name
        for name in document:
            if name in SETTINGS and name not in _SECTIONS:
                raise UnknownSetting(f"{where}: {name} must be in [runtime], got it above all sections. Move it there.")
        tables: dict[str, Any] = {name: {} for name in _SECTIONS} | check_all(document, _SECTIONS, where, "section")
        runtime = check_all(tables["runtime"], SETTINGS, f"{where}: [runtime]")
        turns = check_all(tables["turns"], _TURNS, f"{where}: [turns]")
        for name, called, values in (
            ("model_prices", "[model_prices]", document),
            ("max_unsent_bytes", "[turns] max_unsent_bytes", turns),
        ):
            if name in values and name in runtime:
                raise InvalidArgument(f"{where}: {called} must be set once, got it in [runtime] too. Remove one.")
            if name in values:
                SETTINGS[name].check(f"{where}: {called}", values[name])
                runtime[name] = values[name]
        turns.pop("max_unsent_bytes", None)
        if "provider_steps" in turns:
            table = check_all(turns["provider_steps"], _PROVIDER_STEPS, f"{where}: [turns.provider_steps]")
            turns["provider_steps"] = ProviderSteps(**table)
        if "trace_sinks" in runtime:
            runtime["trace_sinks"] = tuple(runtime["trace_sinks"])
        personality = check_all(tables["personality"], _PERSONALITY, f"{where}: [personality]")
        personality |= from_variables(_PERSONALITY, _PERSONALITY_VARIABLES, environ)
        folder = personality.get("folder")
        home = Path() if path is None else path.parent
        return cls(
            runtime=runtime,
            environment=from_environment(environ),
            turns=turns | from_variables(_TURNS, _TURN_VARIABLES, environ),
            personality=PersonalitySettings(
                default=personality.get("default"), folder=None if folder is None else (home / folder).absolute()
            ),
            providers={
                name: ProviderSettings(
                    **check_all(table, _PROVIDERS.get(name, _PROVIDER), f"{where}: [providers.{name}]")
                )
                for name, table in check_all(
                    tables["providers"], dict.fromkeys(tables["providers"], TABLE), f"{where}: [providers]"
                ).items()
            },
        )

    def with_packs(self, packs: PackSet) -> Settings:
        """Return the settings. File and environment override the default personality's provider and model."""
        explicit = {**self.runtime, **self.environment}
        runtime = RuntimeConfig(**{**_settings_of_pack(packs, explicit), **explicit})
        turns = TurnSettings(**{**self.turns, "max_unsent_bytes": runtime.max_unsent_bytes})
        return Settings(
            runtime=runtime, turns=turns, personality=self.personality, providers=self.providers, packs=packs
        )


def _settings_of_pack(packs: PackSet, explicit: Mapping[str, Any]) -> dict[str, str]:
    pack, found = packs.get(), dict[str, str]()
    if pack.provider is not None:
        found["model_provider"] = pack.provider
    # A model's name is valid only for the provider it was chosen for.
    if pack.model is not None and pack.provider in (None, explicit.get("model_provider", pack.provider)):
        found["default_model"] = pack.model
    return found


def changes(old: Settings, new: Settings) -> list[str]:
    """Return the dotted names of settings that differ: `runtime.max_retries`, `packs.helper`."""
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
