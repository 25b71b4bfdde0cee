"""That no key of the tests gets out: see tests/conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {"plain": "", "anthropic": "ant-", "langfuse": "lf-"}
KEY = "'sk-{}can' 'ary-0123456789'"  # in two, so that this file is none that has it
LEAKS = {
    "logged": "import logging; logging.getLogger('any').warning(KEY)",
    "printed": "print(KEY)",
    "raised": "raise ValueError(f'wrong key {KEY}')",
    "left": "(tmp_path / 'runs.db').write_bytes(f'...{KEY}...'.encode())",
}


def test_a_test_that_lets_a_key_out_fails(tmp_path: Path) -> None:
    text = []
    for kind, prefix in KINDS.items():
        for how, code in LEAKS.items():
            text.append(f"def test_{kind}_{how}(tmp_path):\n    KEY = {KEY.format(prefix)}\n    {code}")
        kept = f"(tmp_path / 'runs.db').write_bytes(({KEY.format(prefix)})[:9].encode())"
        text.append(f"def test_{kind}_kept(tmp_path):\n    {kept}")
    (tmp_path / "test_it.py").write_text("\n\n".join(text))
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_it.py")],
        cwd=ROOT, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    failed = {line.split("::")[1].split()[0] for line in done.stdout.splitlines() if line.startswith("FAILED")}
    assert failed == {f"test_{kind}_{how}" for kind in KINDS for how in LEAKS}
