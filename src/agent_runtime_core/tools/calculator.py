"""A calculator for models and plans."""

from __future__ import annotations

import decimal
import math
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from .._core.validation import Shown, must
from ..errors import InvalidArgument, brief
from .base import BaseTool, ToolResult

__all__ = ["calculate", "number", "plain"]

Number = int | Decimal

MAX_LENGTH: Final = 1000  # characters of an expression
MAX_DEPTH: Final = 50  # of nested parentheses, signs and powers
MAX_DIGITS: Final = 300  # of an integer, and in an exponent's range; the largest float contains 309
MAX_POWER: Final = 1000

_CONTEXT: Final = decimal.Context(prec=50, Emin=-MAX_DIGITS, Emax=MAX_DIGITS, clamp=0)
#: Precise enough for quotient and remainder of any two numbers of `_CONTEXT`.
_EXACT: Final = decimal.Context(prec=4 * MAX_DIGITS, Emin=-4 * MAX_DIGITS, Emax=4 * MAX_DIGITS)
_LIMIT: Final = 10**MAX_DIGITS
_SMALLER: Final = "Use smaller numbers"
_TOKEN: Final = re.compile(
    r"(?<![ \t\r\n])[ \t\r\n]*+(?:((?:[0-9]++\.?[0-9]*+|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(\*\*|//|[-+*/%()]))"
)


def calculate(expression: str) -> int | float:
    """Return the value of an expression of + - * / // % ** and parentheses, with Python's precedence and rounding.

    A whole result of integers alone is an int of up to 300 digits. Everything else is calculated with decimals of 50
    digits and rounded to the nearest float: 0.1 + 0.2 is 0.3.

    Raises:
        InvalidArgument: It is not an expression, yields no value, or is too long, too deeply nested or too large.
    """
    if not isinstance(expression, str) or not expression.strip():
        raise must("expression", "be a string like '(3 + 4) * 2'", expression)
    if len(expression) > MAX_LENGTH:
        raise must("expression", f"have at most {MAX_LENGTH:,} characters", len(expression), "Split it into several")
    return plain(_Parser(expression).value())


def number(value: object) -> Number:
    """Return an int, float or Decimal as a number for these functions."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
        raise must("a number", "be an int, a float or a Decimal", value)
    if isinstance(value, int):
        return _bounded(value)
    made = Decimal(repr(value)) if isinstance(value, float) else value
    if not made.is_finite():
        raise must("a number", "be finite", value)
    return _CONTEXT.plus(made)


def plain(value: Number) -> int | float:
    """Return a result as a number that JSON can express."""
    if isinstance(value, int):
        return value
    found = float(value)
    if not math.isfinite(found):
        raise must("the result", f"fit a float (at most {sys.float_info.max:.1e})", Shown("more"), _SMALLER)
    return found


def _bounded(value: int) -> int:
    if abs(value) >= _LIMIT:
        raise _too_long()
    return value


def _too_long() -> InvalidArgument:
    return must("an integer", f"have at most {MAX_DIGITS} digits", Shown("more"), _SMALLER)


def add(a: Number, b: Number) -> Number:
    return _bounded(a + b) if isinstance(a, int) and isinstance(b, int) else _CONTEXT.add(a, b)


def subtract(a: Number, b: Number) -> Number:
    return _bounded(a - b) if isinstance(a, int) and isinstance(b, int) else _CONTEXT.subtract(a, b)


def multiply(a: Number, b: Number) -> Number:
    return _bounded(a * b) if isinstance(a, int) and isinstance(b, int) else _CONTEXT.multiply(a, b)


def divide(a: Number, b: Number) -> Number:
    _not_zero(b)
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return _CONTEXT.divide(a, b)


def floor_divide(a: Number, b: Number) -> Number:
    _not_zero(b)
    return a // b if isinstance(a, int) and isinstance(b, int) else _CONTEXT.plus(_floored(a, b)[0])


def modulo(a: Number, b: Number) -> Number:
    _not_zero(b)
    return a % b if isinstance(a, int) and isinstance(b, int) else _CONTEXT.plus(_floored(a, b)[1])


def _floored(a: Number, b: Number) -> tuple[Decimal, Decimal]:
    """Return quotient and remainder as Python does: rounded down, while decimals round towards zero."""
    quotient, rest = _EXACT.divmod(a, b)
    return (
        (_EXACT.subtract(quotient, Decimal(1)), _EXACT.add(rest, b))
        if rest and (rest < 0) != (b < 0)
        else (quotient, rest)
    )


def power(a: Number, b: Number) -> Number:
    if not -MAX_POWER <= b <= MAX_POWER:
        raise must("exponent", f"be from -{MAX_POWER} to {MAX_POWER}", Shown(b))
    if a == 0 and b < 0:
        raise must("division by zero: the base of a negative exponent", "be other than 0", 0)
    if isinstance(a, int) and isinstance(b, int) and b >= 0:
        if abs(a) > 1 and math.log10(abs(a)) * b > MAX_DIGITS + 1:
            raise _too_long()
        return _bounded(int(a**b))
    if a == 0 and b == 0:
        return Decimal(1)
    if a < 0 and b != int(b):
        raise must(f"the base of the exponent {b}", "be at least 0", Shown(a))
    return _CONTEXT.power(a, b)


def _not_zero(value: Number) -> None:
    if not value:
        raise must("division by zero: the divisor", "be other than 0", 0)


_SUMS: Final[dict[str, Callable[[Number, Number], Number]]] = {"+": add, "-": subtract}
_PRODUCTS: Final[dict[str, Callable[[Number, Number], Number]]] = {
    "*": multiply, "/": divide, "//": floor_divide, "%": modulo,
}  # fmt: skip


class _Parser:
    """Evaluates an expression while it reads it, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._depth = 0
        self._token = ""
        self._number: Number | None = None

    def value(self) -> Number:
        try:
            self._read()
            value = self._sum()
        except decimal.Overflow:
            raise must("a number", f"be at most 1e{MAX_DIGITS}", Shown("more"), _SMALLER) from None
        except decimal.DecimalException as error:
            raise must("expression", "have a value", Shown(type(error).__name__)) from None
        if self._token:
            raise self._syntax_error("an operator")
        return value

    def _read(self) -> None:
        """Read the next token; "" at the end."""
        rest = self._text[self._position :]
        if not rest.strip(" \t\r\n"):
            self._token, self._number = "", None
            return
        found = _TOKEN.match(self._text, self._position)
        if found is None:
            self._token = rest.lstrip(" \t\r\n")[0]
            raise self._syntax_error("a number, an operator or a bracket")
        digits, sign = found.groups()
        self._token, self._number = digits or sign, None if digits is None else _literal(digits)
        self._position = found.end()

    def _syntax_error(self, wanted: str) -> InvalidArgument:
        got = Shown(repr(self._token) if self._token else "its end")
        return must(f"expression {brief(self._text)}", f"have {wanted} at character {self._position + 1}", got)

    def _sum(self) -> Number:
        return self._left_associative(self._product, _SUMS)

    def _product(self) -> Number:
        return self._left_associative(self._signed, _PRODUCTS)

    def _left_associative(
        self, part: Callable[[], Number], signs: dict[str, Callable[[Number, Number], Number]]
    ) -> Number:
        value = part()
        while self._number is None and (apply := signs.get(self._token)) is not None:
            self._read()
            value = apply(value, part())
        return value

    def _signed(self) -> Number:
        """Evaluate a signed value. A sign binds less than the power to its right: -2 ** 2 is -4."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise must(
                "expression", f"be nested at most {MAX_DEPTH} levels deep", Shown("more"), "Split it into several"
            )
        if self._token in ("+", "-"):
            negative = self._token == "-"
            self._read()
            value = self._signed()
            value = subtract(0, value) if negative else value
        else:
            value = self._power()
        self._depth -= 1
        return value

    def _power(self) -> Number:
        base = self._atom()
        if self._token != "**":
            return base
        self._read()
        return power(base, self._signed())

    def _atom(self) -> Number:
        if self._number is not None:
            value = self._number
            self._read()
            return value
        if self._token != "(":
            raise self._syntax_error("a number or '('")
        self._read()
        value = self._sum()
        if self._token != ")":
            raise self._syntax_error("an operator or ')'")
        self._read()
        return value


def _literal(digits: str) -> Number:
    if len(digits) > MAX_DIGITS:
        raise must("a number", f"have at most {MAX_DIGITS} digits", len(digits))
    return int(digits) if digits.isdigit() else _CONTEXT.create_decimal(digits)


__all__ = ["CalculatorTool"]

_OPERATIONS: Final[dict[str, Callable[[Number, Number], Number]]] = {
    "add": add, "subtract": subtract, "multiply": multiply, "divide": divide,
}  # fmt: skip


class CalculatorTool(BaseTool):
    """Applies `operation` to `a` and `b`, or evaluates an `expression`; see `expression.calculate` for the limits.

    A calculation without a value, such as a division by zero, is a ToolResult without success.
    """

    def name(self) -> str:
        return "calculator"

    def description(self) -> str:
        return (
            "Arithmetic: add, subtract, multiply or divide the numbers a and b, or work out an expression "
            "with + - * / // % ** and parentheses. Give either operation, a and b, or expression."
        )

    def parameters(self) -> dict[str, Any]:
        about = {
            "operation": {"type": "string", "enum": [*_OPERATIONS], "description": "What to do with a and b."},
            "a": {"type": "number", "description": "The first number; the one that is subtracted from or divided."},
            "b": {"type": "number", "description": "The second number."},
            "expression": {"type": "string", "description": "An expression instead, as in (3 + 4) * 2."},
        }
        return {"type": "object", "properties": about, "required": [], "additionalProperties": False}

    async def execute(
        self,
        operation: str | None = None,
        a: int | float | None = None,
        b: int | float | None = None,
        expression: str | None = None,
    ) -> ToolResult:
        try:
            return ToolResult(True, _evaluate(operation, a, b, expression))
        except (InvalidArgument, decimal.DecimalException) as error:
            return ToolResult(False, None, str(error) if isinstance(error, InvalidArgument) else "it has no value")


def _evaluate(operation: Any, a: Any, b: Any, expression: Any) -> int | float:
    if expression is not None:
        if operation is not None or a is not None or b is not None:
            got = Shown("both")
            raise must("arguments", "be either expression, or operation, a and b", got, "Leave one of them out")
        return calculate(expression)
    known = _OPERATIONS.get(operation) if isinstance(operation, str) else None
    if known is None:
        raise must("operation", f"be one of {', '.join(_OPERATIONS)}", operation)
    if a is None or b is None:
        raise must(operation, "have both numbers", Shown(f"a={brief(a)}, b={brief(b)}"))
    return plain(known(number(a), number(b)))
