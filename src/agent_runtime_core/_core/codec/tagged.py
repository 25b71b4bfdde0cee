"""Types that JSON lacks, encoded as {"$": tag, "v": form}, and decoded."""

from __future__ import annotations

import binascii
import datetime as _dt
import functools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast
from uuid import UUID
from weakref import WeakKeyDictionary
from zoneinfo import ZoneInfo

from ...errors import UnserialisableResult
from ..lazy_import import load
from ..pydantic_types import is_pydantic
from ..validation import Path, descend, not_encodable, short, type_name, unsupported_type

# The tag of a registered type is its `module.qualname`, which contains a dot; the tags below contain none. A dict of
# the user that contains "$" is itself written with a tag.
TAG: Final = "$"
#: Tags of a registered model of pydantic, [name, form], and of the state of a model, [fields, extra, private, given].
#: A process without pydantic reads both as dicts.
FOREIGN: Final = "pydantic"
STATE: Final = "model"
#: Weight of a byte around a part or of a number; a byte of a string weighs 1. Many parts take long, a long string not.
PART: Final = 16
MAX_PARTS: Final = 1024 * 1024  # bytes around parts in a value of usual size
MAX_DIGITS: Final = 4300

#: Two adjacent surrogates, which JSON would decode as one character.
HALVES: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_BETWEEN: Final = re.compile("(?<=[\ud800-\udbff])(?=[\udc00-\udfff])")

_INT_END: Final = 10**MAX_DIGITS
_ABSENT: Final = object()
_C = TypeVar("_C", bound=type)

#: Types that are stored and decoded as plain dicts.
DICTS: Final[set[type]] = {dict, MappingProxyType}


def stored_as_dict(cls: _C) -> _C:
    """Class decorator for mappings of this library whose additions are not stored."""
    DICTS.add(cls)
    return cls


# (value, at, back): encode the type of a value as plain JSON, or with `back` decode it.
Turn = Callable[[Any, Path | None, bool], Any]

_ROOT: Final = __name__.partition(".")[0]
#: Modules that were moved. Their classes are stored under the old module, so that older versions read them as well.
_MOVED: Final = {
    "event_types": "_core.event_types",
    "events.base": "events.event",
    "persistence.branching": "persistence.message_tree",
    "planning.executing": "planning.executor",
    "tools.calls": "tools.invocation",
}
#: Locations of the models and Enums of this library, by tag. They need no annotation and no register_type.
OWN: Final = {
    f"{_ROOT}.{module}.{name}": f"{_ROOT}.{_MOVED.get(module, module)}:{name}"
    for module, names in {
        "event_types": "EventType",
        "events.base": "Event",
        "interfaces": "ErrorInfo LLMResponse LLMStreamChunk RunResult",
        "limits": "ModelLimits RunLimits SpendPool",
        "loop.state": "LoopResult TurnState",
        "orchestrator": "RunCreate RunResponse RunStatus",
        "persistence.branching": "Branch",
        "persistence.models": "AuditEntry AuditEventType Conversation ConversationMessage Embedding ErrorRecord "
        "ErrorSeverity Fact FactType PerformanceMetric Scope Summary Task TaskList TaskState ToolCall ToolResult",
        "planning.executing": "PlanResult",
        "planning.plan": "Plan PlanStep StepKind",
        "runner.settings": "RunInfo",
        "status": "RunStatus StepStatus",
        "steps.model": "ExecutionState StepResult",
        "tools.base": "ToolResult",
        "tools.calls": "ToolAnswer",
        "turns.turn": "StepMetrics StepState Turn",
    }.items()
    for name in names.split()
}
_OWN_TAGS: Final = {place.replace(":", "."): tag for tag, place in OWN.items()}
#: In the metadata of a field that cannot be stored: it is decoded as its default.
NOT_STORED: Final = object()


class ModelState(dict[str, Any]):
    """The stored state of a model of pydantic: a dict of its fields, for a process that does not have the model.

    Attributes:
        fields: The JSON form of each field.
        extra: The values of names that are no fields.
        private: The JSON form of each private attribute.
        given: The names of the fields that were set, in contrast to those with a default.
    """

    def __init__(
        self, fields: dict[str, Any], extra: dict[str, Any], private: dict[str, Any], given: list[str]
    ) -> None:
        super().__init__({**extra, **fields})
        self.fields, self.extra, self.private, self.given = fields, extra, private, given


class _Registry:
    """The types registered by register_type, and the types of OWN once they are used. REGISTRY is the only instance."""

    def __init__(self) -> None:
        #: Weak, because a notebook cell that runs again defines its classes again and again.
        self.names: WeakKeyDictionary[type, str] = WeakKeyDictionary()
        self.types: dict[str, type] = {}

    def tag_of(self, cls: type) -> str | None:
        if cls not in self.names:
            self._meet(_OWN_TAGS.get(f"{cls.__module__}.{cls.__qualname__}", ""))
        return self.names.get(cls)

    def type_of(self, tag: str) -> type | None:
        if tag not in self.types:
            self._meet(tag)
        return self.types.get(tag)

    def _meet(self, tag: str) -> None:
        if tag in OWN:
            self.add(cast("type", load(OWN[tag])))

    def add(self, cls: type) -> None:
        """Register a class; it replaces an earlier definition, as of a notebook cell that ran before or a reload."""
        name = f"{cls.__module__}.{cls.__qualname__}"
        name = _OWN_TAGS.get(name, name)
        self.names[cls], self.types[name] = name, cls


REGISTRY: Final = _Registry()


@functools.cache
def _codecs() -> Callable[[type], Any]:
    # Loaded late, because that module imports this module.
    return cast("Callable[[type], Any]", load(".typed:codec_of", package=__package__))


def size_budget(max_bytes: int) -> int:
    """Return the weight limit for a text of at most `max_bytes`.

    A text within `max_bytes` is only refused for its weight if more than MAX_PARTS bytes, and more than a PARTth of
    all bytes, are around parts.
    """
    return max(max_bytes, PART * min(max_bytes, MAX_PARTS))


#: Begins the reason of a value that is refused for its weight, not for its size.
MANY_PARTS: Final = "of too many parts"


def oversize(max_bytes: int, size: str) -> UnserialisableResult:
    """Return the error for a value of this size in bytes."""
    why = f"larger than {max_bytes:,} bytes as JSON: it has {size}. Store it elsewhere, and use its address"
    return UnserialisableResult("$", why, max_bytes=max_bytes)


def overweight(max_bytes: int, characters: int, around: int) -> UnserialisableResult:
    """Return the error for a value with at least so many characters in strings, and bytes around parts."""
    budget = size_budget(max_bytes)
    if characters + around > budget:  # so its parts are not the reason
        return oversize(max_bytes, f"at least {characters + around:,}")
    why = (
        f"{MANY_PARTS}: at least {around:,} bytes around parts and of numbers, which count {PART} times, and "
        f"{characters:,} characters, of {budget:,} in all. Make one string of it by json.dumps, or store it elsewhere, "
        "and use its address"
    )
    return UnserialisableResult("$", why, max_bytes=max_bytes)


def refused_for_weight(tree: object, max_bytes: int) -> UnserialisableResult:
    """Return the error for a tree of plain values whose weight exceeds `max_bytes`."""
    budget, characters, around = size_budget(max_bytes), 0, 0
    left = [tree]
    while left and characters + PART * around <= budget:
        value = left.pop()
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, dict):
            around += 5 * len(value)
            characters += sum(len(key) for key in value if isinstance(key, str))
            left += value.values()
        elif isinstance(value, list):
            around += 2 * len(value)
            left += value
    return overweight(max_bytes, characters, around)


class TagEncoder:
    """Encodes a value as a JSON tree in which the types that JSON lacks have tags, or raises UnserialisableResult.

    Unless `exact`, a string or number Enum is encoded as its value if it is unregistered or belongs to this library.
    """

    def __init__(self, max_bytes: int, text: Callable[[object], str], exact: bool) -> None:
        self.max_bytes = max_bytes
        self.exact = exact
        self.left = size_budget(max_bytes)
        self.characters = 0
        self.text = text

    def spend(self, size: int, weight: int = PART) -> None:
        # A lower bound, so that a value with many shared parts is refused early. `encode` measures the text itself.
        self.left -= size * weight
        if weight == 1:
            self.characters += size
        if self.left < 0:
            around = (size_budget(self.max_bytes) - self.left - self.characters) // PART
            raise overweight(self.max_bytes, self.characters, around)

    def of(self, value: Any, at: Path | None) -> object:
        kind = type(value)
        if kind is str:
            self.spend(len(value), 1)
            if not value.isascii() and HALVES.search(value) is not None:
                parts = _BETWEEN.split(value, self.left // PART + 1)  # no more than would be refused
                self.spend(len(parts))
                return {TAG: "text", "v": parts}
            return value
        if value is None or kind is bool:
            return value
        if kind is int:
            if not -_INT_END < value < _INT_END:
                raise not_encodable(at, f"an int of more than {MAX_DIGITS:,} digits. Use hex(value)")
            self.spend(max(value.bit_length() - 1, 0) * 3 // 10)
            return value
        if kind is float:
            if value - value != 0.0:
                raise not_encodable(at, f"{value!r} is not JSON-serializable. Use None or a string")
            return value
        if kind in DICTS:
            tree = self.of_dict(value, descend(at, value))
            return {TAG: "dict", "v": tree} if TAG in tree else tree
        if kind is list:
            return self.of_items(value, at)
        if kind in TAGGING:
            tag, form = TAGGING[kind]
            return {TAG: tag, "v": form(self, value, at)}
        return self.of_registered(value, at)

    def of_dict(self, value: Mapping[Any, Any], here: Path) -> dict[str, object]:
        self.spend(5 * len(value))
        tree: dict[str, object] = {}
        for key, item in value.items():
            if type(key) is not str and not self.exact:
                key = _bare(key)
            if type(key) is not str:
                reason = f"the key {short(key)} must be a str, got {type_name(type(key))}. Use str(key)"
                raise not_encodable(here.parent, reason)
            if not key.isascii() and HALVES.search(key) is not None:
                way = "Join them with key.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
                raise not_encodable(here.parent, f"the key {short(key)} contains two lone surrogates in a row. {way}")
            self.spend(len(key), 1)
            here.step = key
            tree[key] = self.of(item, here)
        return tree

    def of_items(self, value: Collection[Any], at: Path | None) -> list[object]:
        here = descend(at, value)
        self.spend(2 * len(value))
        tree = []
        for here.step, item in enumerate(value):
            tree.append(self.of(item, here))
        return tree

    def of_set(self, value: Any, at: Path | None) -> object:
        here = descend(at, value)
        self.spend(2 * len(value))
        # The order of a set changes with the hash seed; the order of the texts does not.
        return sorted([self.of(item, here) for item in value], key=self.text)

    def of_registered(self, value: Any, at: Path | None) -> object:
        tag = REGISTRY.tag_of(type(value))
        if not self.exact and (tag is None or tag in OWN) and (bare := _bare(value)) is not value:
            return self.of(bare, at)
        if tag is None:
            raise not_encodable(at, unsupported_type(value))
        plain = _codecs()(type(value)).convert(value, at, False)
        if is_pydantic(type(value)):
            return {TAG: FOREIGN, "v": [tag, self.of(plain, at)]}
        if type(plain) is dict:
            plain = self.of_dict(plain, descend(at, value))
        return {TAG: tag, "v": plain}

    def of_state(self, value: ModelState, at: Path | None) -> object:
        return [self.of(part, at) for part in (value.fields, value.extra, value.private, value.given)]

    def of_moment(self, value: Any, at: Path | None) -> object:
        # ISO text if that is complete, else [text, fold, zone], because ISO text contains no fold and no zone name.
        zone = value.tzinfo
        self.spend(8)
        if zone is None:
            return [value.isoformat(), 1, None] if value.fold else value.isoformat()
        bare = value.replace(tzinfo=None).isoformat()
        if type(zone) is ZoneInfo and zone.key is not None:
            return [bare, value.fold, zone.key]
        if type(zone) is not _dt.timezone:
            out = "Use zoneinfo.ZoneInfo(name), or value.astimezone(datetime.UTC)"
            raise not_encodable(at, f"a time zone that is {type_name(type(zone))} is not JSON-serializable. {out}")
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        # fromisoformat() reads an offset below one second as none.
        if not name and not value.fold and not offset.microseconds:
            return value.isoformat()
        return [bare, value.fold, [self.of_delta(offset, at), *(self.of(part, at) for part in name)]]

    def of_delta(self, value: Any, at: Path | None) -> list[int]:
        return [value.days, value.seconds, value.microseconds]

    def of_decimal(self, value: Any, at: Path | None) -> object:
        if not value.is_finite():
            raise not_encodable(at, f"{value!r} is not JSON-serializable. Use None or a string")
        return self.of_text(value, at)

    def of_bytes(self, value: Any, at: Path | None) -> object:
        self.spend(len(value) * 4 // 3, 1)
        return binascii.b2a_base64(value, newline=False).decode("ascii")

    def of_text(self, value: Any, at: Path | None) -> object:
        text = str(value)
        self.spend(len(text))
        return text


TAGGING: Final[dict[type, tuple[str, Callable[[TagEncoder, Any, Path | None], object]]]] = {
    UUID: ("uuid", TagEncoder.of_text),
    _dt.datetime: ("datetime", TagEncoder.of_moment),
    _dt.date: ("date", TagEncoder.of_text),
    _dt.time: ("time", TagEncoder.of_moment),
    _dt.timedelta: ("timedelta", TagEncoder.of_delta),
    Decimal: ("decimal", TagEncoder.of_decimal),
    bytes: ("bytes", TagEncoder.of_bytes),
    tuple: ("tuple", TagEncoder.of_items),
    set: ("set", TagEncoder.of_set),
    frozenset: ("frozenset", TagEncoder.of_set),
    ModelState: (STATE, TagEncoder.of_state),
}


def _bare(value: Any) -> Any:
    """Return the string or number of a member of a string or number Enum; any other value as it is."""
    if not isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else value


def untag(value: Any, at: Path | None) -> Any:
    """Decode the tags of a tree, in place if possible, and return it."""
    if type(value) is list:
        return _revived_inside(value, enumerate(value), at)
    if type(value) is not dict:
        return value
    tag = value.get(TAG, _ABSENT)
    if tag is _ABSENT:
        return _revived_inside(value, value.items(), at)
    if type(tag) is not str or len(value) != 2 or "v" not in value:
        raise not_encodable(at, f'the stored text was changed: "{TAG}" is not a tag. Restore a backup')
    form = value["v"]
    if tag == "dict" and type(form) is dict:
        return _revived_inside(form, form.items(), at)
    if tag == FOREIGN:
        return _revive_foreign(form, at)
    revive = REVIVE.get(tag)
    if revive is None and (cls := REGISTRY.type_of(tag)) is not None:
        return _codecs()(cls).convert(_revived_inside(form, form.items(), at) if type(form) is dict else form, at, True)
    if revive is None:
        raise _unregistered(tag, at)
    try:
        return revive(untag(form, at))
    except UnserialisableResult:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, OSError) as error:
        raise not_encodable(at, f"the stored {tag} cannot be read: {type(error).__name__}: {error}") from error


def _unregistered(tag: str, at: Path | None) -> UnserialisableResult:
    way = f"Call register_type({tag.rsplit('.', 1)[-1]}) before reading it"
    out = way if "." in tag else "A later version of agent-runtime-core wrote it: upgrade"
    return not_encodable(at, f"the type {short(tag)} is not registered in this process. {out}")


def _revive_foreign(form: Any, at: Path | None) -> object:
    tag, stored = form
    plain, cls = untag(stored, at), REGISTRY.type_of(tag)
    if cls is not None:
        return _codecs()(cls).convert(plain, at, True)
    if "pydantic" in sys.modules:
        raise _unregistered(tag, at)
    return plain


def _revived_inside(value: Any, items: Iterable[tuple[Any, Any]], at: Path | None) -> Any:
    here = Path(at, None)
    for here.step, item in items:
        if type(item) is dict or type(item) is list:
            value[here.step] = untag(item, here)
    return value


def _only(kind: type, form: Any) -> Any:
    if type(form) is not kind:
        raise TypeError(f"expected {type_name(kind)}, found {type_name(type(form))}")
    return form


def _revive_moment(kind: type[_dt.datetime] | type[_dt.time], form: Any) -> object:
    if type(form) is str:
        return kind.fromisoformat(form)
    text, fold, zone = _only(list, form)
    tzinfo: _dt.tzinfo | None = None
    if type(zone) is str:
        tzinfo = ZoneInfo(zone)
    elif zone is not None:
        offset, *name = _only(list, zone)
        tzinfo = _dt.timezone(_dt.timedelta(*offset), *name)
    return kind.fromisoformat(text).replace(tzinfo=tzinfo, fold=fold)


def _revive_decimal(form: Any) -> Decimal:
    number = Decimal(_only(str, form))
    if not number.is_finite():
        raise ValueError(f"{number} is not finite")
    return number


REVIVE: Final[dict[str, Callable[[Any], object]]] = {
    "text": lambda form: "".join(_only(list, form)),
    "uuid": lambda form: UUID(_only(str, form)),
    "datetime": functools.partial(_revive_moment, _dt.datetime),
    "date": lambda form: _dt.date.fromisoformat(_only(str, form)),
    "time": functools.partial(_revive_moment, _dt.time),
    "timedelta": lambda form: _dt.timedelta(*_only(list, form)),
    "decimal": _revive_decimal,
    "bytes": lambda form: binascii.a2b_base64(_only(str, form), strict_mode=True),
    "tuple": lambda form: tuple(_only(list, form)),
    "set": lambda form: set(_only(list, form)),
    "frozenset": lambda form: frozenset(_only(list, form)),
    STATE: lambda form: ModelState(*_only(list, form)),
}
