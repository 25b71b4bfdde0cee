"""Sets of personality packs: select one by name, and reload them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._core.clock import SYSTEM, Clock
from .._core.ids import path_text
from .._core.validation import Shown, must, unknown
from ..errors import InvalidArgument
from ..tools.registry import ToolRegistry
from .pack_reader import LoggedOnce, Mark, PackReader, PackScan, watch
from .personality_instance import MemorySettings, PersonalityInstance, Sampling

__all__ = ["MemorySettings", "PackSet", "PersonalityInstance", "PersonalityPackManager", "Sampling"]

#: Without a folder of packs: no prompt, all tools, the configured provider and model.
BUILT_IN = PersonalityInstance(name="default", description="The personality of a program without packs.", default=True)


@dataclass(frozen=True)
class PackSet:
    """The packs of one load, immutable. `default` is the name of the personality for turns that name none."""

    packs: Mapping[str, PersonalityInstance]
    default: str

    @classmethod
    def of(cls, packs: Mapping[str, PersonalityInstance] | None, default: str | None = None) -> PackSet:
        """Return a set of these packs; None means the built-in one.

        Raises:
            InvalidArgument: `default` is unknown, or without it not exactly one of several packs is the default.
        """
        packs = {BUILT_IN.name: BUILT_IN} if packs is None else packs
        marked = [name for name, each in packs.items() if each.default]
        if default is not None:
            _require_pack(default, packs, "default personality")
        elif len(marked) > 1:
            raise must(
                "exactly one personality", "have default = true", Shown(_listed(marked)), "Remove it from the others"
            )
        elif not marked and len(packs) > 1:
            raise must(
                "exactly one personality", "have default = true", Shown(f"none of {_listed(packs)}"), "Add it to one"
            )
        return cls(packs, default or next(iter(marked or packs)))

    def get(self, name: str | None = None) -> PersonalityInstance:
        """Return the personality of that name, or the default one.

        Raises:
            InvalidArgument: No personality has that name; the message suggests the nearest one.
        """
        return self.packs[_require_pack(self.default if name is None else name, self.packs, "personality")]

    def select(self, metadata: Mapping[str, Any] | None = None) -> PersonalityInstance:
        """Return the personality that `metadata["personality"]` names, or the default one. Raises the errors of `get`.

        `metadata` is that of a run or turn.
        """
        return self.get((metadata or {}).get("personality"))

    def names(self) -> list[str]:
        """Return the names of all packs, sorted."""
        return sorted(self.packs)


def _listed(names: Iterable[str]) -> str:
    """Return at most five of the names."""
    found = sorted(names)
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _require_pack(name: object, packs: Mapping[str, PersonalityInstance], what: str) -> str:
    if not isinstance(name, str):
        raise must(what, "be the name of a personality", name)
    if name not in packs:
        raise InvalidArgument(unknown(what, name, packs))
    return name


class PersonalityPackManager:
    """Loads and reloads the packs of a folder.

    1. `current` is one immutable PackSet. A reload replaces it as a whole.
    2. An invalid pack keeps its last valid state. All packs do if they have no single default, or if their folder
       cannot be read. `errors` has the reasons, each of which is logged once.

    Args:
        folder: The folder of packs; None for the built-in personality "default" alone.
        tools: If passed, `get` and `select` reject a pack with a tool that is not registered here.
        default: The name of the default personality; by default that of the pack with `default = true`.
        clock: Its `sleep` is used by `watch`.

    Raises:
        InvalidArgument: A pack is invalid at the first load. The message names the file, the key and the value.
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
            raise must("folder", "be the path of a folder, or None", folder)
        self._reader = None if text is None else PackReader(Path(text).absolute())
        self._tools, self._default, self._clock = tools, default, clock
        self._lock = threading.Lock()
        self._problems = LoggedOnce("the personalities")
        #: The present errors by name of the pack; "" for an error of all packs together.
        self.errors: Mapping[str, InvalidArgument] = {}
        found = self._scan()
        self._current = PackSet.of(found.packs if found else None, default)

    @property
    def current(self) -> PackSet:
        """The packs of the last successful load."""
        return self._current

    def get(self, name: str | None = None) -> PersonalityInstance:
        """Return a personality like `PackSet.get`.

        Raises:
            UnknownTool: One of its tools is not registered in `tools`.
        """
        return self._with_registered_tools(self._current.get(name))

    def select(self, metadata: Mapping[str, Any] | None = None) -> PersonalityInstance:
        """Return a personality like `PackSet.select`.

        Raises:
            UnknownTool: One of its tools is not registered in `tools`.
        """
        return self._with_registered_tools(self._current.select(metadata))

    def list_packs(self) -> list[PersonalityInstance]:
        """Return all packs, sorted by name."""
        return [each for _, each in sorted(self._current.packs.items())]

    def reload(self) -> bool:
        """Read the files again. Return True if the content of any pack has changed."""
        with self._lock:
            before = self._current
            try:
                found = self._scan()
                now = PackSet.of(found.packs if found else None, self._default)
            except InvalidArgument as error:
                self.errors = {"": error}
                self._problems.report(error)
                return False
            self.errors = found.errors if found else {}
            self._problems.clear()
            self._current = now if now != before else before
            return now != before

    async def watch(self, interval: float = 1.0) -> None:
        """Reload after changes of the files, until cancelled; a file that is still being written is waited for.

        Args:
            interval: Seconds between two checks.
        """
        await watch(self, interval, self._clock)

    def marks(self) -> dict[Path, Mark]:
        """Return the file attributes that change when a file is modified."""
        return {} if self._reader is None else self._reader.marks()

    def _scan(self) -> PackScan | None:
        return None if self._reader is None else self._reader.read()

    def _with_registered_tools(self, instance: PersonalityInstance) -> PersonalityInstance:
        if self._tools is not None:
            instance.allowed(self._tools)
        return instance
