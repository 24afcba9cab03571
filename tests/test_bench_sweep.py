"""bench/sweep.sh runs its parts with options that they have, also after one of them has failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ["check", "dispatch_combine", "fused_layer", "low_latency"]


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["", "fused_layer"])
def test_sweep(tmp_path, failing):
    """With a Python that does nothing but read the options of each part."""
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        f'[[ -n "{failing}" && "$*" == *"{failing}.py"* ]] && exit 3\n'
        'echo "$CUDA_VISIBLE_DEVICES" "$@"\n'
        f'exec {sys.executable} "$@" --help\n'
    )
    python.chmod(0o755)
    folder = tmp_path / "lines"
    done = subprocess.run(
        ["bash", ROOT / "bench" / "sweep.sh", "3", folder],
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (1 if failing else 0), done.stdout
    for part in PARTS:
        log = (folder / f"{part}.log").read_text()
        status = 3 if part == failing else 0
        assert f"{part}: exit {status} after" in done.stdout
        assert part == failing or log.startswith("0,1,2 ")
        if part == "check":
            assert (ROOT / log.splitlines()[0].split()[-1]).exists()
        elif part != failing:
            assert f"--ranks 3 --path {folder}/{part}.jsonl" in log
