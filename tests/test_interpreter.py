"""The interpreter computes faster what Triton's own computes."""

import os
import subprocess
import sys
from pathlib import Path

import cases


def test_operations_have_the_same_results() -> None:
    """And types, and raise alike."""
    cases.skip_without_interpreter()
    script = Path(__file__).with_name("interpreter_cases.py")
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
