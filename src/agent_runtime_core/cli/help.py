"""How the parser of the commands writes help and errors."""

from __future__ import annotations

import argparse
import re
import textwrap
from typing import Any, Final, NoReturn

from .._core.validation import redacted, unknown
from .output import escaped

#: The commands by what they are for, in the help.
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "run and develop": ("worker", "serve", "submit", "inspect", "check", "conformance"),
    "runs": ("runs", "show", "events", "export", "cancel", "resume", "fork"),
    "messages and answers": ("send", "signal", "approve"),
    "operate": ("workers", "pools", "schedule", "dead", "tenant", "vacuum", "erase", "doctor"),
    "store": (
        "migrate", "index", "backup", "restore", "mark-restored", "restored", "copy", "verify", "reencrypt",
        "carry-over",
    ),
    "help": ("help", "version", "completion"),
}  # fmt: skip

_EXAMPLE: Final = "  agent-runtime "

#: Text like `user:password@` without a scheme, because a mistyped argument may be the end of a URL.
_CREDENTIALS = re.compile(r"(?<![^\s='\"])[^\s='\":]*:(?!//)\S*(?=@)")


class Help(argparse.HelpFormatter):
    """Wraps the lines of a text at the width of the terminal, or at 80 columns without a terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_wrapped(line, width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    if not line.startswith(_EXAMPLE):
        indent = re.match(r"( +\d+ +)?", line)
        return textwrap.fill(line, width, subsequent_indent=" " * (indent.end() if indent else 0))
    # A command stays a command that can be pasted: no line ends inside quotes.
    whole = re.sub(r"'[^']*'|\"[^\"]*\"", lambda quoted: quoted[0].replace(" ", "\xa0"), line)
    lines = textwrap.wrap(whole, width - 2, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines).replace("\xa0", " ")


class Parser(argparse.ArgumentParser):
    """Reports invalid arguments in one line, with the name that was probably meant."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, escaped(f"{self.prog}: {_CREDENTIALS.sub('***', redacted(message))} (see {self.prog} --help)") + "\n"
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = map(str, action.choices)
            if isinstance(action, argparse._SubParsersAction):
                raise argparse.ArgumentError(None, unknown("command", redacted(str(value)), known))
            raise argparse.ArgumentError(action, unknown("value", redacted(str(value)), known))


def show_sections(top: Parser, commands: Any) -> None:
    """Show the commands in their sections, and not in one list."""
    shown = {each.dest: each for each in commands._choices_actions}
    options = top._action_groups.pop()
    top._action_groups.clear()
    for title, names in SECTIONS.items():
        top.add_argument_group(title)._group_actions += [shown[name] for name in names]
    top._action_groups.append(options)
