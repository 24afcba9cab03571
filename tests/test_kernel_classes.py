"""What the bench of a training step makes of a trace: each kernel has its class."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moe_engine.tools.models import Kind, build_config, build_model

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from _kernel_classes import (
    COMMUNICATION,
    EXPERTS,
    GEMMS,
    GROUPED_MM,
    OPTIMIZER,
    KernelClass,
    class_of,
    class_times,
)

ROOT = Path(__file__).parents[1]


def kernels_of(folder: str) -> set[str]:
    files = (ROOT / folder).rglob("*.py")
    return {name for path in files for name in re.findall(r"def (\w+_kernel)\(", path.read_text())}


def test_every_kernel_of_ours_has_a_class():
    assert not GEMMS & COMMUNICATION
    folders = "moe_engine", "dispatch", "combine", "grouped_gemm"
    assert set().union(*map(kernels_of, folders)) == GEMMS | COMMUNICATION
    assert kernels_of("grouped_gemm") <= GEMMS
    assert not any(re.search("gemm|grad", name) for name in COMMUNICATION)


@pytest.mark.parametrize(
    ("kernel", "ranges", "want"),
    [
        ("dispatch_wgrad_kernel", [EXPERTS], KernelClass.GEMM),
        ("_grouped_gemm_kernel", [], KernelClass.GEMM),
        ("void cutlass::device_kernel<..>(..)", [EXPERTS, GROUPED_MM[0]], KernelClass.GEMM),
        ("push_fused_kernel", [EXPERTS], KernelClass.COMM),
        ("exchange_fused_kernel", [], KernelClass.COMM),
        ("void at::native::indexSelectLargeIndex<..>(..)", [EXPERTS], KernelClass.COMM),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(..)", [], KernelClass.COMM),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", [], KernelClass.DENSE),
        ("void at::native::multi_tensor_apply_kernel<..>(..)", [OPTIMIZER], KernelClass.OPTIMIZER),
    ],
)
def test_class_of(kernel, ranges, want):
    assert class_of(kernel, ranges) == want


def event(category: str, name: str, begin: float, length: float, number: int = 0) -> dict:
    args = {"correlation": number}
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "args": args}


def test_class_times_of_a_trace():
    times = class_times(
        [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", EXPERTS, 10, 20),
            event("cpu_op", GROUPED_MM[0], 20, 5),
            event("user_annotation", OPTIMIZER, 40, 10),
            event("cuda_runtime", "cudaLaunchKernel", 5, 1, 1),
            event("cuda_runtime", "cudaLaunchKernel", 12, 1, 2),
            event("cuda_runtime", "cudaLaunchKernel", 14, 1, 3),
            event("cuda_driver", "cuLaunchKernelEx", 22, 1, 4),
            event("cuda_runtime", "cudaMemsetAsync", 41, 1, 5),
            event("gpu_user_annotation", EXPERTS, 200, 500),
            event("kernel", "nvjet", 100, 50, 1),
            event("kernel", "sort", 200, 10.5, 2),
            event("kernel", "push_fused_kernel", 205, 25, 3),  # while the others run
            event("kernel", "cutlass", 220, 60, 4),
            event("gpu_memset", "Memset (Device)", 300, 8, 5),
        ],
        num_steps=2,
    )
    assert times == dict(
        gemm_us=30.0, comm_us=15.0, dense_us=25.0, optimizer_us=4.0, busy_us=25 + 40 + 4
    )


def test_ranges_hold_the_experts_forward_and_backward(tmp_path):
    pytest.importorskip("transformers")
    from train_step import ranges_of_experts

    model = build_model(build_config(Kind.QWEN3_MOE)).train()
    model.set_experts_implementation("grouped_mm")
    ids = torch.arange(16)[None]
    with ranges_of_experts(model), profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(ids, labels=ids, use_cache=False).loss.backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = [event for event in events if event.get("name") == EXPERTS]
    products = [event for event in events if event.get("name") in GROUPED_MM]
    assert len(ranges) == 2 * 2
    # Two products of a layer, and two gradients of each.
    held = [[one["ts"] <= e["ts"] <= one["ts"] + one["dur"] for e in products] for one in ranges]
    assert sorted(map(sum, held)) == [2, 2, 4, 4]
    assert len(products) == 12
