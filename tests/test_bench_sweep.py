"""bench/sweep.sh runs its parts with options that they have, also after one of them has failed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ["check", "dispatch_combine", "fused_layer", "low_latency"]
OTHERS = ["training", "trace", "quantized_layer", "internode", "host", "model", "replays"]
TESTS, TRACES = ("check", "replays"), ("trace_forward", "trace_backward")


def sweep(folder: Path, failing: str, *parts: str) -> subprocess.CompletedProcess[str]:
    """A sweep of three GPUs with a Python that does nothing but read the options of each part."""
    python = folder / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        f'[[ -n "{failing}" && "$*" == *"{failing}.py"* ]] && exit 3\n'
        'echo "$CUDA_VISIBLE_DEVICES" "$@"\n'
        f'exec {sys.executable} "$@" --help\n'
    )
    python.chmod(0o755)
    return subprocess.run(
        ["bash", ROOT / "bench" / "sweep.sh", "3", folder / "lines", *parts],
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "parts"), [("fused_layer", []), ("training", OTHERS)])
def test_sweep(tmp_path, failing, parts):
    done = sweep(tmp_path, failing, *parts)
    assert done.returncode == (1 if failing else 0), done.stdout
    folder = tmp_path / "lines"
    names = [name for part in parts or PARTS for name in (TRACES if part == "trace" else [part])]
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if "exit" in line] == names
    for name in names:
        log = (folder / f"{name}.log").read_text()
        assert f"{name}: exit {3 if name == failing else 0} after" in done.stdout
        assert name == failing or log.startswith("0,1,2 ")
        if name in TESTS:
            assert (ROOT / re.findall(r"tests/\w+\.py", log)[0]).exists()
        elif name in TRACES:
            assert f"--ranks 3 {'--backward ' * (name == TRACES[1])}--path" in log
        elif name != failing:
            assert f"--ranks 3 --path {folder}/{name}.jsonl" in log


def test_a_part_that_is_unknown(tmp_path):
    done = sweep(tmp_path, "", "trainin")
    assert done.returncode == 1 and "no such part: trainin" in done.stdout
