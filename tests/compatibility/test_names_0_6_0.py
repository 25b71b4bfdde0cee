"""Every name that modules promised to users had in version 0.6.0 is still there."""

from __future__ import annotations

import importlib
import warnings
from itertools import groupby
from pathlib import Path

from tests.support.cases import for_each

NAMES = [line.split() for line in Path(__file__).with_name("names_0_6_0.txt").read_text("utf-8").splitlines()]
BY_MODULE = {module: [name for _, name in lines] for module, lines in groupby(NAMES, key=lambda line: line[0])}


@for_each("module", BY_MODULE)
def test_names_are_there(module: str) -> None:
    found = importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the names of adapters that were renamed
        assert [name for name in BY_MODULE[module] if not hasattr(found, name)] == []
