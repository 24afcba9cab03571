"""The bench of whole models runs, with tiny ones, and finds the same logits on every way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers.distributed import utils

BENCH = Path(__file__).parents[1] / "bench"


def implementations() -> set[str]:
    """Those that the bench has with this version of transformers."""
    ours = {"transformers_dp", "moe_engine"}
    sharded = {"transformers_ep", "transformers_tp"}
    return ours if hasattr(utils, "TransformersDeviceMesh") else ours | sharded


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bench_model(pool, tmp_path):
    if pool.device == "cuda":
        pytest.skip("tiny models run on emulated ranks")
    lines = tmp_path / "lines.jsonl"
    command = [sys.executable, BENCH / "model.py", "--tiny", "--ranks=2", f"--path={lines}"]
    paths = os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--only=mixtral"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    impls, seen = implementations(), {}
    for line in map(json.loads, lines.read_text().splitlines()):
        seen[line["impl"], line["verb"]] = line
        assert line["tokens"] == (8 if line["verb"] == "prefill" else 2)
        assert line["tokens_per_s"] == pytest.approx(2e6 * line["tokens"] / line["us"], abs=1)
    batched = {(f"{impl}, batched_mm", "decode") for impl in impls - {"moe_engine"}}
    assert (
        seen.keys() == {(impl, verb) for impl in impls for verb in ("prefill", "decode")} | batched
    )
    assert all(line["error"] < 1e-5 for (impl, _), line in seen.items() if "_dp" not in impl)
