"""A personality: the immutable content of a pack that a turn uses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._core.codec.json import MAX_BYTES
from .._core.validation import Shown, must, unknown
from ..errors import InvalidArgument, UnknownTool, brief
from ..limits import NO_LIMITS, RunLimits
from ..tools.registry import ToolRegistry, unknown_tool

_FIRST_OPTIONS = ("temperature", "top_p", "max_tokens")
_PLACEHOLDER = re.compile(r"\{\{ *([A-Za-z_][A-Za-z0-9_]*) *\}\}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of model calls. None means the default of the provider."""

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
        """A SHA-256 of the content without the version, in hex. Equal content has equal digests in all processes."""
        content = {name: value for name, value in dataclasses.asdict(self).items() if name != "version"}
        # Options that earlier versions of the library did not have count only if they are set.
        content["sampling"] = {
            name: value for name, value in content["sampling"].items() if value is not None or name in _FIRST_OPTIONS
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def prompt(self, name: str = "system", values: Mapping[str, str | int | float] | None = None) -> str:
        """Return a prompt with each `{{name}}` replaced by its value.

        Args:
            name: The name of the prompt; "system" is the system prompt.
            values: The values by name.

        Raises:
            InvalidArgument: The prompt is unknown, or a value is missing, of another type or too long; see `fill`.
        """
        texts = {**self.prompts, "system": self.system_prompt}
        if name not in texts:
            raise InvalidArgument(f"personality {brief(self.name)}: {unknown('prompt', name, texts)}")
        return fill(texts[name], values or {})

    def allowed(self, registry: ToolRegistry) -> ToolRegistry:
        """Return a registry of the allowed tools, in the order of the pack.

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
        InvalidArgument: A name has no value, a value is neither a string nor a number, or the values have more than
            MAX_BYTES characters in all. The total is checked before the prompt is built.
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
