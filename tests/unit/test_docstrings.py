"""Docstrings of tools: the description of the tool, and those of its parameters."""

from __future__ import annotations

import inspect

import pytest

from agent_runtime_core.tools.schema import read_docstring

GOOGLE = """
Search the archive.

Args:
    query (str): What to search for.
        It may have several words:
        all of them must occur.

    limit (int, optional): The most results.
    shape (tuple(int, Callable[[int], str])): A shape: of two.
    *tags: Only with these tags.
    **more (Any): Further filters.

Keyword Args:
    sort: The order.
Returns:
    A list.

    Of results.

Raises:
    ValueError: query: is empty.

Example:
    search("x")

This tool is expensive. Never call it twice.

    An indented example of the description.

Note: it is slow.
"""

NUMPY = """
Search the archive.

It is old.

Parameters
----------
query : str
    What to search for.

    It may have several words.
limit, offset : int, optional
    Numbers.
unit : {'C', 'F'}
    The unit.
*tags
    Only with these tags.

Other Parameters
----------------
sort : str, default: 'asc'
    The order.

Returns
-------
list of str
    The results.

Raises
------
ValueError
    If query is empty.

This tool is expensive. Never call it twice.
"""

SPHINX = """
Search the archive.

:param query: What to search for.
    It may have several words.
:type query: str
:param int limit: The most results.
:keyword sort: The order.
:param \\*tags: Only with these tags.
:returns: A list
    of results.
:rtype: list
:raises ValueError: if query is empty

This tool is expensive.
:class:`Other` is cheap.
"""

EPYTEXT = """
Search the archive.

@param query: What to search for.
@type query: str
@keyword sort: The order.
@return: A list.

This tool is expensive.
"""


def test_google() -> None:
    text, found = read_docstring(inspect.cleandoc(GOOGLE))
    assert text == (
        "Search the archive.\n\nThis tool is expensive. Never call it twice.\n\n"
        "    An indented example of the description.\n\nNote: it is slow."
    )
    assert found == {
        "query": "What to search for. It may have several words: all of them must occur.",
        "limit": "The most results.",
        "shape": "A shape: of two.",
        "tags": "Only with these tags.",
        "more": "Further filters.",
        "sort": "The order.",
    }


def test_numpy() -> None:
    text, found = read_docstring(inspect.cleandoc(NUMPY))
    assert text == "Search the archive.\n\nIt is old.\n\nThis tool is expensive. Never call it twice."
    assert found == {
        "query": "What to search for. It may have several words.",
        "limit": "Numbers.",
        "offset": "Numbers.",
        "unit": "The unit.",
        "tags": "Only with these tags.",
        "sort": "The order.",
    }


def test_sphinx_and_epytext() -> None:
    text, found = read_docstring(inspect.cleandoc(SPHINX))
    assert text == "Search the archive.\n\nThis tool is expensive.\n:class:`Other` is cheap."
    assert found == {
        "query": "What to search for. It may have several words.",
        "limit": "The most results.",
        "sort": "The order.",
        "tags": "Only with these tags.",
    }
    assert read_docstring(inspect.cleandoc(EPYTEXT)) == (
        "Search the archive.\n\nThis tool is expensive.",
        {"query": "What to search for.", "sort": "The order."},
    )


@pytest.mark.parametrize(
    "heading",
    ["Args", "Arguments", "Params", "Parameters", "Keyword Args", "Keyword Arguments", "Other Parameters", "args"],
)
def test_every_heading_of_parameters(heading: str) -> None:
    expected = ("Look.\n\nIt is slow.", {"city": "The city."})
    assert read_docstring(f"Look.\n\n{heading}:\n  city: The city.\nIt is slow.") == expected
    assert read_docstring(f"Look.\n\n{heading}:\ncity: The city.\n\nIt is slow.") == expected
    assert read_docstring(f"Look.\n\n{heading}\n---\ncity: str\n    The city.\n\nIt is slow.") == expected


@pytest.mark.parametrize("heading", ["Returns", "Yields", "Raises", "Example", "Examples", "See Also"])
def test_every_heading_of_something_else(heading: str) -> None:
    expected = ("Look.\n\nIt is slow.", {"city": "The city."})
    assert read_docstring(f"Look.\n\nArgs:\n    city: The city.\n\n{heading}:\n    x: y\n\nIt is slow.") == expected
    assert read_docstring(f"Look.\n\n{heading}:\n    x: y\n\nArgs:\n    city: The city.\n\nIt is slow.") == expected


def test_text_that_only_looks_like_a_section_is_kept() -> None:
    for text in (
        "Look.\n\nThe steps are:\n    1. Open it.",
        "Look.\n\nReturns: the weather.",
        "Look.\n\nCaveats\n-------\nMany.",
        "Say who :param x is.\n\n    Args:\n        a: b",
    ):
        assert read_docstring(text) == (text, {})
    assert read_docstring("") == ("", {})


def test_a_continuation_line_is_no_entry() -> None:
    text = (
        "Look.\n\nArgs:\n    city: One of these:\n        ulm: a city\n        http://example.com/cities\n    unit: U."
    )
    assert read_docstring(text)[1] == {"city": "One of these: ulm: a city http://example.com/cities", "unit": "U."}


@pytest.mark.parametrize("heading", ["Note", "Notes", "Warning", "Warnings", "Important", "Caution", "Usage"])
def test_notes_and_warnings_are_part_of_the_description(heading: str) -> None:
    expected = (f"Look.\n\n{heading}:\n    Never call it twice.\n\nIt is slow.", {"city": "The city."})
    note = f"{heading}:\n    Never call it twice."
    assert read_docstring(f"Look.\n\nArgs:\n    city: The city.\n\n{note}\n\nIt is slow.") == expected
    assert read_docstring(f"Look.\n\n{note}\n\nIt is slow.\n\nArgs:\n    city: The city.") == expected


def test_a_numpy_note_is_part_of_the_description() -> None:
    text = "Look.\n\nNotes\n-----\nNever call it twice.\n\nIt is slow.\n\nReturns\n-------\nstr\n    Weather."
    assert read_docstring(text) == ("Look.\n\nNotes:\nNever call it twice.\n\nIt is slow.", {})


@pytest.mark.parametrize("mark", ["- {}", "* {}", "`{}`", "**{}**", "- `{}`", "- **{}**"])
def test_entries_in_markdown(mark: str) -> None:
    city, unit = mark.format("city"), mark.format("unit")
    text = f"Look.\n\nArgs:\n    {city}: The city.\n    {unit} (str): One of\n        - c: Celsius"
    assert read_docstring(text)[1] == {"city": "The city.", "unit": "One of - c: Celsius"}


def test_a_list_in_the_description_of_a_parameter_is_no_entry() -> None:
    text = "Look.\n\nArgs:\n    unit: One of\n    - c: Celsius\n    - f: Fahrenheit"
    assert read_docstring(text)[1] == {"unit": "One of - c: Celsius - f: Fahrenheit"}
