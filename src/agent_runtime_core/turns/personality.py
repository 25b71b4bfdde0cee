"""Personality packs: which there are, which is meant, and their reloading."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._core.clock import SYSTEM, Clock
from .._core.ids import path_text
from .._core.validation import nearest_name
from ..errors import InvalidArgument, brief
from ..tools.registry import ToolRegistry
from .pack_reader import PackReader, PackScan
from .personality_instance import MemorySettings, PersonalityInstance, Sampling
from .settings_files import LoggedOnce, Mark, watch

__all__ = ["MemorySettings", "PackSet", "PersonalityInstance", "PersonalityPackManager", "Sampling"]

#: What there is without a folder: no prompt, every tool, the provider and model of the configuration.
BUILT_IN = PersonalityInstance(name="default", description="The personality of a program without packs.", default=True)


@dataclass(frozen=True)
class PackSet:
    """The packs as they were at one moment; it never changes. `default` is the name of the one nobody need name."""

    packs: Mapping[str, PersonalityInstance]
    default: str

    @classmethod
    def of(cls, packs: Mapping[str, PersonalityInstance] | None, default: str | None = None) -> PackSet:
        """Those packs, or None for the built-in one; InvalidArgument unless exactly one is the default."""
        packs = {BUILT_IN.name: BUILT_IN} if packs is None else packs
        marked = [name for name, each in packs.items() if each.default]
        if default is not None:
            _known(default, packs, "the default personality")
        elif len(marked) > 1:
            raise InvalidArgument(f"more than one personality is the default: {', '.join(marked)}; one may be")
        elif not marked and len(packs) > 1:
            raise InvalidArgument(f"none of the personalities {', '.join(packs)} has default = true: one must be")
        return cls(packs, default or next(iter(marked or packs)))

    def get(self, name: str | None = None) -> PersonalityInstance:
        """That personality, or the default one; InvalidArgument with the nearest name if there is none of that name."""
        return self.packs[_known(self.default if name is None else name, self.packs, "personality")]

    def select(self, metadata: Mapping[str, Any] | None = None) -> PersonalityInstance:
        """The one that the `personality` of a run's or turn's metadata names; the default one if it names none."""
        return self.get((metadata or {}).get("personality"))

    def names(self) -> list[str]:
        return sorted(self.packs)


def _known(name: object, packs: Mapping[str, PersonalityInstance], what: str) -> str:
    if not isinstance(name, str):
        raise InvalidArgument(f"{what} is a name, not {brief(name)}")
    if name not in packs:
        raise InvalidArgument(f"{what} {brief(name)} is not there: {nearest_name(name, packs)}")
    return name


class PersonalityPackManager:
    """The packs of a folder, read again by `reload`; without a folder the built-in "default" alone.

    1. `current` is one PackSet, replaced as a whole: who takes it once sees no mixture.
    2. A pack that has become broken stays as it was last good; so do all of them where they no longer agree on
       the default, or their folder cannot be read. `errors` says what is wrong, and the log says it once.
    3. With `tools`, a pack that allows a tool that is not registered there is refused when it is taken.

    At first every pack must be good: InvalidArgument names the file, the key and the value.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        tools: ToolRegistry | None = None,
        default: str | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        text = None if folder is None else path_text(folder)
        if folder is not None and text is None:
            raise InvalidArgument(f"{brief(folder, 500)} is no path of a folder: give one, or folder=None")
        self._reader = None if text is None else PackReader(Path(text).absolute())
        self._tools, self._default, self._clock = tools, default, clock
        self._lock = threading.Lock()
        self._problems = LoggedOnce("the personalities")
        #: What is wrong now, by the name of the pack, or "" for all of them together.
        self.errors: Mapping[str, InvalidArgument] = {}
        found = self._look()
        self._current = PackSet.of(found.packs if found else None, default)

    @property
    def current(self) -> PackSet:
        """All packs, as of one moment."""
        return self._current

    def get(self, name: str | None = None) -> PersonalityInstance:
        """As `PackSet.get`; with `tools` UnknownTool for one that it may use and that is not registered."""
        return self._taken(self._current.get(name))

    def select(self, metadata: Mapping[str, Any] | None = None) -> PersonalityInstance:
        """As `PackSet.select`; with `tools` UnknownTool for one that it may use and that is not registered."""
        return self._taken(self._current.select(metadata))

    def list_packs(self) -> list[PersonalityInstance]:
        """All packs, by name."""
        return [each for _, each in sorted(self._current.packs.items())]

    def reload(self) -> bool:
        """Look at the files; True if anything that they say has changed."""
        with self._lock:
            before = self._current
            try:
                found = self._look()
                now = PackSet.of(found.packs if found else None, self._default)
            except InvalidArgument as error:
                self.errors = {"": error}
                self._problems.tell(error)
                return False
            self.errors = found.errors if found else {}
            self._problems.over()
            self._current = now if now != before else before
            return now != before

    async def watch(self, interval: float = 1.0) -> None:
        """Reload whenever the files have changed and lie still, looking every `interval` seconds until cancelled."""
        await watch(self, interval, self._clock)

    def marks(self) -> dict[Path, Mark]:
        """What tells whether a file was touched."""
        return {} if self._reader is None else self._reader.marks()

    def _look(self) -> PackScan | None:
        return None if self._reader is None else self._reader.read()

    def _taken(self, instance: PersonalityInstance) -> PersonalityInstance:
        if self._tools is not None:
            instance.allowed(self._tools)
        return instance
