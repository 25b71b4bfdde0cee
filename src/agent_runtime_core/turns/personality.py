"""Personalities, and packs of them: read a folder of packs, select one by name, reload them. No file is executed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import stat
import threading
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .._core.clock import SYSTEM, Clock
from .._core.codec.json import MAX_BYTES
from .._core.ids import path_text
from .._core.log import log
from .._core.settings import COUNT, POSITIVE, POSITIVE_SECONDS, TABLE, TEXT, TRUTH, SettingType, check_all, check_known
from .._core.threads import in_thread
from .._core.validation import Shown, must, unknown
from ..errors import InvalidArgument, UnknownTool, brief
from ..limits import NO_LIMITS, RunLimits
from ..loop.model_settings import OF_PERSONALITIES
from ..tools.registry import ToolRegistry, unknown_tool

_FIRST_OPTIONS = ("temperature", "top_p", "max_tokens")
_PLACEHOLDER = re.compile(r"\{\{ *([A-Za-z_][A-Za-z0-9_]*) *\}\}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of model calls. None means the default of the provider.

    Attributes:
        temperature: Randomness of the answers.
        top_p: The share of the probability from which tokens are chosen, from 0 to 1.
        max_tokens: The most tokens of one answer.
        reasoning_effort: How much a reasoning model thinks, in the words of the provider.
        seed: A number for answers that are as reproducible as the provider allows.
        stop: A text, or several, at which an answer ends.
        presence_penalty: A number from -2 to 2 that makes repetitions less likely.
        frequency_penalty: A number from -2 to 2 that makes repetitions less likely.
        service_tier: The class of service of the provider.

    Examples:
        >>> from agent_runtime_core.turns import Sampling
        >>> Sampling(temperature=0.2).options()
        {'temperature': 0.2}
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    service_tier: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options that are set, for `LLMClient.generate`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """How much of a conversation a turn reads, in messages and tokens, and whether the turn is added to it.

    `history_tokens=None` is no limit. With `remember=False` neither the user's message nor the answer is stored in
    the conversation.

    Attributes:
        history_messages: How many messages of the conversation a turn reads.
        history_tokens: How many tokens of the conversation a turn reads; None is no limit.
        remember: Whether the user's message and the answer are added to the conversation.
    """

    history_messages: int = 50
    history_tokens: int | None = None
    remember: bool = True


@dataclass(frozen=True, kw_only=True)
class PersonalityInstance:
    """One version of one pack, immutable.

    `tools` are the names of the allowed tools, None allows all. `provider` and `model` are None if the configuration
    decides. `version` starts at 1. A step with `returns=PersonalityInstance` records it unchanged, so that a resumed
    turn continues with the same personality.

    Attributes:
        name: The name of the personality.
        description: What it is for.
        system_prompt: The system prompt, with placeholders.
        prompts: Further prompts by name.
        tools: The names of the allowed tools; None allows all.
        provider: The provider of models; None if the configuration decides.
        model: The model; None if the configuration decides.
        sampling: The sampling options.
        memory: How much of a conversation a turn reads.
        limits: The limits of a turn.
        default: Whether turns that name no personality use it.
        version: The version, from 1.
    """

    name: str
    description: str = ""
    system_prompt: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] | None = None
    provider: str | None = None
    model: str | None = None
    sampling: Sampling = Sampling()
    memory: MemorySettings = MemorySettings()
    limits: RunLimits = NO_LIMITS
    default: bool = False
    version: int = 1

    @property
    def digest(self) -> str:
        """A SHA-256 of the content without the version, in hex. All processes compute the same digest for it."""
        content = {name: value for name, value in dataclasses.asdict(self).items() if name != "version"}
        # Options that earlier versions of the library did not have count only if they are set.
        content["sampling"] = {
            name: value for name, value in content["sampling"].items() if value is not None or name in _FIRST_OPTIONS
        }
        if not content["limits"]["pools"]:
            del content["limits"]["pools"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def prompt(self, name: str = "system", values: Mapping[str, str | int | float] | None = None) -> str:
        """Return a prompt with each `{{name}}` replaced by its value.

        Args:
            name: The name of the prompt; "system" is the system prompt.
            values: The values by name.

        Raises:
            InvalidArgument: The prompt is unknown, or a value is missing, of another type or too long; see `fill`.

        Examples:
            >>> from agent_runtime_core.turns import PersonalityInstance
            >>> guide = PersonalityInstance(name="guide", system_prompt="You help {{who}}.")
            >>> guide.prompt(values={"who": "Ada"})
            'You help Ada.'
        """
        texts = {**self.prompts, "system": self.system_prompt}
        if name not in texts:
            raise InvalidArgument(f"personality {brief(self.name)}: {unknown('prompt', name, texts)}")
        return fill(texts[name], values or {})

    def allowed(self, registry: ToolRegistry) -> ToolRegistry:
        """Return a registry of the allowed tools, in the order of the pack.

        Args:
            registry: The registered tools.

        Raises:
            UnknownTool: A tool of the pack is not registered.
        """
        tools = {tool.name: tool for tool in registry.list_tools()}
        some = ToolRegistry()
        for name in tools if self.tools is None else self.tools:
            if name not in tools:
                missing = unknown_tool(name, tools.values())
                raise UnknownTool(f"personality {self.name!r} allows a tool that is not registered: {missing}")
            some.register(tools[name])
        return some


def placeholders_in(text: str) -> set[str]:
    """Return the names of the placeholders that `fill` replaces."""
    return {placeholder[1] for placeholder in _PLACEHOLDER.finditer(text)}


def fill(text: str, values: Mapping[str, str | int | float]) -> str:
    """Replace each `{{name}}` by its value, once: values are not evaluated, and placeholders in them are kept.

    Raises:
        InvalidArgument: There is no value for a name, a value is neither a string nor a number, or the values contain
            more than MAX_BYTES characters in all. The total is checked before the prompt is built.
    """
    left = MAX_BYTES

    def value_of(placeholder: re.Match[str]) -> str:
        name = placeholder[1]
        if name not in values:
            got = Shown(f"values for {', '.join(sorted(values)[:5])}" if values else "no values")
            raise must("values", f"have a value for {{{{{name}}}}} of the prompt", got, f"Pass values={{{name!r}: …}}")
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise must(f"the value of {{{{{name}}}}}", "be a string or a number", value)
        text_of_value = str(value)
        nonlocal left
        left -= len(text_of_value)
        if left < 0:
            raise must(
                "the values of a prompt",
                f"have at most {MAX_BYTES:,} characters together",
                Shown(f"more at {{{{{name}}}}}"),
                "Use shorter values, or fewer placeholders",
            )
        return text_of_value

    return _PLACEHOLDER.sub(value_of, text)


#: The largest settings file, in bytes.
MAX_FILE_BYTES = 256 * 1024
#: Seconds without a change before files are read, so that a file written in parts is not read half-way.
SETTLE_SECONDS = 0.1
#: Checks for changes before files that keep changing are read all the same.
MAX_SETTLE_CHECKS = 50
#: Reads until two in a row have the same content.
MAX_READS = 5

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

#: The attributes that change when a file is modified or replaced; None for a missing file.
Mark = tuple[int, int, int, int, int] | None


def mark_of(path: Path) -> Mark:
    """Return the device, inode number, size and times of the file, without opening it."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_file(path: Path, called: str, inside: Path | None = None) -> bytes:
    """Return the content of a regular file; links are followed, but not out of the folder `inside`.

    Raises:
        InvalidArgument: The file is missing, not a regular file, larger than MAX_FILE_BYTES, outside `inside` or not
            readable. The message names it as `called`.
    """
    try:
        real = path.resolve(strict=True)
        if inside is not None and not real.is_relative_to(inside.resolve(strict=True)):
            raise must(called, "be inside its folder", Shown(f"a link to {real}"), "Copy the file there")
        return _read(real, called)
    except FileNotFoundError as error:
        raise InvalidArgument(f"{called} not found. Create it.") from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links is a RuntimeError before Python 3.13
        if isinstance(error, InvalidArgument):
            raise
        raise must(called, "be readable", Shown(f"an error: {error}")) from error


def _read(real: Path, called: str) -> bytes:
    # Non-blocking: opening a named pipe would wait for a writer.
    descriptor = os.open(real, _FLAGS | getattr(os, "O_NOFOLLOW", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise must(called, "be a regular file", Shown("a directory or a device"), "Move it away")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_BYTES:
        raise must(called, f"have at most {MAX_FILE_BYTES:,} bytes", Shown(f"{max(found.st_size, len(content)):,}"))
    return content


class Reading(NamedTuple):
    """The contents of files by name; `problem` is why a file cannot be used."""

    contents: dict[str, bytes]
    problem: str = ""


def read_until_stable(read: Callable[[], Reading], called: str) -> Reading:
    """Call `read` until it returns the same content twice in a row.

    A single read of files that are being replaced would mix old and new files.
    """
    before = read()
    for _ in range(MAX_READS):
        now = read()
        if now == before:
            return now
        before = now
    return before._replace(
        problem=f"{called} must not change while it is read, got {MAX_READS} different versions. Load it again."
    )


def tables_in(content: bytes, called: str) -> dict[str, Any]:
    """Return the tables of a TOML file. The InvalidArgument of an invalid file names the file and the line."""
    try:
        return tomllib.loads(text_in(content, called))
    except (ValueError, RecursionError) as error:
        # A number with more digits than Python reads raises a ValueError that is not a TOMLDecodeError.
        raise must(called, "be valid TOML", Shown(f"an error: {error}")) from error


def text_in(content: bytes, called: str) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise must(called, "be UTF-8", Shown(f"{error.reason} at byte {error.start}")) from error


class Reloadable(Protocol):
    """Something that is loaded from files."""

    def marks(self) -> dict[Path, Mark]:
        """Return a mark of each file, which changes when the file does."""

    def reload(self) -> bool:
        """Load the files again. Return whether anything changed."""


async def watch(source: Reloadable, interval: float, clock: Clock) -> None:
    """Reload `source` every `interval` seconds, once its files stop changing; files are read in a thread."""
    POSITIVE_SECONDS.check("interval", interval)
    seen: dict[Path, Mark] | None = None
    while True:
        marks = await in_thread(source.marks)
        for _ in range(MAX_SETTLE_CHECKS):
            if marks == seen:
                break
            await clock.sleep(SETTLE_SECONDS)
            seen, marks = marks, await in_thread(source.marks)
        await in_thread(source.reload)
        await clock.sleep(interval)


class LoggedOnce:
    """Logs an error once until it changes or is cleared. `last` is the present error, or None."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged: object = None
        self.last: InvalidArgument | None = None

    def report(self, error: InvalidArgument, content: object = None) -> None:
        """Log the error, unless it repeats the last error and the content of the files is the same."""
        self.last = error
        if self._logged != (reported := (str(error), content)):
            self._logged = reported
            log.warning("%s cannot be used; the last valid version is kept: %s", self._what, error)

    def clear(self) -> None:
        """Forget the error, because the files are valid again."""
        self.last = self._logged = None


FILE = "pack.toml"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PLAIN = re.compile(r"[^/\\:\0]+")


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(TEXT.fits, value)) and len(set(value)) == len(value)


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and _PLAIN.fullmatch(value) is not None and value not in (".", "..")


_FILE_NAME = SettingType("the name of a file in the pack's own folder", _is_file_name)
_KEYS = {
    "name": SettingType(
        "a name of letters, digits, '-', '_' and '.'", lambda v: isinstance(v, str) and bool(_NAME.fullmatch(v))
    ),
    "description": TEXT,
    "provider": TEXT,
    "model": TEXT,
    **OF_PERSONALITIES,
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
    """The last valid state of each pack of a folder, and the errors of invalid packs."""

    packs: Mapping[str, PersonalityInstance]
    errors: Mapping[str, InvalidArgument]


@dataclass
class _PackState:
    """The last read of one pack, its last valid state and its present error."""

    reading: Reading
    instance: PersonalityInstance | None = None
    error: InvalidArgument | None = None


class PackReader:
    """Reads a folder of packs, again after changes. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self._states: dict[str, _PackState] = {}
        self._loaded = False

    def marks(self) -> dict[Path, Mark]:
        """Return the marks of all files of packs, and of the folders, which change when a file is added."""
        try:
            homes = [self.folder / name for name in self._names()]
        except InvalidArgument:
            homes = []  # read() raises the error
        files = [
            home / file
            for home in homes
            for file in (FILE, *(self._states[home.name].reading.contents if home.name in self._states else ()))
        ]
        return {path: mark_of(path) for path in (self.folder, *homes, *files)}

    def read(self) -> PackScan:
        """Read the packs. An invalid pack keeps its last valid state, which is logged once.

        Raises:
            InvalidArgument: The folder is missing or contains no pack; at the first read also if a pack is invalid.
        """
        names = self._names()
        if not names:
            fix = f"Add a folder with a {FILE} for each pack"
            raise must(f"the folder {self.folder}", "contain at least one pack", Shown("none"), fix)
        states = {name: self._read_state(name) for name in names}
        errors = {name: each.error for name, each in states.items() if each.error is not None}
        if errors and not self._loaded:
            raise next(iter(errors.values()))
        for name, error in errors.items():
            if states[name] is not self._states.get(name):
                effect = "it is not loaded" if states[name].instance is None else "its last valid state is kept"
                log.warning("personality %r is invalid; %s: %s", name, effect, error)
        self._states, self._loaded = states, True
        return PackScan({n: each.instance for n, each in states.items() if each.instance is not None}, errors)

    def _names(self) -> list[str]:
        try:
            inside = sorted(self.folder.iterdir())
            return [each.name for each in inside if each.name[0] not in "._" and each.is_dir()]
        except OSError as error:
            got, fix = Shown(f"an error: {error.strerror}"), "Create it, or use another folder"
            raise must(f"the folder {self.folder}", "be readable", got, fix) from error

    def _read_state(self, name: str) -> _PackState:
        before = self._states.get(name)
        reading = read_until_stable(lambda: read_pack(self.folder, name), f"personality {name!r}")
        if before is not None and reading == before.reading:
            return before
        old = before.instance if before is not None else None
        try:
            new = build_personality(name, reading)
        except InvalidArgument as error:
            return _PackState(reading, old, error)
        if old is not None:
            new = old if new.digest == old.digest else dataclasses.replace(new, version=old.version + 1)
        return _PackState(reading, new)


def read_pack(folder: Path, name: str) -> Reading:
    """Read all files of a pack. The reading contains the error of a file that cannot be read."""
    home, contents = folder / name, dict[str, bytes]()
    try:
        if not home.resolve(strict=True).is_relative_to(folder.resolve(strict=True)):
            raise must(f"personality {brief(name)}", f"be inside {folder}", Shown("a link"), "Move its folder there")
        contents[FILE] = read_file(home / FILE, f"{name}/{FILE}", home)
        for file in _prompt_files(name, contents[FILE]):
            contents[file] = read_file(home / file, f"{name}/{file}", home)
    except (InvalidArgument, OSError, RuntimeError) as error:
        return Reading(contents, str(error))
    return Reading(contents)


def _prompt_files(name: str, content: bytes) -> list[str]:
    """Return the prompt files that pack.toml names; none if it is invalid (see `build_personality`)."""
    try:
        return _files_in(_checked_table(name, content))
    except InvalidArgument:
        return []


def _checked_table(name: str, content: bytes) -> dict[str, Any]:
    """Return the table of pack.toml, with its own keys and the names of its prompts checked."""
    where = f"{name}/{FILE}"
    table = check_all(tables_in(content, where), _KEYS, where)
    if "name" not in table:
        raise must(f"{where}: name", "be set", Shown("no name"), f"Add name = {brief(name)}")
    if table["name"] != name:
        fix = "Rename one of the two"
        raise must(f"{where}: name", f"be the name of its folder {brief(name)}", table["name"], fix)
    prompts = table.get("prompts", {})
    check_all(prompts, dict.fromkeys(prompts, _FILE_NAME), f"{where}: [prompts]")
    if "system" in prompts:
        fix = "Move it to the top level of the file"
        raise must(f"{where}: [prompts] system", "be the top-level key system", prompts["system"], fix)
    return table


def _files_in(table: Mapping[str, Any]) -> list[str]:
    own = [table["system"]] if "system" in table else []
    return list(dict.fromkeys([*own, *table.get("prompts", {}).values()]))


def build_personality(name: str, reading: Reading) -> PersonalityInstance:
    """Build the personality from its files. An InvalidArgument names the file, the key and the value."""
    if reading.problem:
        raise InvalidArgument(reading.problem)
    where = f"{name}/{FILE}"
    table = _checked_table(name, reading.contents[FILE])
    texts = {file: _prompt_text(f"{name}/{file}", reading.contents[file]) for file in _files_in(table)}
    return PersonalityInstance(
        name=name,
        description=table.get("description", ""),
        system_prompt=texts[table["system"]] if "system" in table else "",
        prompts={each: texts[file] for each, file in table.get("prompts", {}).items()},
        tools=tuple(table["tools"]) if "tools" in table else None,
        provider=table.get("provider"),
        model=table.get("model"),
        sampling=Sampling(**{key: table[key] for key in OF_PERSONALITIES if key in table}),
        memory=MemorySettings(**check_all(table.get("memory", {}), _MEMORY, f"{where}: [memory]")),
        limits=_limits(table.get("limits", {}), f"{where}: [limits]"),
        default=table.get("default", False),
    )


def _prompt_text(called: str, content: bytes) -> str:
    text = text_in(content, called)
    if not text.strip():
        # An editor that writes in place first truncates the file: the personality would lose its instructions.
        raise must(called, "not be empty", Shown("no text"), "Write the prompt, or remove its key")
    return text


def _limits(table: Mapping[str, Any], called: str) -> RunLimits:
    for name in table:
        check_known(name, _LIMITS, called, "limit")
    try:
        return RunLimits(**table)
    except InvalidArgument as error:
        raise InvalidArgument(f"{called} {error}") from error


#: Without a folder of packs: no prompt, all tools, the configured provider and model.
BUILT_IN = PersonalityInstance(name="default", description="The personality of a program without packs.", default=True)


@dataclass(frozen=True)
class PackSet:
    """The packs of one load, immutable. `default` is the name of the personality for turns that name none.

    Attributes:
        packs: The personalities by name.
        default: The name of the personality for turns that name none.
    """

    packs: Mapping[str, PersonalityInstance]
    default: str

    @classmethod
    def of(cls, packs: Mapping[str, PersonalityInstance] | None, default: str | None = None) -> PackSet:
        """Return a set of these packs. If None, the built-in pack.

        Args:
            packs: The personalities by name.
            default: The name of the default personality. If None, the personality that is marked as default.

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
        """Return the personality of that name, or the default personality.

        Args:
            name: The name of the personality. If None, the default personality.

        Raises:
            InvalidArgument: There is no personality with that name; the message suggests the nearest name.

        Examples:
            >>> from agent_runtime_core.turns import PackSet, PersonalityInstance
            >>> packs = PackSet.of({"guide": PersonalityInstance(name="guide", default=True)})
            >>> packs.select({}).name
            'guide'
        """
        return self.packs[_require_pack(self.default if name is None else name, self.packs, "personality")]

    def select(self, metadata: Mapping[str, Any] | None = None) -> PersonalityInstance:
        """Return the personality that `metadata["personality"]` names, or the default. Raises the errors of `get`.

        Args:
            metadata: The metadata of a run or turn.

        Examples:
            >>> from agent_runtime_core.turns import PackSet, PersonalityInstance
            >>> packs = PackSet.of({"guide": PersonalityInstance(name="guide", default=True)})
            >>> packs.select({}).name
            'guide'
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
    2. An invalid pack keeps its last valid state. All packs do if they do not mark exactly one default, or if their
       folder cannot be read. `errors` contains the reasons, each of which is logged once.

    Args:
        folder: The folder of packs; None for the built-in personality "default" alone.
        tools: If passed, `get` and `select` reject a pack with a tool that is not registered here.
        default: The name of the default personality; by default the pack with `default = true`.
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

        Args:
            name: The name of the personality. If None, the default personality.

        Raises:
            UnknownTool: One of its tools is not registered in `tools`.
        """
        return self._with_registered_tools(self._current.get(name))

    def select(self, metadata: Mapping[str, Any] | None = None) -> PersonalityInstance:
        """Return a personality like `PackSet.select`.

        Args:
            metadata: The metadata of a run or turn.

        Raises:
            UnknownTool: One of its tools is not registered in `tools`.
        """
        return self._with_registered_tools(self._current.select(metadata))

    def list_packs(self) -> list[PersonalityInstance]:
        """Return all packs, sorted by name."""
        return [each for _, each in sorted(self._current.packs.items())]

    def reload(self) -> bool:
        """Read the files again. Return True if the content of any pack changed.

        Returns:
            Whether the content of any pack changed.
        """
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
