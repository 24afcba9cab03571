"""The examples run, as a newcomer would start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


ALWAYS = ("02_layer",)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in ALWAYS else pytest.mark.slow)
        for path in EXAMPLES
    ],
)
def test_example(pool, path):
    if path.stem == "07_transformers":
        pytest.importorskip("transformers")
    if path.stem == "09_tiles" and pool.device == "cuda":
        pytest.skip("emulates its ranks")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout
