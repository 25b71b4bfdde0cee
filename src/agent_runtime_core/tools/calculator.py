"""A calculator for models and plans."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any, Final

from .._core.validation import Shown, must
from ..errors import InvalidArgument, brief
from .base import BaseTool, ToolResult
from .expression import Number, add, calculate, divide, multiply, number, plain, subtract

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
