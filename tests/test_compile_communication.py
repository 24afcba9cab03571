"""Every communication kernel compiled for sm_90 without a GPU: no spills, wide stores, and the
publish and observe sequences in the PTX."""

from __future__ import annotations

import re
from functools import cache, partial

import pytest
import test_compile_layer as layer
import triton
import triton.language as tl
from compile_helper import compile_kernel

from moe_engine import routing_kernels
from moe_engine.combine import kernels as combine
from moe_engine.device.context import PHASE_ROWS
from moe_engine.device.lang import notify, wait
from moe_engine.dispatch import exchange_kernels, fused_kernels, stages_kernels
from moe_engine.dispatch import receive_kernels as receive
from moe_engine.dispatch import send_kernels as dispatch
from moe_engine.dispatch.launch import LOCATE_ROWS, METADATA_LANES
from moe_engine.row_vectors import COPY_ROWS

POINTERS = {
    "context": "*i64",
    "topk_idx": "*i64",
    "recv_topk_idx": "*i64",
    "recv_address": "*i64",
    "row_offset": "*i64",
    "is_token_in_rank": "*u8",
    "topk_weights": "*fp32",
    "recv_topk_weights": "*fp32",
    "out_weights": "*fp32",
    "own_weights": "*fp32",
    **dict.fromkeys(("x", "recv_x", "scales", "recv_scales"), "*i32"),
    **dict.fromkeys(("y", "out", "own_rows", "bias_0", "bias_1"), "*bf16"),
    **dict.fromkeys(
        (
            "num_tokens_per_rank",
            "num_tokens_per_expert",
            "rank_prefix_matrix",
            "recv_expert_counts",
            "call_signature",
            "dispatched",
            "expert_offsets",
            "block_counts",
            "send_token_idx",
            "send_head",
            "recv_src_idx",
        ),
        "*i32",
    ),
}

# What the launchers pass for H 7168 in bf16, K 8, 256 experts on 4 ranks.
TOPK = {"NUM_TOPK": 8, "TOPK_PAD": 8}
COPY = {"CHUNK_ROWS": 8, "BLOCK_VECS": 512, "ALIGNED": True}
PUSH = {**COPY, "SPAN": 4, "RANKS_PAD": 4, "LANES": COPY_ROWS, "PDL": True}
SCALES = {"NUM_SCALES": 56, "SCALES_PAD": 64}
SUMS = {"ALIGNED": True, "RANKS": 4, "RANKS_PAD": 4, "CHUNK_ROWS": 8, "BLOCK_H": 512}
FINAL = {**SUMS, **TOPK, "NUM_BIASES": 2, "HAS_WEIGHTS": True, "GROUP": 16}
RETURN = {**FINAL, "SPAN": 4, "LANES": COPY_ROWS}
VARIANTS = {
    "layout": (routing_kernels.layout_kernel, {**TOPK, "EXPERTS_PAD": 256, "BLOCK": 32}, 4),
    "layout_sum": (routing_kernels.layout_sum_kernel, {"BLOCK": 256, "COLUMNS": 16}, 4),
    "send_plan": (
        routing_kernels.send_plan_kernel,
        {**TOPK, "HAS_IDS": True, "RANKS_PAD": 4, "BLOCK": 128, "SCAN": 2048, "PDL": True},
        4,
    ),
    "exchange": (
        exchange_kernels.exchange_kernel,
        {"RANKS_PAD": 4, "EXPERTS_PAD": 64, "ALL_EXPERTS_PAD": 256, "PDL": True},
        4,
    ),
    "push": (dispatch.push_kernel, PUSH, 16),
    "metadata": (
        dispatch.metadata_kernel,
        {
            **{"NUM_TOPK": 8, "TAIL_PAD": 32, "NUM_SCALES": 56, "SCALES_BLOCK": 32},
            **{"RANKS_PAD": 4, "LANES": METADATA_LANES, "PDL": True},
        },
        8,
    ),
    "collect": (
        receive.collect_kernel,
        {**COPY, **TOPK, **SCALES, "ROWS": COPY_ROWS, "PDL": True},
        16,
    ),
    "locate": (
        receive.locate_kernel,
        {**TOPK, **SCALES, "CHUNK_ROWS": 8, "ROWS": LOCATE_ROWS},
        16,
    ),
    "release": (receive.release_kernel, {}, 4),
    "return_rows": (combine.return_rows_kernel, {**RETURN, "COLUMNS": 1024}, 16),
    "final_sum": (combine.final_sum_kernel, FINAL, 16),
}
PLACE = {"TOPK_PAD": 8, "BLOCK": 32}
OF_A_LAYER = {
    name: partial(layer.compile_layer, kernel, constexprs, num_warps=num_warps)
    for name, kernel, constexprs, num_warps in (
        (
            "exchange_fused",
            exchange_kernels.exchange_fused_kernel,
            {"EXPERTS_PAD": 64, "ALL_EXPERTS_PAD": 256, "STAGES_PAD": 32},
            4,
        ),
        ("place_rows", routing_kernels.place_rows_kernel, {**PLACE, "STEP": 32}, 8),
        (
            "staged_schedule",
            stages_kernels.staged_schedule_kernel,
            {"BACK_STAGES": 8, "EXPERTS_PAD": 64, "COUNTERS_PAD": 64, "STEP": 128, "BLOCK_M": 128},
            4,
        ),
        (
            "send_return_metadata",
            fused_kernels.send_return_metadata_kernel,
            {**PLACE, "BACK_STAGES": 8},
            4,
        ),
    )
}
OF_A_LAYER |= {
    "push_fused": layer.push,
    "copy_rows": layer.copy,
    "return_sums": layer.returns,
    "fused_sum": layer.sums,
    "fused_sum_of_8": partial(layer.sums, RANKS=8, RANKS_PAD=8),
}


@cache
def build(name, arch=90, **changes):
    if name in OF_A_LAYER:
        return OF_A_LAYER[name](arch)
    kernel, constexprs, num_warps = VARIANTS[name]
    constexprs = {**constexprs, **changes}
    pointers = {**POINTERS, "x": "*bf16"} if name == "return_rows" else POINTERS
    signature = {arg: pointers.get(arg, "i32") for arg in kernel.arg_names if arg not in constexprs}
    return compile_kernel(kernel, signature, constexprs, arch, num_warps=num_warps)


of_this_triton = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6"
)


@of_this_triton
@pytest.mark.parametrize("name", [*VARIANTS, *OF_A_LAYER])
def test_no_spills(name):
    built = build(name)
    assert built.spill_bytes == 0
    assert built.shared_bytes <= 144 * 1024


@of_this_triton
@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("name", ["push", "final_sum"])
def test_other_architectures(name, arch):
    before_hopper = {"PDL": False} if name == "push" and arch < 90 else {}
    assert build(name, arch, **before_hopper).spill_bytes == 0


def test_rows_are_stored_16_bytes_at_a_time():
    for name in ("push", "collect", "return_rows", "push_fused", "copy_rows", "return_sums"):
        ptx = build(name).ptx
        assert "st.global.v4.b32" in ptx
        assert re.search(r"ld\.global\.v4\.b32|cp\.async\.cg\.shared\.global .*, 0x10", ptx)
    assert "st.global.v4.b32" not in build("push", ALIGNED=False).ptx


RELEASE = re.compile(r"(@%p\d+ )?atom\.global\.sys\.release\.exch\.b64")


PUBLISHERS = [
    *("exchange", "push", "return_rows", "release"),
    *("exchange_fused", "push_fused", "send_return_metadata", "return_sums", "fused_sum"),
]


@pytest.mark.parametrize("name", PUBLISHERS)
def test_publish(name):
    """One thread releases at system scope, and no store lies between it and a CTA barrier."""
    ptx = build(name).ptx
    releases = list(RELEASE.finditer(ptx))
    assert releases
    for release in releases:
        assert release[1]  # under a predicate: one thread
        before = ptx[: release.start()]
        assert "st.global" not in before[before.rindex("bar.sync") :]


OBSERVERS = [
    *("exchange", "push", "collect", "final_sum"),
    *("exchange_fused", "copy_rows", "return_sums", "fused_sum"),
]


@pytest.mark.parametrize("name", OBSERVERS)
def test_observe(name):
    """Acquire polls at system scope, a CTA barrier, then what is read or written behind them."""
    ptx = build(name).ptx
    last_poll = ptx.rindex("ld.acquire.sys.global.b64", 0, ptx.rindex("// token"))
    token = ptx.index("// token", last_poll)
    assert "bar.sync" in ptx[last_poll:token]
    guarded = r"(ld|st)\.global\.(v4\.)?b32|cp\.async"
    assert not re.search(guarded, ptx[last_poll : ptx.index("bar.sync", last_poll)])
    assert re.search(guarded, ptx[token:])


@triton.jit
def _tma_signals_kernel(context):
    lane = tl.arange(0, 1)
    notify(tl.load(context), lane, lane == 0, tl.load(context + 1), context, AFTER_TMA=True)
    wait(tl.load(context) + lane, lane == 0, 1, lane, context, PHASE_ROWS, BEFORE_TMA=True)


def test_signals_around_tma():
    """Stores by TMA are drained and fenced before the release, loads by TMA fenced behind the
    barrier that follows the acquire."""
    ptx = compile_kernel(_tma_signals_kernel, {"context": "*i64"}, {}).ptx
    drain = ptx.index("cp.async.bulk.wait_group 0; fence.proxy.async;")
    release = RELEASE.search(ptx, drain)
    assert "bar.sync" in ptx[drain : release.start()]
    fence = ptx.index("\tfence.proxy.async")
    assert "ld." not in ptx[ptx.rindex("bar.sync", 0, fence) : fence]
