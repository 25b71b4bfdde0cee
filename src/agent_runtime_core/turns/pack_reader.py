"""A folder of packs: a folder for each, with its pack.toml and its prompts; nothing in it is ever executed."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .._core.settings import COUNT, POSITIVE, TABLE, TEXT, TRUTH, SettingType, check_all, check_known, number
from ..errors import InvalidArgument, brief
from ..limits import RunLimits
from .personality_instance import MemorySettings, PersonalityInstance, Sampling
from .settings_files import Mark, Reading, mark_of, read_file, tables_in, text_in, twice

log: logging.Logger = logging.getLogger("agent_runtime_core")

FILE = "pack.toml"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PLAIN = re.compile(r"[^/\\:\0]+")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(TEXT.fits, value)) and len(set(value)) == len(value)


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and _PLAIN.fullmatch(value) is not None and value not in (".", "..")


_FILE_NAME = SettingType("the name of a file in the pack's own folder", _is_file_name)
_SAMPLING = {"temperature": number(0, 2), "top_p": number(0, 1), "max_tokens": POSITIVE}
_KEYS = {
    "name": SettingType(
        "a name of letters, digits, '-', '_' and '.'", lambda v: isinstance(v, str) and bool(_NAME.fullmatch(v))
    ),
    "description": TEXT,
    "provider": TEXT,
    "model": TEXT,
    **_SAMPLING,
    "tools": SettingType("a list of the names of tools, each once", _are_names),
    "system": _FILE_NAME,
    "default": TRUTH,
    "prompts": TABLE,
    "memory": TABLE,
    "limits": TABLE,
}
_MEMORY = {"history_messages": COUNT, "history_tokens": POSITIVE, "remember": TRUTH}
_LIMITS = tuple(each.name for each in dataclasses.fields(RunLimits))


class PackScan(NamedTuple):
    """The packs of a folder, the last good state of each, and what is wrong with those that are broken."""

    packs: Mapping[str, PersonalityInstance]
    errors: Mapping[str, InvalidArgument]


@dataclass
class _Known:
    """What is known of one pack."""

    reading: Reading
    instance: PersonalityInstance | None = None
    error: InvalidArgument | None = None


class PackReader:
    """Looks at a folder of packs again and again. Not safe for several threads at once."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self._known: dict[str, _Known] = {}
        self._begun = False

    def marks(self) -> dict[Path, Mark]:
        """The marks of every file that counts, and of the folders, which a new file changes."""
        try:
            homes = [self.folder / name for name in self._names()]
        except InvalidArgument:
            homes = []  # look() tells why
        files = [
            home / file
            for home in homes
            for file in (FILE, *(self._known[home.name].reading.contents if home.name in self._known else ()))
        ]
        return {path: mark_of(path) for path in (self.folder, *homes, *files)}

    def read(self) -> PackScan:
        """The packs as they are now. One that has become broken is kept as it was, which the log says once.

        InvalidArgument where there is no folder or no pack in it; and at the first look for any pack that is broken.
        """
        names = self._names()
        if not names:
            raise InvalidArgument(f"the folder {self.folder} has no packs: a folder for each, with a {FILE} in it")
        looked = {name: self._look_at(name) for name in names}
        errors = {name: each.error for name, each in looked.items() if each.error is not None}
        if errors and not self._begun:
            raise next(iter(errors.values()))
        for name, error in errors.items():
            if looked[name] is not self._known.get(name):
                kept = "it is left out" if looked[name].instance is None else "it is kept as it was"
                log.warning("personality %r is broken, %s: %s", name, kept, error)
        self._known, self._begun = looked, True
        return PackScan({n: each.instance for n, each in looked.items() if each.instance is not None}, errors)

    def _names(self) -> list[str]:
        try:
            inside = sorted(self.folder.iterdir())
            return [each.name for each in inside if each.name[0] not in "._" and each.is_dir()]
        except OSError as error:
            raise InvalidArgument(f"the folder {self.folder} cannot be read: {error.strerror}") from error

    def _look_at(self, name: str) -> _Known:
        before = self._known.get(name)
        reading = twice(lambda: read_pack(self.folder, name), f"personality {name!r}")
        if before is not None and reading == before.reading:
            return before
        old = before.instance if before is not None else None
        try:
            new = built(name, reading)
        except InvalidArgument as error:
            return _Known(reading, old, error)
        if old is not None:
            new = old if new.digest == old.digest else dataclasses.replace(new, version=old.version + 1)
        return _Known(reading, new)


def read_pack(folder: Path, name: str) -> Reading:
    """All files of that pack, read; a file that cannot be is the problem of the reading."""
    home, contents = folder / name, dict[str, bytes]()
    try:
        if not home.resolve(strict=True).is_relative_to(folder.resolve(strict=True)):
            raise InvalidArgument(f"personality {brief(name)} leads out of {folder}: move its folder there")
        contents[FILE] = read_file(home / FILE, f"{name}/{FILE}", home)
        for file in _named_in(name, contents[FILE]):
            contents[file] = read_file(home / file, f"{name}/{file}", home)
    except (InvalidArgument, OSError, RuntimeError) as error:
        return Reading(contents, str(error))
    return Reading(contents)


def _named_in(name: str, content: bytes) -> list[str]:
    """The prompt files that pack.toml names; none where it cannot be used, which `built` tells."""
    try:
        return _files_of(_table_of(name, content))
    except InvalidArgument:
        return []


def _table_of(name: str, content: bytes) -> dict[str, Any]:
    """What pack.toml says, its own keys and the names of its prompts checked."""
    where = f"{name}/{FILE}"
    table = check_all(tables_in(content, where), _KEYS, where)
    if "name" not in table:
        raise InvalidArgument(f"{where}: there is no name: write name = {brief(name)}")
    if table["name"] != name:
        raise InvalidArgument(
            f"{where}: name={brief(table['name'])} differs from its folder {brief(name)}: rename one of them"
        )
    prompts = table.get("prompts", {})
    check_all(prompts, dict.fromkeys(prompts, _FILE_NAME), f"{where}: prompts")
    if "system" in prompts:
        raise InvalidArgument(f"{where}: prompts.system is the key system at the top: move it there")
    return table


def _files_of(table: Mapping[str, Any]) -> list[str]:
    own = [table["system"]] if "system" in table else []
    return list(dict.fromkeys([*own, *table.get("prompts", {}).values()]))


def built(name: str, reading: Reading) -> PersonalityInstance:
    """The personality that those files say; InvalidArgument names the file, the key and the value that are wrong."""
    if reading.problem:
        raise InvalidArgument(reading.problem)
    where = f"{name}/{FILE}"
    table = _table_of(name, reading.contents[FILE])
    texts = {file: _prompt_of(f"{name}/{file}", reading.contents[file]) for file in _files_of(table)}
    return PersonalityInstance(
        name=name,
        description=table.get("description", ""),
        system_prompt=texts[table["system"]] if "system" in table else "",
        prompts={each: texts[file] for each, file in table.get("prompts", {}).items()},
        tools=tuple(table["tools"]) if "tools" in table else None,
        provider=table.get("provider"),
        model=table.get("model"),
        sampling=Sampling(**{key: table[key] for key in _SAMPLING if key in table}),
        memory=MemorySettings(**check_all(table.get("memory", {}), _MEMORY, f"{where}: memory")),
        limits=_limits_of(table.get("limits", {}), f"{where}: limits"),
        default=table.get("default", False),
    )


def _prompt_of(called: str, content: bytes) -> str:
    text = text_in(content, called)
    if not text.strip():
        # An editor that has only begun to write would else take the instructions away.
        raise InvalidArgument(f"{called} is empty: write the prompt, or leave its key out")
    return text


def _limits_of(table: Mapping[str, Any], called: str) -> RunLimits:
    for name in table:
        check_known(name, _LIMITS, called, "limit")
    try:
        return RunLimits(**table)
    except InvalidArgument as error:
        raise InvalidArgument(f"{called}: {error}") from error
