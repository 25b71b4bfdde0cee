"""`agent-runtime help` and `version`, and `completion`: a script that completes commands and options in a shell.

The script is static. It is made from the parser, and does not start Python when the user presses the Tab key.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from typing import Final, NamedTuple

from .._core.lazy_import import load
from .._core.validation import unknown
from ..errors import InvalidArgument
from .output import print_json, print_text, report
from .parser import parser

_LISTED: Final = "List the commands with: agent-runtime help"


class Words(NamedTuple):
    """What can follow a command: commands or values, options, and the values of options."""

    path: tuple[str, ...]  # the command, such as ("dead", "list")
    words: dict[str, str]  # commands or values of the first argument, with their help
    options: dict[str, str]  # with their help
    flags: list[str]  # options without a value
    values: dict[str, list[str]]  # values by option


async def show_help(args: Namespace) -> int:
    """Print the help of a command, or of all."""
    shown: argparse.ArgumentParser = parser()
    for word in args.words:
        below = [each.choices for each in shown._actions if isinstance(each, argparse._SubParsersAction)]
        if not below or word not in below[0]:
            raise InvalidArgument(unknown("command", word, below[0] if below else (), _LISTED))
        shown = below[0][word]
    if args.json:
        print_json({"command": " ".join(args.words), "help": shown.format_help()})
    else:
        print_text(shown.format_help())
    return 0


async def version(args: Namespace) -> int:
    found = load("agent_runtime_core:__version__")
    return report(args, {"version": found}, f"agent-runtime {found}")


async def completion(args: Namespace) -> int:
    script = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell]()
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print_text(script)
    return 0


def commands_of(command: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Words]:
    """Yield the words of a parser and of all its commands."""
    words: dict[str, str] = {}
    options: dict[str, str] = {}
    flags: list[str] = []
    values: dict[str, list[str]] = {}
    below: list[Words] = []
    for action in command._actions:
        text = _one_line(action.help)
        if isinstance(action, argparse._SubParsersAction):
            words |= {each.dest: _one_line(each.help) for each in action._choices_actions}
            for name, each in action.choices.items():
                below += commands_of(each, (*path, name))
        elif not action.option_strings:
            words |= dict.fromkeys(map(str, action.choices or ()), text)
        else:
            options |= dict.fromkeys(action.option_strings, text)
            if action.nargs == 0:
                flags += action.option_strings
            elif action.choices:
                values |= {name: list(map(str, action.choices)) for name in action.option_strings}
    yield Words(path, words, options, flags, values)
    yield from below


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _quoted(text: str) -> str:
    """Return the text as one word of bash, zsh or fish, whatever is in it."""
    return "'" + text.replace("\\", "").replace("'", "").replace(":", " -") + "'"


def bash() -> str:
    """Return the script for bash 3.2 or later."""
    found = list(commands_of(parser()))
    groups = " ".join(each.path[0] for each in found if len(each.path) == 1 and each.words and _is_group(each, found))
    lines = [
        "# bash completion for agent-runtime, written by: agent-runtime completion bash",
        "_agent_runtime() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} path= each i",
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        "        each=${COMP_WORDS[i]}",
        "        [[ $each == -* ]] && continue",
        f'        [[ -z $path || " {groups} " == *" $path "* ]] && path="${{path:+$path }}$each"',
        "    done",
        "    local words= options=",
        "    case $path in",
    ]
    values: list[str] = []
    for each in found:
        name = " ".join(each.path)
        lines.append(f"    {_quoted(name)}) words={_quoted(' '.join(each.words))}")
        lines.append(f"        options={_quoted(' '.join(each.options))} ;;")
        values += [
            f"    {_quoted(f'{name} {option}')}) words={_quoted(' '.join(given))} options= ;;"
            for option, given in each.values.items()
        ]
        values += [f"    {_quoted(f'{name} {option}')}) words= options= ;;"
                   for option in each.options if option not in each.values and option not in each.flags]  # fmt: skip
    lines += ["    esac", '    case "$path $before" in', *values, "    esac"]
    lines += [
        "    if [[ $word == -* ]]; then words=$options; fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _agent_runtime agent-runtime",
    ]
    return "\n".join(lines)


def _is_group(command: Words, found: list[Words]) -> bool:
    return any(len(each.path) > len(command.path) and each.path[: len(command.path)] == command.path for each in found)


def zsh() -> str:
    """Return the script for zsh, which describes each command and option."""
    found = list(commands_of(parser()))
    groups = "|".join(" ".join(each.path) for each in found if each.path and _is_group(each, found))
    lines = [
        "#compdef agent-runtime",
        "# zsh completion for agent-runtime, written by: agent-runtime completion zsh",
        "_agent_runtime() {",
        "    local before=${words[CURRENT-1]} path_=",
        "    local -a entries options",
        "    local each",
        "    for each in ${words[2,CURRENT-1]}; do",
        f"        case $path_ in (''|{_quoted(groups) if groups else ''}) [[ $each != -* ]] && "
        'path_="${path_:+$path_ }$each" ;; esac',
        "    done",
        "    case $path_ in",
    ]
    values: list[str] = []
    for each in found:
        name = " ".join(each.path)
        entries = " ".join(_quoted_pair(word, text) for word, text in each.words.items())
        options = " ".join(_quoted_pair(word, text) for word, text in each.options.items())
        lines.append(f"    ({_quoted(name)}) entries=({entries}) options=({options}) ;;")
        values += [
            f"    ({_quoted(f'{name} {option}')}) compadd -- {' '.join(given)}; return ;;"
            for option, given in each.values.items()
        ]
        values += [f"    ({_quoted(f'{name} {option}')}) _files; return ;;"
                   for option in each.options if option not in each.values and option not in each.flags]  # fmt: skip
    lines += ["    esac", '    case "$path_ $before" in', *values, "    esac"]
    lines += [
        "    if [[ $PREFIX == -* ]]; then _describe option options",
        "    elif (( $#entries )); then _describe command entries",
        "    else _files; fi",
        "}",
        'if [[ $funcstack[1] == _agent-runtime ]]; then _agent_runtime "$@"',
        "else compdef _agent_runtime agent-runtime; fi",
    ]
    return "\n".join(lines)


def _quoted_pair(word: str, text: str) -> str:
    return f"'{word}:{_quoted(text)[1:-1]}'"


def fish() -> str:
    """Return the script for fish, which describes each command and option."""
    found = list(commands_of(parser()))
    lines = [
        "# fish completion for agent-runtime, written by: agent-runtime completion fish",
        "function __agent_runtime_path",
        "    set -l path",
        "    for each in (commandline -opc)[2..-1]",
        "        string match -q -- '-*' $each; or set -a path $each",
        "    end",
        "    string join ' ' -- $path",
        "end",
        "function __agent_runtime_at",
        "    set -l path (__agent_runtime_path)",
        '    test "$path" = "$argv"',
        "end",
        "function __agent_runtime_in",
        '    set -l path " "(__agent_runtime_path)" "',
        "    string match -q -- \" $argv \"'*' $path",
        "end",
        "complete -c agent-runtime -f",
    ]
    for each in found:
        name = " ".join(each.path)
        condition = f"-n '{f'__agent_runtime_at {name}'.rstrip()}'"
        lines += [
            f"complete -c agent-runtime {condition} -a {word} -d {_quoted(text)}" for word, text in each.words.items()
        ]
        for option, text in each.options.items():
            kind = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            given = each.values.get(option)
            value = "" if option in each.flags else f" -x -a {_quoted(' '.join(given))}" if given else " -r -F"
            where = f"-n '__agent_runtime_in {name}'" if each.path else condition
            lines.append(f"complete -c agent-runtime {where} {kind}{value} -d {_quoted(text)}")
    return "\n".join(lines)
