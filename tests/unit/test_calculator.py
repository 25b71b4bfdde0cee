"""The calculator: what Python's own numbers give, within bounds, and nothing but arithmetic."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.tools import CalculatorTool, ToolResult
from agent_runtime_core.tools.calculator import calculate
from tests.support.cases import for_each


async def run(**arguments: Any) -> ToolResult:
    return await CalculatorTool().execute(**arguments)


@pytest.mark.sentence("003", "`CalculatorTool` performs arithmetic operations with error handling")
@pytest.mark.parametrize(
    ("operation", "a", "b", "output"),
    [
        ("add", 2, 3, 5),
        ("add", 0.1, 0.2, 0.3),
        ("add", 1, 0.5, 1.5),
        ("subtract", 2, 5, -3),
        ("subtract", 1.5, 0.5, 1.0),
        ("multiply", 6, -7, -42),
        ("multiply", 10**20, 10**20, 10**40),
        ("divide", 100, 4, 25),
        ("divide", 7, 2, 3.5),
        ("divide", 6.0, 2, 3.0),
        ("divide", 1, 3, 1 / 3),
    ],
)
async def test_an_operation(operation: str, a: Any, b: Any, output: Any) -> None:
    result = await run(operation=operation, a=a, b=b)
    assert result == ToolResult(True, output)
    assert type(result.output) is type(output)


@for_each(
    ("text", "value"),
    [
        ("(3+4)*2", 14),
        ("2 + 3 * 4", 14),
        ("-2 ** 2", -4),
        ("2 ** -1", 0.5),
        ("2 ** 3 ** 2", 512),
        ("--3", 3),
        ("- -3 - +2", 1),
        ("7 // 2 * 2 + 7 % 2", 7),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("7 % -3", -2),
        ("-7.5 // 2", -4.0),
        ("-7.5 % 2", 0.5),
        ("10 / 4", 2.5),
        ("10 / 5", 2),
        ("0.1 + 0.2", 0.3),
        ("1.0 + 2", 3.0),
        (".5 + 5.", 5.5),
        ("1e3", 1000.0),
        ("2 ** 0.5", math.sqrt(2)),
        ("0 ** 0", 1),
        ("9" * 300, int("9" * 300)),
        (" \t\n1\r\n", 1),
    ],
)
async def test_an_expression(text: str, value: Any) -> None:
    result = await run(expression=text)
    assert result == ToolResult(True, value)
    assert type(result.output) is type(value)


class Oracle:
    """Expressions with the value that Python's int and Decimal give them."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.context = decimal.Context(prec=50)

    def made(self, depth: int) -> tuple[str, Any]:
        chance = self.chance
        if depth == 0 or chance.random() < 0.2:
            if chance.random() < 0.5:
                whole = chance.randint(0, 10 ** chance.randint(0, 6))
                return str(whole), whole
            text = f"{chance.randint(0, 999)}.{chance.randint(0, 99):02d}"
            return text, Decimal(text)
        if chance.random() < 0.15:
            text, value = self.made(depth - 1)
            return f"-({text})", -value if isinstance(value, int) else self.context.minus(value)
        (left, a), (right, b) = self.made(depth - 1), self.made(depth - 1)
        sign = chance.choice(["+", "-", "*", "/", "//", "%", "**"])
        if sign == "**":
            right, b = str(chance.randint(0, 4)), None
            return f"({left}){sign}{right}", self.power(a, int(right))
        if sign in ("/", "//", "%") and not b:
            return f"({left})+({right})", self.apply("+", a, b)
        return f"({left}){chance.choice(['', ' '])}{sign}({right})", self.apply(sign, a, b)

    def power(self, a: Any, exponent: int) -> Any:
        return a**exponent if isinstance(a, int) else self.context.power(a, exponent)

    def apply(self, sign: str, a: Any, b: Any) -> Any:
        context = self.context
        if isinstance(a, int) and isinstance(b, int):
            whole = {"+": a + b, "-": a - b, "*": a * b}
            if sign in whole:
                return whole[sign]
            if sign == "//":
                return a // b
            if sign == "%":
                return a % b
            return a // b if a % b == 0 else context.divide(a, b)
        match sign:
            case "+":
                return context.add(a, b)
            case "-":
                return context.subtract(a, b)
            case "*":
                return context.multiply(a, b)
            case "/":
                return context.divide(a, b)
        rest = context.remainder(a, b)
        rest = context.add(rest, b) if rest and (rest < 0) != (b < 0) else rest
        return rest if sign == "%" else context.divide(context.subtract(a, rest), b).to_integral_value()


def test_a_thousand_expressions_come_to_what_python_says() -> None:
    oracle, right = Oracle(11), 0
    while right < 1000:
        try:
            text, value = oracle.made(3)
        except decimal.InvalidOperation:  # 0 ** 0, or a remainder of numbers that are too far apart
            continue
        if len(text) > 1000 or abs(value) > Decimal(10) ** 290:
            continue
        found = calculate(text)
        assert found == (value if isinstance(value, int) else float(value)), text
        assert isinstance(found, int) is isinstance(value, int), text
        right += 1


def test_floats_of_simple_expressions_are_pythons() -> None:
    chance = Random(3)
    for _ in range(1000):
        a, b = chance.uniform(-1e6, 1e6), chance.uniform(0.5, 1e3)
        for sign, value in (("+", a + b), ("-", a - b), ("*", a * b), ("/", a / b), ("//", a // b), ("%", a % b)):
            assert math.isclose(calculate(f"({a!r}) {sign} {b!r}"), value, rel_tol=1e-9, abs_tol=1e-9)


HOSTILE = [
    "9**9**9", "9**9**9**9", "2**1001", "10**300", "(" * 10_000 + "1" + ")" * 10_000, "(" * 60 + "1" + ")" * 60,
    "-" * 900 + "1", "2**" * 300 + "1", "9" * 301, "1" + "0" * 5000, "1e999999999", "1e400", "99999e299*99999e299",
    "0.5**-1e9", "(-8)**0.5", "x", "__import__('os')", "a.b", "1 .real", "(1).real", "[1]", "{1}", "lambda: 1",
    "1 if 1 else 2", "1,2", "1_000", "0x10", "1j", "True", "None", "inf", "nan", "1 == 1", "1 < 2", "~1", "1 & 1",
    "1 << 99", "!1", "5!",
    "\u0663+\u0661", "\uff13+\uff11", "\U0001d7d0", "2\u00b2", "1\u00a0+1", "1/0", "1//0", "1%0", "0**-1", "1.0/0.0",
    "5 5", "1 +", "* 2", "()", "(1", "1)", "1..2", "1.2.3", "e5", "1e", "1\x00", "\x00", "=1+1", "'1'", '"1"', "1;2",
    "1\\2", "@1", "$1", "", "   ",
]  # fmt: skip


@for_each("text", HOSTILE, ids=lambda text: ascii(text[:20]))
async def test_what_is_no_arithmetic_or_too_much_is_refused_at_once(text: str) -> None:
    result = await run(expression=text)
    assert result.success is False
    assert result.output is None
    assert result.error
    assert len(result.error) < 200


def test_random_characters_never_do_more_than_fail() -> None:
    chance = Random(8)
    for _ in range(3000):
        text = "".join(chance.choices("0123456789.+-*/%() eE_xj\u0663[]'", k=chance.randint(1, 30)))
        try:
            value = calculate(text)
        except InvalidArgument:
            continue
        assert isinstance(value, (int, float))
        assert math.isfinite(value)


@pytest.mark.sentence("003", "`CalculatorTool` performs arithmetic operations with error handling")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "operation must be one of add, subtract, multiply, divide, got None"),
        ({"operation": "power", "a": 1, "b": 2}, "got 'power'"),
        ({"operation": ["add"], "a": 1, "b": 2}, "got ['add']"),
        ({"operation": "add", "a": 1}, "add must have both numbers, got a=1, b=None."),
        ({"operation": "add", "a": "1", "b": 2}, "a number must be an int, a float or a Decimal, got '1'."),
        ({"operation": "add", "a": True, "b": 2}, "got True."),
        ({"operation": "add", "a": math.nan, "b": 2}, "a number must be finite, got nan."),
        ({"operation": "add", "a": math.inf, "b": 2}, "a number must be finite, got inf."),
        ({"operation": "divide", "a": 1, "b": 0}, "division by zero"),
        ({"operation": "divide", "a": 1.5, "b": 0.0}, "division by zero"),
        ({"operation": "multiply", "a": 1e200, "b": 1e200}, "it has no value"),
        ({"operation": "multiply", "a": 10**200, "b": 10**200}, "must have at most 300 digits"),
        ({"expression": "1", "a": 1}, "must be either expression, or operation, a and b, got both"),
        ({"expression": 5}, "expression must be a string"),
    ],
)
async def test_a_call_that_does_not_fit_is_told(arguments: dict[str, Any], error: str) -> None:
    result = await run(**arguments)
    assert result.success is False
    assert error in (result.error or "")


@for_each(
    ("expression", "wanted"),
    [
        ("1e200 % 3.1", 0.2), ("1e200 // 3.1", 3.2258064516129033e199), ("1 % 1e-300", 0.0), ("1e300 % 7", 1.0),
        ("-1e200 % 3.1", 2.9), ("1e200 % -3.1", -2.9), ("-1e-300 % 3", 3.0), ("-1e-300 // 3", -1.0), ("7.5 % 2", 1.5),
        ("-7.5 % 2", 0.5), ("-7.5 // 2", -4.0), ("7.5 // -2", -4.0), ("1e-300 % 7", 1e-300), ("0.0 % 3", 0.0),
    ],
)  # fmt: skip
def test_remainders_of_numbers_that_are_far_apart(expression: str, wanted: float) -> None:
    assert calculate(expression) == wanted


def test_a_quotient_beyond_the_range_says_so() -> None:
    with pytest.raises(InvalidArgument, match="must be at most 1e300, got more"):
        calculate("1e200 // 1e-200")
