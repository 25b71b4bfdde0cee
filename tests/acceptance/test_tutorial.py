"""The Python blocks of the tutorial, pasted into one file, are a program that prints what the page shows.

Each symptom of the page about troubleshooting has a cause and a fix.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.pages import ROOT, compare, python_blocks

PATIENCE = 120.0  # seconds


def test_the_blocks_of_the_tutorial_are_one_program(tmp_path: Path) -> None:
    blocks = python_blocks((ROOT / "docs" / "tutorial.md").read_text("utf-8"))
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text, "utf-8")
    pasted = [block for block in blocks if not block.file and not block.skip_run]
    assert len(pasted) > 10
    (tmp_path / "tutorial.py").write_text("\n".join(block.text for block in pasted), "utf-8")
    done = subprocess.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    compare("".join(block.output or "" for block in pasted), done.stdout, "tutorial.md")


def test_each_symptom_has_a_fix() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    symptoms = {each.partition("\n")[0]: each for each in re.split(r"^## ", page, flags=re.MULTILINE)[1:]}
    assert len(symptoms) >= 14
    answers = {"How large can a result be?", "An event is missing", "Can two versions of my code run at once?"}
    for symptom, text in symptoms.items():
        assert symptom in answers or {"**Cause.**", "**Fix.**"} <= set(re.findall(r"\*\*\w+\.\*\*", text)), symptom
        assert re.search(r"\]\([\w/#.-]+\)", text), f"{symptom} has no link"
