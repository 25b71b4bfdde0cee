"""Prompts whose plans are known: a table, and a seeded grammar that makes as many as one likes."""

from __future__ import annotations

from random import Random
from typing import Any

Input = dict[str, Any]
Wanted = list[tuple[str, Input]]

CALC, TODO = "calculator", "todo_store"


def op(operation: str, a: Any, b: Any) -> tuple[str, Input]:
    return CALC, {"operation": operation, "a": a, "b": b}


def expr(text: str) -> tuple[str, Input]:
    return CALC, {"expression": text}


def todo(action: str, **about: str) -> tuple[str, Input]:
    return TODO, {"action": action, **about}


def of(step: int) -> str:
    return f"{{{{step_{step}.result}}}}"


TABLE: list[tuple[str, Wanted]] = [
    ("add 2 and 3", [op("add", 2, 3)]),
    ("Add 2 and 3.", [op("add", 2, 3)]),
    ("ADD 2 AND 3!", [op("add", 2, 3)]),
    ("Please add 2 and 3, thanks!", [op("add", 2, 3)]),
    ("Can you add 2 to 3 for me?", [op("add", 2, 3)]),
    ("What is 2 + 3?", [op("add", 2, 3)]),
    ("what's 2 plus 3", [op("add", 2, 3)]),
    ("2+3", [op("add", 2, 3)]),
    ("the sum of 4 and 5", [op("add", 4, 5)]),
    ("add up 1, 2 and 3", [expr("1 + 2 + 3")]),
    ("subtract 5 from 20", [op("subtract", 20, 5)]),
    ("take 5 away from 20", [op("subtract", 20, 5)]),
    ("20 minus 5", [op("subtract", 20, 5)]),
    ("difference between 10 and 4", [op("subtract", 10, 4)]),
    ("multiply 3 by 4", [op("multiply", 3, 4)]),
    ("six times seven", [op("multiply", 6, 7)]),
    ("calculate 7 x 6", [op("multiply", 7, 6)]),
    ("7 × 6", [op("multiply", 7, 6)]),  # noqa: RUF001
    ("product of 6 and 7", [op("multiply", 6, 7)]),
    ("double 21", [op("multiply", 21, 2)]),
    ("divide 100 by 4", [op("divide", 100, 4)]),
    ("100 divided by 4", [op("divide", 100, 4)]),
    ("100 ÷ 4", [op("divide", 100, 4)]),
    ("divide 1 by 0", [op("divide", 1, 0)]),
    ("how much is (3+4)*2?", [expr("(3 + 4) * 2")]),
    ("12 / 5 - 3 * 2", [expr("12 / 5 - 3 * 2")]),
    ("2 to the power of 8", [expr("2 ** 8")]),
    ("what is 20% of 50", [expr("20 / 100 * 50")]),
    ("-5 + 3", [op("add", -5, 3)]),
    ("minus five plus three", [op("add", -5, 3)]),
    (".5 + 1", [op("add", 0.5, 1)]),
    ("please .5 times 4.", [op("multiply", 0.5, 4)]),
    ("multiply negative 2.5 by 4", [op("multiply", -2.5, 4)]),
    ("three point one four times two", [op("multiply", 3.14, 2)]),
    ("twenty-one plus thirty four", [op("add", 21, 34)]),
    ("ninety-nine plus one hundred", [op("add", 99, 100)]),
    ("add a hundred and 5", [op("add", 100, 5)]),
    ("add 1,200 and 3", [op("add", 1200, 3)]),
    ("add 2 and 3 then multiply by 4", [op("add", 2, 3), op("multiply", of(1), 4)]),
    ("add 2 and 3, and multiply the result by 4", [op("add", 2, 3), op("multiply", of(1), 4)]),
    ("add 5 and 6, subtract 3, and divide by 2", [op("add", 5, 6), op("subtract", of(1), 3), op("divide", of(2), 2)]),
    ("double 10 then square the result", [op("multiply", 10, 2), expr(f"({of(1)}) ** 2")]),
    ("add 10 to 5 and then subtract the result from 100", [op("add", 10, 5), op("subtract", 100, of(1))]),
    ("2 + 3; times 4; (the result - 1) / 2", [op("add", 2, 3), op("multiply", of(1), 4), expr(f"(({of(2)}) - 1) / 2")]),
    ("add 2 and 3. add 4 and 5.", [op("add", 2, 3), op("add", 4, 5)]),
    ("add milk to my list", [todo("add", text="milk")]),
    ("add milk", [todo("add", text="milk")]),
    ("Add Milk and Eggs to my shopping list", [todo("add", text="Milk and Eggs")]),
    ("add 2 to my list", [todo("add", text="2")]),
    ('add "2 and 3" to my to-dos', [todo("add", text="2 and 3")]),
    ("add a todo to call 2 people", [todo("add", text="call 2 people")]),
    ("create a task: water the plants", [todo("add", text="water the plants")]),
    ("todo: call Bob", [todo("add", text="call Bob")]),
    ("remind me to buy milk", [todo("add", text="buy milk")]),
    ("Remember to call mom", [todo("add", text="call mom")]),
    ("remember that 2 plus 2 is 4", [todo("add", text="2 plus 2 is 4")]),
    ("don't forget to add 2 and 3", [todo("add", text="add 2 and 3")]),
    ("remind me to buy milk, eggs and bread", [todo("add", text="buy milk, eggs and bread")]),
    ("list my to-dos", [todo("list")]),
    ("Show me all my tasks, please", [todo("list")]),
    ("What's on my to-do list?", [todo("list")]),
    ("what do I have to do", [todo("list")]),
    ("mark buy milk as done", [todo("complete", text="buy milk")]),
    ('Mark "Buy Milk" as completed.', [todo("complete", text="Buy Milk")]),
    ("mark to-do 3 as done", [todo("complete", todo_id="3")]),
    ("complete task #2", [todo("complete", todo_id="2")]),
    ("I have finished the report", [todo("complete", text="report")]),
    ("check buy milk off my list", [todo("complete", text="buy milk")]),
    ("delete to-do 3", [todo("delete", todo_id="3")]),
    ("remove milk from my list", [todo("delete", text="milk")]),
    ("take milk off my list", [todo("delete", text="milk")]),
    ("get to-do 4", [todo("get", todo_id="4")]),
    ('show me the task "buy milk"', [todo("get", text="buy milk")]),
    ("get todo 123e4567-e89b-12d3-a456-426614174000", [todo("get", todo_id="123e4567-e89b-12d3-a456-426614174000")]),
    ("remind me to buy milk and list my to-dos", [todo("add", text="buy milk"), todo("list")]),
    ("add milk, add eggs, list my tasks", [todo("add", text="milk"), todo("add", text="eggs"), todo("list")]),
    (
        "add buy milk to my to-do list, then mark buy milk as done",
        [todo("add", text="buy milk"), todo("complete", text="buy milk")],
    ),
    (
        "add 12 and 30, then remember the result as a to-do, list my to-dos",
        [op("add", 12, 30), todo("add", text=f"Result: {of(1)}"), todo("list")],
    ),
    ("calculate 10 + 5 and add a to-do with the result", [op("add", 10, 5), todo("add", text=f"Result: {of(1)}")]),
    ("add to my list: milk", [todo("add", text="milk")]),
    ("put on my to-do list call Bob", [todo("add", text="call Bob")]),
    ("set to-do 3 to done", [todo("complete", todo_id="3")]),
    ("delete the milk to-do", [todo("delete", text="milk")]),
    ("add the numbers 4 and 5", [op("add", 4, 5)]),
    ("add two numbers: 4 and 6", [op("add", 4, 6)]),
    ("delete 3", [todo("delete", todo_id="3")]),
    ("mark 1 as done", [todo("complete", todo_id="1")]),
    ("What do I have on my to-do list?", [todo("list")]),
    ("do I have any tasks?", [todo("list")]),
    ("add 2 and 3 and remind me to call Bob", [op("add", 2, 3), todo("add", text="call Bob")]),
    ("First, add 2 and 3.\nThen list my to-dos.", [op("add", 2, 3), todo("list")]),
    (
        "what is 3 plus 4 then add 5 to the result and then save the answer as a todo",
        [op("add", 3, 4), op("add", 5, of(1)), todo("add", text=f"Result: {of(2)}")],
    ),
]

#: What nothing matches, each with the part that is told.
REFUSED = [
    ("tell me a joke", "tell me a joke"), ("plus", "plus"), ("add 5", "add 5"), ("add 3 apples", "add 3 apples"),
    ("what is 5?", "what is 5?"), ("remind me", "remind me"), ("delete all", "delete all"), ("list", "list"),
    ("multiply the result by 2", "multiply the result by 2"), ("mark it as done", "mark it as done"),
    ("mark as done", "mark as done"), ("remind me to", "remind me to"), ("add to my list", "add to my list"),
    ("calculate 5+5. then calculate 6+6. then add them", "add them"),
    ("2 + 3, 4 + 5, add the results", "add the results"),
    ("complete the first to-do", "complete the first to-do"), ("2 +", "2 +"), ("(2 + 3", "(2 + 3"), ("2 3", "2 3"),
    ("add 2 and 3 then dance", "dance"), ("subtract 5 and 20 by 3", "subtract 5 and 20 by 3"),
    ("9" * 400 + "+1", "999"), ("halve 10", "halve 10"), ("3 million plus 1", "3 million plus 1"),
    ("two hundred plus three", "two hundred plus three"), ("multiply one hundred and five by 3", "multiply"),
    ("add 2 and 3, then double it", "double it"), ("add 2 and 3, then add that to 4", "add that to 4"),
    ("add milk to my list, then mark it as done", "mark it as done"),
    ("add milk to my list, then dance", "dance"), ("remember it as a to-do", "remember it"),
]  # fmt: skip

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_TASKS = [
    "buy milk", "call 2 people", "water the plants", "pay the rent for May", "wash the car, inside as well",
    "email Zoë", "read chapter 12", "book a table for 8 at 7:30", "get bread and butter", "Prepare the talk",
    "feed 3 cats", "call Ann and Bob",
]  # fmt: skip


def words(number: int, chance: Random) -> str:
    """A whole number from 0 to 100, as one of the ways to say it."""
    if number == 100:
        return chance.choice(["one hundred", "a hundred"])
    if number >= 20:
        between = chance.choice([" ", "-"])
        return _TENS[number // 10 - 2] + (f"{between}{_ONES[number % 10]}" if number % 10 else "")
    return _ONES[number]


class Grammar:
    """Prompts of one seed, with their plans."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)

    def prompt(self) -> tuple[str, Wanted]:
        chance = self.chance
        text, wanted, last = "", Wanted(), None
        for place in range(chance.choice((1, 1, 2, 2, 3, 4))):
            said, one = self._sum(last) if chance.random() < 0.5 else self._todo(last)
            wanted.append(one)
            if one[0] == CALC:
                last = place + 1
            if place == 0:
                text = chance.choice(["", "", "please ", "Can you ", "hey, "]) + said
            else:
                text += chance.choice([", then ", " and then ", ". ", "; ", "\n", ". Then ", ", and then "]) + said
        text = chance.choice([text, text[0].upper() + text[1:]])
        text += chance.choice(["", "", ".", "?", "!", " please", ", thanks."])
        return text.replace(" ", "  ") if chance.random() < 0.1 else text, wanted

    def number(self) -> tuple[str, Any]:
        chance = self.chance
        kind = chance.choice(("digits", "digits", "comma", "words", "decimal", "negative", "said decimal"))
        whole = chance.randint(0, 10 ** chance.randint(1, 6) - 1)
        match kind:
            case "comma":
                return f"{whole:,}", whole
            case "words":
                small = chance.randint(0, 100)
                return words(small, chance), small
            case "decimal":
                return f"{whole}.{chance.randint(1, 9)}5", None
            case "negative":
                return f"{chance.choice(['-', 'minus ', 'negative '])}{whole}", -whole
            case "said decimal":
                digit = chance.randint(0, 9)
                return f"{words(whole % 100, chance)} point {_ONES[digit]}", float(f"{whole % 100}.{digit}")
        return str(whole), whole

    def pair(self) -> tuple[str, Any, str, Any]:
        """Two numbers that can stand before and behind "and" without being read as one."""
        while True:
            (left, a), (right, b) = self.number(), self.number()
            if not (left.endswith("hundred") and right[0].isalpha()):
                return left, float(left) if a is None else a, right, float(right) if b is None else b

    def _sum(self, last: int | None) -> tuple[str, tuple[str, Input]]:
        chance = self.chance
        left, a, right, b = self.pair()
        if last is not None and chance.random() < 0.6:
            ref = of(last)
            it = chance.choice(["the result", "the answer", "that result"])
            return chance.choice(
                [
                    (f"add {right} to {it}", op("add", b, ref)),
                    (f"multiply by {right}", op("multiply", ref, b)),
                    (f"multiply {it} by {right}", op("multiply", ref, b)),
                    (f"divide {it} by {right}", op("divide", ref, b)),
                    (f"subtract {right}", op("subtract", ref, b)),
                    (f"subtract {it} from {right}", op("subtract", b, ref)),
                    (f"times {right}", op("multiply", ref, b)),
                    (f"double {it}", op("multiply", ref, 2)),
                ]
            )
        first = chance.choice(["", "what is ", "calculate ", "compute "])
        options = [
            (f"add {left} {chance.choice(['and', 'to', 'with'])} {right}", op("add", a, b)),
            (f"{first}the sum of {left} and {right}", op("add", a, b)),
            (f"subtract {left} from {right}", op("subtract", b, a)),
            (f"multiply {left} {chance.choice(['by', 'and', 'with'])} {right}", op("multiply", a, b)),
            (f"divide {left} by {right}", op("divide", a, b)),
            (f"the difference between {left} and {right}", op("subtract", a, b)),
        ]
        if last is None or left[0] not in "-mn":  # "…, then minus 5 plus 3" goes on with the result
            options += [
                (f"{first}{left} plus {right}", op("add", a, b)),
                (f"{first}{left} - {right}", op("subtract", a, b)),
                (f"{first}{left} {chance.choice(['times', '*', 'multiplied by'])} {right}", op("multiply", a, b)),
                (f"{first}{left} {chance.choice(['/', 'divided by', 'over'])} {right}", op("divide", a, b)),
            ]
        return chance.choice(options)

    def _todo(self, last: int | None) -> tuple[str, tuple[str, Input]]:
        chance, text, number = self.chance, self.chance.choice(_TASKS), str(self.chance.randint(1, 99))
        listed = chance.choice(["my list", "my to-do list", "the todo list", "my tasks", "my to-dos"])
        noun = chance.choice(["todo", "to-do", "task"])
        options = [
            (f"add {text} to {listed}", todo("add", text=text)),
            (f"remind me to {text}", todo("add", text=text)),
            (f"remember to {text}", todo("add", text=text)),
            (f"create a {noun}: {text}", todo("add", text=text)),
            (f"add a {noun} to {text}", todo("add", text=text)),
            (f"{chance.choice(['list', 'show', 'show me', 'display'])} {listed}", todo("list")),
            (f"what is on {listed}", todo("list")),
            (f"mark {text} as {chance.choice(['done', 'complete'])}", todo("complete", text=text)),
            (f'complete "{text}"', todo("complete", text=text)),
            (f"mark {noun} {number} as done", todo("complete", todo_id=number)),
            (
                f"{chance.choice(['delete', 'remove'])} {noun} {chance.choice(['', '#'])}{number}",
                todo("delete", todo_id=number),
            ),
            (f"remove {text} from {listed}", todo("delete", text=text)),
            (f"{chance.choice(['get', 'show me'])} {noun} {number}", todo("get", todo_id=number)),
        ]
        if last is not None:
            options.append((f"remember the result as a {noun}", todo("add", text=f"Result: {of(last)}")))
        return chance.choice(options)
