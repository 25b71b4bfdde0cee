"""The ids of runs, steps and claims: ULIDs as strings, and UUIDs, to which a caller's own strings are mapped."""

from __future__ import annotations

import hashlib
import os
import re
from functools import lru_cache
from typing import Final, NamedTuple
from uuid import UUID, uuid5

from .clock import SYSTEM, Clock
from .validation import Shown, must

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = tuple(high + low for high in _ALPHABET for low in _ALPHABET)
_TO_DIGITS: Final = str.maketrans(_ALPHABET + _ALPHABET.lower(), "0123456789abcdefghijklmnopqrstuv" * 2)
_ULID: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}")
_CANONICAL: Final = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
# Control characters and lone surrogates: stores cut text at a NUL, and cannot encode the surrogates.
_UNSTORABLE: Final = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")
HALF: Final = re.compile("[\ud800-\udfff]")  # a lone surrogate, which no store and no server accepts
ULID_RANDOM_LENGTH: Final = 16  # characters of a ULID after its time
_MAX_KEY: Final = 512
_MAX_NAME: Final = 255  # characters of a file's name: 255 bytes, or of Windows 255 units of 16 bits
_MAX_MS: Final = 2**48 - 1

# Every stored run depends on these: with other values it would not be found.
_RUN_KEYS: Final = UUID("5f0a3c1e-7d44-5b7e-9a53-2c1f0b6e8d91")
_CHILDREN: Final = UUID("c8b1d6f2-03e9-5a4c-8f27-6d5e91a0b374")


def ulid_text(bits: int) -> str:
    """Return a number below 2**128 as 26 characters of Crockford's base 32, which sort as the numbers do."""
    if not 0 <= bits < 1 << 128:
        raise must("the number of a ULID", "be from 0 to 2**128 - 1", bits)
    high, low, pairs = bits >> 60, bits & 0xFFFFFFFFFFFFFFF, _PAIRS
    return (
        pairs[high >> 60]
        + pairs[high >> 50 & 1023]
        + pairs[high >> 40 & 1023]
        + pairs[high >> 30 & 1023]
        + pairs[high >> 20 & 1023]
        + pairs[high >> 10 & 1023]
        + pairs[high & 1023]
        + pairs[low >> 50]
        + pairs[low >> 40 & 1023]
        + pairs[low >> 30 & 1023]
        + pairs[low >> 20 & 1023]
        + pairs[low >> 10 & 1023]
        + pairs[low & 1023]
    )


def parse_ulid(text: str) -> int:
    """Return the number of a ULID in upper or lower case, or raise InvalidArgument."""
    if _ULID.fullmatch(text) is None:
        raise must("a ULID", "have 26 characters of 0-9 and A-Z without I, L, O and U", text)
    return int(text.translate(_TO_DIGITS), 32)


def new_ulid(clock: Clock) -> str:
    """Return a ULID: 48 bits of milliseconds, then 80 random bits."""
    ms = min(max(int(clock.wall() * 1000), 0), _MAX_MS)
    return ulid_text(ms << 80 | clock.random.getrandbits(80))


def next_id(clock: Clock, now: float) -> str:
    """Return a new ULID for the wall time `now`.

    Up to 1,024 ULIDs of one millisecond share most of their random bits, because drawing them is the slowest part.
    """
    ms = int(now * 1000)
    found = next(clock.ids, None) if ms == clock.ids_ms else None
    if found is None:
        clock.ids_ms = ms
        ids = map(new_ulid(clock)[:-2].__add__, _PAIRS)
        found = next(ids)
        clock.ids = ids
    return found


@lru_cache(256)  # the id is the same in each event and trace of a step
def step_id(run_id: str, name: str, key: str) -> str:
    """Return the ULID of a step, the same on every attempt and in every process."""
    # The lengths distinguish ("a", "bc") from ("ab", "c").
    text = f"{len(run_id)}:{len(name)}:{run_id}{name}{key}".encode("utf-8", "surrogatepass")
    return ulid_text(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()))


#: What the run keys of schedules and of their runs begin with. Callers may not name a run so.
SCHEDULED = "schedule:"


def run_uuid(value: str | UUID | None, clock: Clock, tenant: str = "") -> tuple[UUID, str | None]:
    """Return the run id and the run key of a caller's run id.

    A UUID or its string is the run id, without a run key. Another string is the run key, and the run id is a UUIDv5 of
    the tenant and the run key. None makes a new UUIDv7.

    Raises:
        InvalidArgument: The string is empty, or contains more than 512 characters, control characters or lone
            surrogates.
    """
    if value is None:
        return _uuid7(clock), None
    if isinstance(value, UUID):
        return value, None
    if not isinstance(value, str):
        raise must("run_id", "be a UUID or a string", value, "Pass str(run_id)")
    if _CANONICAL.fullmatch(value) is not None:
        return UUID(value), None
    if not value:
        raise must("run_id", "not be empty", value, "Pass None for a new run id")
    run_key = storable("run_id", value)
    # Neither contains a control character, so that no other tenant and run key are this text.
    return uuid5(_RUN_KEYS, f"{tenant}\0{run_key}" if tenant else run_key), run_key


def is_uuid(value: object) -> bool:
    """Return whether a caller's run id is the run id itself, and not a run key."""
    return isinstance(value, UUID) or (isinstance(value, str) and _CANONICAL.fullmatch(value) is not None)


def stored_id(value: str | UUID, tenant: str = "") -> str:
    """Return the stored form of a caller's run id; see `run_uuid`. None is rejected."""
    if isinstance(value, str) and _CANONICAL.fullmatch(value) is not None:
        return value.lower()
    if value is None:
        raise must("run_id", "be a UUID or a string", None)
    return str(run_uuid(value, SYSTEM, tenant)[0])


def conversation_id(value: object) -> UUID | None:
    """Return the UUID of the conversation that a run names: for other text always the same UUID, None for ""."""
    if isinstance(value, UUID):
        return value
    if value is None or value == "":
        return None
    try:
        return UUID(str(value))
    except ValueError:
        text = f"conversation:{value}".encode("utf-8", "surrogatepass")
        return UUID(hashlib.blake2b(text, digest_size=16).hexdigest())


def conversation_name(value: object) -> str | None:
    """Return the text with which a run names its conversation; None for a UUID, nothing, or text no store can keep."""
    if not isinstance(value, str) or not value or HALF.search(value):
        return None
    try:
        UUID(value)
    except ValueError:
        return plain(value)
    return None


@lru_cache(1024)
def known_uuid(stored: str) -> UUID:
    """Return the UUID of a stored run id. Cached, because one run needs it several times."""
    return UUID(stored)


def path_text(value: object) -> str | None:
    """Return the string of a path that a file can have, or None.

    It contains no NUL, no name longer than file systems allow, and lone surrogates only if they encode bytes.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or max(map(len, text.split(os.sep))) > _MAX_NAME:
        return None
    try:
        return None if b"\0" in os.fsencode(text) else text
    except UnicodeEncodeError:
        return None


def unbroken(what: str, value: object) -> str:
    """Return a non-empty string of any length as a `str`, or raise InvalidArgument, which names it as `what`.

    A lone surrogate is rejected, because stores cannot keep it.
    """
    if isinstance(value, str) and value and (value.isascii() or HALF.search(value) is None):
        return value if type(value) is str else plain(value)
    if isinstance(value, str) and value:
        raise must(what, "not contain a lone surrogate", value, "Remove it: stores cannot keep it")
    raise must(what, "be a non-empty string", value)


def plain(value: str) -> str:
    """Return the `str` of an instance of a subclass of `str`, such as a member of a string Enum."""
    return value if type(value) is str else str.__str__(value)


def storable(what: str, value: str) -> str:
    """Return a string that every store can keep as a `str`, or raise InvalidArgument, which names it as `what`."""
    if len(value) > _MAX_KEY:
        raise must(what, f"have at most {_MAX_KEY} characters", Shown(f"{len(value)}"), "Pass a hash of the string")
    found = _UNSTORABLE.search(value)
    if found is not None:
        got = Shown(f"{found[0]!a} at position {found.start()} of {_shown(value)}")
        raise must(what, "not contain control characters or lone surrogates", got, "Remove them")
    return plain(value)


def _uuid7(clock: Clock) -> UUID:
    """Return a UUID of version 7 (RFC 9562): ids sort in the order in which they are made, even in a store."""
    ms = min(max(int(clock.wall() * 1000), 0), _MAX_MS)
    # 48 bits of time and 74 random bits; within a millisecond the last id plus a random number.
    bits = ms << 74 | clock.random.getrandbits(74)
    if bits >> 74 <= clock.last_id >> 74:
        bits = clock.last_id + 1 + clock.random.getrandbits(32)
    clock.last_id = bits
    return UUID(int=_laid_out(bits))


def _laid_out(bits: int) -> int:
    """Insert version and variant: 48 bits of time, the version, 12 bits, the variant, 62 bits."""
    return bits >> 74 << 80 | 7 << 76 | (bits >> 62 & 0xFFF) << 64 | 0b10 << 62 | bits & (1 << 62) - 1


def child_run_id(step_id_text: str) -> UUID:
    """Return the id of the child run that a step starts, the same on every attempt."""
    return uuid5(_CHILDREN, step_id_text)


def trace_id(run_id: UUID) -> str:
    return run_id.hex


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


def above(ticket: str, last: str) -> str:
    """Return `ticket` if it is greater than `last`, else its random bits in the millisecond after `last`."""
    if ticket > last:
        return ticket
    return ulid_text((parse_ulid(last) >> 80) + 1 << 80 | parse_ulid(ticket) & (1 << 80) - 1)


_FORM = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TraceParent(NamedTuple):
    """A span, as the parent of others.

    Attributes:
        trace_id: 128 bits.
        span_id: 64 bits.
        sampled: Whether the spans of this trace are sent.
    """

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def text(self) -> str:
        """The value of a `traceparent` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"


def parsed(text: object) -> TraceParent | None:
    """Return the span that a `traceparent` names; None if the text is none."""
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    parent = TraceParent(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & 1))
    return parent if parent.trace_id and parent.span_id else None


def checked(text: object) -> str:
    """Return a `traceparent`.

    Raises:
        InvalidArgument: The text is none.
    """
    if parsed(text) is None:
        raise must("traceparent", "be a W3C traceparent", text, f"Example: {TraceParent(1, 1).text}")
    return str(text)


def span_id(*parts: str) -> int:
    """Return the id of a span: the same id for the same parts."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big") or 1


class RunTrace(NamedTuple):
    """The place of one execution of a run in its trace.

    Ids are derived from numbers that the execution after a crash knows too, since it reports the crashed execution.

    Attributes:
        run_id: The run.
        generation: The generation of the run.
        failures: How many attempts of the run have failed before.
        crashes: How many have crashed before.
        resumes: How often the present attempt was parked and resumed before.
        parent: The span that the run was submitted in.
    """

    run_id: str
    generation: int = 1
    failures: int = 0
    crashes: int = 0
    resumes: int = 0
    parent: TraceParent | None = None

    @property
    def trace_id(self) -> int:
        return int(self.run_id.replace("-", ""), 16) if self.parent is None else self.parent.trace_id

    @property
    def execution(self) -> TraceParent:
        """The span of the execution."""
        return self._span(span_id(self.run_id, f"{self.generation}.{self.failures}.{self.crashes}.{self.resumes}"))

    def step(self, step_id: str, attempt: int) -> TraceParent:
        """Return the span of an attempt of a step.

        A crash does not change its id, so what the interrupted attempt sent keeps its parent: the attempt that
        repeats it. A failed attempt of the run changes it, since the repeated step is another span.
        """
        return self._span(span_id(step_id, f"{self.generation}.{self.failures}.{attempt}"))

    def _span(self, number: int) -> TraceParent:
        return TraceParent(self.trace_id, number, self.parent is None or self.parent.sampled)
