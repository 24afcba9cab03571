"""What each kernel of a step of a model belongs to, by a trace of torch.profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from moe_engine.timing import now_s
from moe_engine.tools.trace import covered

EXPERTS, OPTIMIZER = "experts", "optimizer"
"""The ranges of record_function around forward and backward of experts, and around the optimizer's
step."""
GROUPED_MM = "aten::_grouped_mm", "transformers::grouped_mm_fallback"
"""The operators whose kernels are GEMMs of experts, whatever they are called."""
GEMMS = frozenset(
    "dispatch_gemm_kernel dispatch_wgrad_kernel staged_gemm_kernel specialized_gemm_kernel "
    "_grouped_gemm_kernel _split_sum_kernel _tile_schedule_kernel "
    "_activation_gradient_kernel _wgrad_kernel _bias_gradient_kernel "
    "_bias_weight_gradient_kernel _clear_rest_kernel _gathered_sum_kernel "
    "quantize_rows_kernel".split()
)
"""Our products with what belongs to them: activations, their gradients, and the order of tiles.
Those of a layer wait inside for rows that come."""
COMMUNICATION = frozenset(
    "count_rows_kernel begin_rows_kernel place_rows_kernel take_rows_kernel sum_rows_kernel "
    "zero_rows_kernel "
    "layout_kernel layout_sum_kernel send_plan_kernel ping_kernel low_latency_dispatch_kernel "
    "staged_schedule_kernel send_rows_kernel forward_kernel place_tokens_kernel "
    "expand_rows_kernel pack_plan_kernel "
    "pack_rows_kernel node_layout_kernel exchange_internode_kernel open_internode_kernel "
    "push_fused_kernel copy_rows_kernel keep_rows_kernel copy_ids_kernel collect_kernel "
    "locate_kernel release_kernel exchange_kernel exchange_fused_kernel metadata_kernel "
    "push_kernel low_latency_combine_kernel return_rows_kernel final_sum_kernel fused_sum_kernel "
    "return_to_rails_kernel return_to_nodes_kernel node_sum_kernel internode_sum_kernel "
    "release_rails_kernel send_return_metadata_kernel "
    "reduce_expanded_kernel sum_expert_rows_kernel return_sums_kernel tell_far_ranks_kernel".split()
)
"""Our kernels that plan, send, place, copy and add up rows."""


class KernelClass(StrEnum):
    """Each value begins the name of a field of a result line.

    GEMM: the products of experts, forward and backward. COMM: their rows sent, permuted and added
    up, whatever else runs in `EXPERTS`, and NCCL. DENSE: all else but the optimizer.
    """

    GEMM = "gemm"
    COMM = "comm"
    DENSE = "dense"
    OPTIMIZER = "optimizer"


def class_of(kernel: str, ranges: Collection[str]) -> KernelClass:
    """The class of a kernel that was launched within these ranges and operators."""
    if kernel in GEMMS or any(name in ranges for name in GROUPED_MM):
        return KernelClass.GEMM
    if kernel in COMMUNICATION or kernel.startswith("nccl") or EXPERTS in ranges:
        return KernelClass.COMM
    return KernelClass.OPTIMIZER if OPTIMIZER in ranges else KernelClass.DENSE


def trace_classes(step: Callable[[], object], num_steps: int, device: str) -> dict[str, float]:
    """The fields of `class_times` for some steps."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            step()
        now_s(torch.device(device))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return class_times(json.loads(file.read_text())["traceEvents"], num_steps)


def class_times(events: Iterable[dict[str, Any]], num_steps: int) -> dict[str, float]:
    """Microseconds of a step, of the trace events (Chrome's format) of `num_steps` steps.

    `gemm_us` .. `optimizer_us`: in which a kernel of the class runs, by `KernelClass`; classes
    overlap where rows travel during products. busy_us: in which any kernel runs. Copies and memsets
    of the GPU count as kernels. A kernel is in a range if the host launched it within the range, on
    any thread, as one waits for the backward that the other runs.
    """
    by_category: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_category.setdefault(event.get("cat", ""), []).append(event)

    def of(*categories: str) -> list[dict[str, Any]]:
        return [event for name in categories for event in by_category.get(name, [])]

    names = {EXPERTS, OPTIMIZER, *GROUPED_MM}
    ranges = [event for event in of("user_annotation", "cpu_op") if event["name"] in names]
    launches = of("cuda_runtime", "cuda_driver")
    launched_at = {event["args"]["correlation"]: event["ts"] for event in launches}
    parts: dict[KernelClass, list[tuple[int, int]]] = {one: [] for one in KernelClass}
    for kernel in of("kernel", "gpu_memcpy", "gpu_memset"):
        at = launched_at.get(kernel["args"]["correlation"], -1)
        within = {one["name"] for one in ranges if one["ts"] <= at <= one["ts"] + one["dur"]}
        begin = round(kernel["ts"] * 1000)
        part = begin, begin + round(kernel["dur"] * 1000)
        parts[class_of(kernel["name"], within)].append(part)
    found = {f"{one}_us": covered(intervals) for one, intervals in parts.items()}
    found["busy_us"] = covered(part for intervals in parts.values() for part in intervals)
    return {name: round(ns / 1000 / num_steps, 1) for name, ns in found.items()}
