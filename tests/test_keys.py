"""That no key of the tests gets out: see tests/conftest.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAKS = {
    "logged": "import logging; logging.getLogger('any').warning(KEY)",
    "printed": "print(KEY)",
    "raised": "raise ValueError(f'wrong key {KEY}')",
    "left": "(tmp_path / 'runs.db').write_bytes(f'...{KEY}...'.encode())",
}


@pytest.mark.parametrize("kind", ["", "ant-", "lf-"])
def test_a_test_that_lets_a_key_out_fails(tmp_path: Path, kind: str) -> None:
    text = [f"KEY = 'sk-{kind}can' 'ary-0123456789'"]  # in two, so that this file is none that has it
    for how, code in LEAKS.items():
        text.append(f"def test_{how}(tmp_path):\n    {code}")
    text.append("def test_kept(tmp_path):\n    (tmp_path / 'runs.db').write_bytes(KEY[:9].encode())")
    (tmp_path / "test_it.py").write_text("\n\n".join(text))
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_it.py")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    failed = {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {f"test_{how}" for how in LEAKS}
