"""docs/environment.md has each of the project's environment variables, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = "moe_engine", "dispatch", "combine", "grouped_gemm", "bench", "tests"
NAME = re.compile(r"MOE_ENGINE_[A-Z]+(?:_[A-Z]+)*")


def test_the_page_has_every_variable():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in files for name in NAME.findall(path.read_text())}
    page = (ROOT / "docs" / "environment.md").read_text()
    assert read == set(NAME.findall(page))
