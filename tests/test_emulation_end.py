"""What a RankPool leaves behind when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing
from moe_engine.emulation import RankPool

made = []


def make_lock(group):
    # As a progress bar does; its semaphore has a name, which somebody has to unlink.
    made.append(multiprocessing.get_context("spawn").RLock())


if __name__ == "__main__":
    pool = RankPool(2)
    pool.run(make_lock)
    if CLOSE:
        pool.close()
"""


@pytest.mark.parametrize("close", [True, False])
def test_semaphores_of_ranks_end_with_the_pool(tmp_path: Path, close: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("CLOSE", str(close)))
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "leaked" not in ended.stderr
