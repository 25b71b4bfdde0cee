"""A personality: what a turn takes from a pack, unchanged for as long as the turn holds it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._core.codec.json import MAX_BYTES
from .._core.validation import nearest_name
from ..errors import InvalidArgument, UnknownTool, brief
from ..limits import NO_LIMITS, RunLimits
from ..tools.registry import ToolRegistry, unknown_tool

_PLACE = re.compile(r"\{\{ *([A-Za-z_][A-Za-z0-9_]*) *\}\}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a model is asked; None leaves it to the provider."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None

    def options(self) -> dict[str, Any]:
        """What there is of it, as `LLMClient.generate` takes it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """How much of a conversation a turn is given, and whether it becomes part of it; None is no limit.

    With `remember=False` nothing of the turn is stored in the conversation: neither what was asked nor the answer.
    """

    history_messages: int = 50
    history_tokens: int | None = None
    remember: bool = True


@dataclass(frozen=True, kw_only=True)
class PersonalityInstance:
    """One state of one pack. `tools` are the names it may use, None all there are; `version` counts from 1.

    `digest` is over all that the pack says: equal digests are equal packs, in every process. `provider` and
    `model` are None where the configuration decides. As a recorded value it keeps its form with
    `returns=PersonalityInstance`, so that a turn that is resumed goes on as it began.
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
        said = {name: value for name, value in dataclasses.asdict(self).items() if name != "version"}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def prompt(self, name: str = "system", values: Mapping[str, str | int | float] | None = None) -> str:
        """The system prompt, or another by name, with each `{{name}}` in it replaced by its value; see `filled`."""
        texts = {**self.prompts, "system": self.system_prompt}
        if name not in texts:
            raise InvalidArgument(
                f"personality {brief(self.name)} has no prompt {brief(name)}: {nearest_name(name, texts)}"
            )
        return filled(texts[name], values or {})

    def allowed(self, registry: ToolRegistry) -> ToolRegistry:
        """The tools it may use, in the order of the pack; UnknownTool for one that is not registered."""
        tools = {tool.name: tool for tool in registry.list_tools()}
        some = ToolRegistry()
        for name in tools if self.tools is None else self.tools:
            if name not in tools:
                missing = unknown_tool(name, tools.values())
                raise UnknownTool(f"personality {self.name!r} may use a tool that is not registered: {missing}")
            some.register(tools[name])
        return some


def places_in(text: str) -> set[str]:
    """The names whose values `filled` asks for."""
    return {place[1] for place in _PLACE.finditer(text)}


def filled(text: str, values: Mapping[str, str | int | float]) -> str:
    """The text with each `{{name}}` replaced by that value, once: nothing is evaluated, no value is read again.

    Raises:
        InvalidArgument: A name has no value, a value is neither text nor number, or the values have more than
            MAX_BYTES characters in all. The total is checked before the prompt is built.
    """
    left = MAX_BYTES

    def value_of(place: re.Match[str]) -> str:
        name = place[1]
        if name not in values:
            raise InvalidArgument(f"the prompt needs a value for {{{{{name}}}}}: there are {sorted(values)}")
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise InvalidArgument(f"the value of {{{{{name}}}}} is a text or a number, not {brief(value)}")
        said = str(value)
        nonlocal left
        left -= len(said)
        if left < 0:
            raise InvalidArgument(
                f"the values of a prompt must be at most {MAX_BYTES:,} characters together, got more at "
                f"{{{{{name}}}}}. Give shorter values, or name them less often"
            )
        return said

    return _PLACE.sub(value_of, text)
