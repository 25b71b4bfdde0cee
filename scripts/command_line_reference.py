"""Write docs/reference/command-line.md from the parser: `python scripts/command_line_reference.py`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from agent_runtime_core.cli.help import SECTIONS
from agent_runtime_core.cli.parser import parser

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "command-line.md"
COMMON = ("--url", "--json", "--debug", "--help", "-h")

HEAD = """\
# Command line

<!-- Written by scripts/command_line_reference.py from the parser. Do not edit. -->

`agent-runtime COMMAND …` is the command of this package, and `python -m agent_runtime_core COMMAND …` is the same.
[Use the command line](../guide/command-line.md) shows the commands with their output.

Without arguments, `agent-runtime` prints its commands.

%s
## Exit codes

| Code | When |
|---|---|
| 0 | done |
| 1 | a run was not found or had the wrong status, a check failed, or the awaited run did not succeed |
| 2 | invalid arguments, or the store or module cannot be used; nothing was done |
| 130 | interrupted with Ctrl-C |

Results are written to stdout.
Errors, warnings and the log of a worker are written to stderr.

## Options of all commands

| Option | Meaning |
|---|---|
"""

DURATIONS = """
## Durations

A duration is a number of seconds, or a number with a unit.
The units are `ms`, `s`, `m`, `h`, `d` and `w`.
They can be combined, the largest first: `1h30m`.
"""


def commands(top: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command that can be executed, with its name."""
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                below = list(commands(each, f"{path}{name} "))
                yield from below or [(f"{path}{name}", each)]


def contents(names: list[str]) -> str:
    """Return a list of links to the commands, by section."""
    lines = []
    for title, firsts in SECTIONS.items():
        shown = [name for first in firsts for name in names if name.partition(" ")[0] == first]
        links = ", ".join(f"[{name}](#{name.replace(' ', '-')})" for name in shown)
        lines.append(f"- {title[:1].upper()}{title[1:]}: {links}\n")
    return "".join(lines)


def name_of(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    value = str(action.metavar or "") if action.nargs != 0 else ""
    if not value and action.choices is not None:
        value = "\\|".join(map(str, action.choices))
    if not action.option_strings:
        return f"`{value}`" + (" (optional)" if action.nargs in ("?", "*") else "")
    options = ", ".join(f"`{each}`" for each in action.option_strings)
    shown = options if not value else f"`{action.option_strings[-1]} {value.replace(chr(92), '')}`"
    return shown + (" (required)" if action.required else "")


def rows(actions: list[argparse.Action]) -> str:
    """Return the rows of a table of arguments."""
    texts = [" ".join((each.help or "").split()).replace("|", "\\|").replace("{}", "`{}`") for each in actions]
    return "".join(f"| {name_of(action)} | {text} |\n" for action, text in zip(actions, texts, strict=True))


def section(name: str, command: argparse.ArgumentParser) -> str:
    """Return the section of one command."""
    limits = [each for group in command._action_groups if group.title == "limits" for each in group._group_actions]
    own = [each for each in command._actions if not set(each.option_strings) & set(COMMON)]
    own.sort(key=lambda each: (bool(each.option_strings), each in limits))  # positional arguments first, limits last
    lines = (line.strip() for line in " ".join((command.description or "").split()).replace(". ", ".\n").splitlines())
    parts = [f"\n## {name}\n\n", "\n".join(lines), "\n"]
    if own:
        parts += ["\n| Argument | Meaning |\n|---|---|\n", rows(own)]
    if not any("--url" in each.option_strings for each in command._actions):
        parts.append("\nThis command has no `--url`.\n")
    examples = (line.strip() for line in (command.epilog or "").splitlines()[1:])
    parts += ["\n```text\n", "\n".join(examples), "\n```\n"]
    return "".join(parts)


def page() -> str:
    """Return the page."""
    found = list(commands(parser()))
    common = [each for each in found[0][1]._actions if set(each.option_strings) & set(COMMON)]
    return "".join(
        (HEAD % contents([name for name, _ in found]), rows(common), DURATIONS, *(section(*each) for each in found))
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
