"""The parameters of a function, from its signature and docstring: their JSON Schema, and how arguments are bound."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .._core.codec.type_hints import unresolved
from .._core.codec.typed import is_union
from .._core.json_schema import hoisted
from .._core.validation import Shown, must
from ..errors import InvalidArgument, brief
from .annotations import FieldDefault, field_default, keywords_of, schema_of, typed, with_default

__all__ = ["read_docstring"]

_PARAMETERS: Final = frozenset(
    [
        "args",
        "arguments",
        "params",
        "parameters",
        "keyword_args",
        "keyword_arguments",
        "kwargs",
        "other_parameters",
        "other_params",
        "other_args",
        "other_arguments",
    ]
)
_OTHERS: Final = frozenset(
    [
        "return",
        "returns",
        "yield",
        "yields",
        "receive",
        "receives",
        "raise",
        "raises",
        "except",
        "exceptions",
        "warns",
        "example",
        "examples",
        "note",
        "notes",
        "warning",
        "warnings",
        "see_also",
        "references",
        "attributes",
        "todo",
        "tip",
        "hint",
        "important",
        "caution",
        "danger",
        "attention",
        "error",
        "methods",
        "usage",
    ]
)
_PROSE: Final = frozenset(["example", "examples", "note", "notes", "see_also", "references", "warning", "warnings"])
#: Sections for the reader of the description, such as "Note: never call it twice." They are part of it.
_KEPT: Final = frozenset(
    "note notes warning warnings important caution danger attention tip hint usage".split()  # noqa: SIM905
)
_BULLETS: Final = ("- ", "* ", "+ ")
_SECTIONS: Final = _PARAMETERS | _OTHERS
_HEADING: Final = re.compile(r"([A-Za-z]+(?: [A-Za-z]+)?):[ \t]*$")
_UNDERLINE: Final = re.compile(r"(-{3,}|={3,})[ \t]*$")
_NAME: Final = r"[\\*`]{0,4}\w+[*`]{0,3}"
_NAMES: Final = rf"{_NAME}(?:[ \t]*,[ \t]*{_NAME})*"
# The parentheses contain the type, such as (tuple(int, str), optional).
_ENTRY: Final = re.compile(rf"({_NAMES})[ \t]*(?:\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))?[ \t]*:(?:[ \t]+(.*)|$)")
_NUMPY_ENTRY: Final = re.compile(rf"({_NAMES})[ \t]*(?::.*)?$")
_FIELD_ENTRY: Final = re.compile(
    r"[:@](param|parameter|arg|argument|key|keyword|kwarg|type|return|returns|rtype|raise|raises|except|exception|"
    r"yield|yields|ytype|var|ivar|cvar|vartype|meta)\b([^:]*):(?:[ \t]+(.*)|$)"
)
_FIELD_NAMES: Final = frozenset(["param", "parameter", "arg", "argument", "key", "keyword", "kwarg"])


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and the descriptions of its parameters by name.

    Sections and fields are left out of the description; unindented text after them is part of it, and so are notes and
    warnings. The styles of Google, NumPy, Sphinx and Epytext are understood.

    Args:
        text: The docstring without common indentation, as `inspect.getdoc` returns it.
    """
    reader = _Reader()
    lines = text.splitlines() or [""]
    skip = False
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if skip:  # the underline of a heading
            skip = False
        elif _UNDERLINE.match(following) and _section_name(line) in _SECTIONS:
            reader.start(_section_name(line), numpy=True)
            skip = True
        else:
            reader.line(line)
    return reader.result()


class _Reader:
    """Reads a docstring line by line."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._found: dict[str, list[str]] = {}
        self._section = ""  # the section or field of the current line; empty in the description
        self._numpy = False
        self._margin: int | None = None  # indentation of the entries of a section
        self._after_blank = False
        self._current: list[str] = []  # the parameters that the current line describes
        self._bullets = False  # whether the entries of the section are a list in Markdown

    def start(self, section: str, *, numpy: bool = False, margin: int | None = None) -> None:
        """Start a section or a field."""
        self._section, self._numpy, self._margin = section, numpy, margin
        self._after_blank, self._current = False, []
        if section in _KEPT:
            self._text += ["", f"{section.capitalize()}:"]

    def line(self, line: str) -> None:
        """Read one line."""
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        heading = _HEADING.match(line)
        if heading and _key(heading[1]) in _SECTIONS:
            self.start(_key(heading[1]))
        elif field := _FIELD_ENTRY.match(line):
            self.start("field", margin=1)
            if field[1] in _FIELD_NAMES and field[2].split():
                self._describe(field[2].split()[-1], field[3] or "")
        elif not self._section:
            self._text.append(line)
        elif not text:
            self._after_blank = True
            if self._section in _KEPT:
                self._text.append("")
        elif depth == 0 and self._left(text):
            self.start("")
            self._text += ["", line]
        elif self._section in _KEPT:
            self._margin = depth if self._margin is None else self._margin
            self._text.append(line)
        else:
            self._inside(text, depth)

    def result(self) -> tuple[str, dict[str, str]]:
        """Return the descriptions of the function and of its parameters."""
        text = re.sub(r"\n(?:[ \t]*\n){2,}", "\n\n", "\n".join(self._text)).strip()
        joined = {name: " ".join(filter(None, parts)) for name, parts in self._found.items()}
        return text, {name: description for name, description in joined.items() if description}

    def _left(self, text: str) -> bool:
        """Return whether an unindented line comes after the section."""
        if self._numpy:
            if self._section in _PROSE:  # until the next heading
                return False
            return self._after_blank and not _NUMPY_ENTRY.match(text)
        # Some authors do not indent the entries of a section. Those end at the first blank line.
        return self._after_blank if self._margin in (None, 0) else True

    def _inside(self, text: str, depth: int) -> None:
        if self._margin is None:
            self._margin, self._bullets = depth, text.startswith(_BULLETS)
        if self._section in _PARAMETERS and depth <= self._margin:
            named = text[2:].lstrip() if self._bullets and text.startswith(_BULLETS) else text
            entry = (_NUMPY_ENTRY if self._numpy else _ENTRY).match(named)
            if entry:
                self._describe(entry[1], "" if self._numpy else entry[2] or "")
                return
        for name in self._current:
            self._found[name].append(text)

    def _describe(self, names: str, description: str) -> None:
        self._current = [name.strip().strip("\\*`") for name in names.split(",")]
        for name in self._current:
            self._found[name] = [description.strip()]


def _key(heading: str) -> str:
    return heading.lower().replace(" ", "_")


def _section_name(line: str) -> str:
    return _key(line.strip()) if line == line.lstrip() else ""


__all__ = ["Binder", "context_parameter", "describe", "parameters_of", "place_context", "unbound"]

_CONTEXT = "RunContext"
_BLOCKING = "SyncRunContext"
_CONTEXTS = frozenset({_CONTEXT, _BLOCKING})


def context_parameter(fn: Callable[..., Any]) -> str | None:
    """Return the name of the parameter annotated `RunContext` or `SyncRunContext`, or None."""
    return _context_in(_parameters(fn))


def place_context(fn: Callable[..., Any], ctx: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return `args` with `ctx` at the position of the parameter of `fn` that is annotated `RunContext`.

    If a plain function declares a parameter that is annotated `SyncRunContext`, it gets that form of the context.
    """
    parameters = _parameters(fn)
    name = _context_in(parameters)
    if name is None:
        return tuple(args)
    position = list(parameters).index(name)
    if position > len(args):
        constraint = f"have {position} argument{'s' * (position != 1)} before {brief(name)}"
        raise must(_name(fn), constraint, len(args))
    return (*args[:position], ctx if _is_async(fn) else _in_form(parameters[name][0], ctx), *args[position:])


def parameters_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON Schema of the parameters of `fn`.

    Parameters that functools.partial binds, and the parameter annotated `RunContext`, are left out.

    Raises:
        InvalidArgument: There is no JSON Schema for a parameter, or it cannot be passed by name.
    """
    descriptions = describe(unbound(fn))[1]
    bound = _bound(fn)
    properties: dict[str, Any] = {}
    required: list[str] = []
    others: Any = False
    for name, (parameter, hint) in _parameters(fn, strict=True).items():
        if hint is _CONTEXT or name in bound:
            continue
        where = f"parameter {name!r} of {_name(fn)}"
        if name == "self" and not properties and parameter.annotation is parameter.empty:
            got, fix = Shown("the function of a class"), "Pass it from an instance, as in Tool.from_function(shop.buy)"
            raise must(_name(fn), "be a method of an object", got, fix)
        if parameter.kind is parameter.VAR_KEYWORD:
            others = schema_of(hint, where) or True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            kind = "*args" if parameter.kind is parameter.VAR_POSITIONAL else "a positional-only parameter"
            raise must(where, "accept an argument by name", Shown(kind), "A model passes all arguments by name")
        properties[name], is_required = _property(parameter, hint, where, descriptions.get(name))
        if is_required:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": others}
    return hoisted(schema)


def _property(
    parameter: inspect.Parameter, hint: Any, where: str, description: str | None
) -> tuple[dict[str, Any], bool]:
    """Return the schema of one parameter, and whether it is required."""
    schema = schema_of(hint, where)
    default = parameter.default
    field = field_default(default)
    if field is not None:
        schema |= keywords_of([field.field], schema)
    if description is not None:
        schema["description"] = description
    if default is parameter.empty or (field is not None and field.required):
        return schema, True
    if field is not None and field.has_factory:
        return schema, False
    return with_default(schema, default if field is None else field.value()), False


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_JSON_TYPES = (str, int, float, bool, type(None), list, dict)
_SINGLE = (*_BY_NAME, inspect.Parameter.POSITIONAL_ONLY)


class Binder:
    """Binds the arguments of calls by a function's signature, which is read once."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.is_async: bool = _is_async(fn)
        self._signature = _signature(fn)
        self._parameters = _parameters(fn)
        self._context = _context_in(self._parameters)
        #: Parameters that a caller must not pass: the bound parameters and the context.
        self._reserved = {*_bound(fn), *filter(None, [self._context])}
        #: Parameters whose JSON values need no conversion, with their types.
        self._unconverted = {name: hint for name, (_, hint) in self._parameters.items() if hint in (str, int, bool)}
        hints = {parameter.kind: hint for parameter, hint in self._parameters.values()}
        self._extra_hint = hints.get(inspect.Parameter.VAR_KEYWORD, Any)
        parameters = [] if self._signature is None else self._signature.parameters.values()
        self._named = {each.name for each in parameters if each.kind in _BY_NAME}
        self._needed = {each.name for each in parameters if each.kind in _SINGLE and each.default is each.empty}
        #: Defaults that a JSON value may stand for, although they do not have the annotated type.
        self._defaults = {each.name: each.default for each in parameters if type(each.default) in _JSON_TYPES}
        self._fields: dict[str, FieldDefault] = {}
        for each in parameters:
            field = field_default(each.default)
            if field is not None:
                self._fields[each.name] = field
                if not field.required and not field.has_factory:
                    self._defaults[each.name] = field.value()

    def bind(self, arguments: Mapping[str, Any], ctx: Any = None) -> dict[str, Any]:
        """Return the keyword arguments for a call, converted to their types; InvalidArgument if they do not match."""
        if not self._reserved.isdisjoint(arguments):
            reserved = next(name for name in arguments if name in self._reserved)
            raise must(reserved, "not be an argument of the call", arguments[reserved], "Remove it: it is set already")
        if self._signature is None:
            return dict(arguments)
        context = self._context
        bound = dict(arguments)
        for name, value in arguments.items():
            if self._unconverted.get(name) is not type(value) and not self._is_default(name, value):
                bound[name] = typed(value, self._hint(name), name)
        for name, field in self._fields.items():
            if name not in bound:
                if field.required:
                    raise InvalidArgument(f"missing required argument {name!r}")
                bound[name] = field.value()
        if context is not None and ctx is not None:
            bound[context] = ctx if self.is_async else _in_form(self._parameters[context][0], ctx)
        elif context is not None and self._parameters[context][0].default is inspect.Parameter.empty:
            raise must(_name(self.fn), "be called with a RunContext", None, "Pass ctx=")
        if not self._needed <= bound.keys() <= self._named:
            try:
                self._signature.bind(**bound)
            except TypeError as error:
                raise InvalidArgument(
                    str(error).replace("missing a required argument: ", "missing required argument ")
                ) from None
        return bound

    def _is_default(self, name: str, value: Any) -> bool:
        return name in self._defaults and type(value) is type(self._defaults[name]) and value == self._defaults[name]

    def _hint(self, name: str) -> Any:
        known = self._parameters.get(name)
        return self._extra_hint if known is None else known[1]


def unbound(fn: Any) -> Any:
    """Return the function below functools.partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _bound(fn: Any) -> set[str]:
    """Return the names of the parameters that functools.partial binds, by name or by position."""
    names: set[str] = set()
    while fn is not None:
        if isinstance(fn, functools.partial):
            left, fn, keywords = _signature(fn), fn.func, fn.keywords
            whole = _signature(fn)
            names |= keywords.keys()
            if left is not None and whole is not None:
                names |= whole.parameters.keys() - left.parameters.keys()
        else:
            fn = getattr(fn, "__wrapped__", None)
    return names


def _is_async(handler: Any) -> bool:
    handler = unbound(handler)
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def describe(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the descriptions of a function and of its parameters, from its docstring."""
    return read_docstring(inspect.getdoc(fn) or "")


def _context_in(parameters: Mapping[str, tuple[inspect.Parameter, Any]]) -> str | None:
    return next((name for name, (_, hint) in parameters.items() if hint is _CONTEXT), None)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        # Some builtins have no signature.
        return None


def _parameters(fn: Callable[..., Any], *, strict: bool = False) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Return each parameter with its resolved hint: `_CONTEXT` for the context, Any without a hint.

    A hint that cannot be resolved raises InvalidArgument if `strict`; otherwise it is Any.
    """
    signature = _signature(fn)
    if signature is None:
        return {}
    hints: dict[str, Any] = {}
    unresolved: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if _is_context(parameter.annotation):
            # Not resolved, because it is often imported for type checkers only.
            hints[name] = _CONTEXT
        elif parameter.annotation is parameter.empty:
            hints[name] = Any
        else:
            unresolved[name] = parameter.annotation
    hints.update(_resolved(fn, unresolved, strict))
    return {name: (parameter, hints[name]) for name, parameter in signature.parameters.items()}


def _resolved(fn: Callable[..., Any], annotations: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    if not annotations:
        return {}
    holder = types.SimpleNamespace(__annotations__=dict(annotations))
    try:
        hints = typing.get_type_hints(holder, globalns=_globals(fn), include_extras=True)
    except NameError as error:
        if not strict:
            return dict.fromkeys(annotations, Any)
        raise unresolved(f"a type hint of {_name(fn)}", error) from error
    return {name: _CONTEXT if _is_context(hint) else hint for name, hint in hints.items()}


def _globals(fn: Any) -> dict[str, Any]:
    fn = inspect.unwrap(unbound(fn))
    if not hasattr(fn, "__globals__"):
        fn = getattr(fn, "__func__", None) or type(fn).__call__
    return getattr(fn, "__globals__", {})


def _in_form(parameter: inspect.Parameter, ctx: Any) -> Any:
    """Return the context in the form that the annotation of a parameter names."""
    return getattr(ctx, "blocking_form", ctx) if _BLOCKING in _names_in(parameter.annotation) else ctx


def _is_context(annotation: Any) -> bool:
    return not _CONTEXTS.isdisjoint(_names_in(annotation))


def _names_in(annotation: Any) -> list[str]:
    """Return the names of the classes in an annotation."""
    if isinstance(annotation, str):
        parts = annotation.strip("\"'").replace("Optional[", "").replace("]", "").split("|")
        return [part.strip().rpartition(".")[2] for part in parts]
    options = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    return [option if isinstance(option, str) else getattr(option, "__name__", "") for option in options]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__
