"""A layer's kernels, which run concurrently with its GEMMs, compiled for sm_90 without a GPU."""

from __future__ import annotations

import re
from functools import cache
from unittest import mock

import cases
import launches
import pytest
import torch
import triton
from compile_helper import compile_kernel

from moe_engine.device.lang import TRACING
from moe_engine.engines.fused_layer import leave_room_for_sums
from moe_engine.grouped_gemm.config import GemmConfig, GemmProblem, candidates
from moe_engine.layer_config import LayerChoices, LayerConfig
from moe_engine.tools.trace_kernels import ping_kernel
from moe_engine.utils import round_up

of_this_triton = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6"
)
PROBLEM = dict(num_rows=65536, num_experts=32, num_columns=768, depth=2048)
CONCURRENT = "push_fused", "copy_rows", "return_sums"


@cache
def recorded(**changes):
    return launches.layer(**changes)


def chosen(**choices):
    """Layers run so."""
    return mock.patch.object(LayerChoices, "choose", return_value=LayerConfig(**choices))


def configs(block_m: int, gated: bool = False) -> list[GemmConfig]:
    """The tiles of this height for bf16 on sm_90."""
    problem = GemmProblem(torch.bfloat16, **PROBLEM, gated=gated)  # type: ignore[arg-type]
    return [config for config in candidates(problem, block_m) if config.num_splits == 1]


def gemms(up: GemmConfig, down: GemmConfig):
    """Both GEMMs of a layer with such tiles, compiled."""
    made = launches.layer(tiles=(up, down))
    return made["dispatch_gemm"].compile(), made["staged_gemm"].compile()


@of_this_triton
@pytest.mark.parametrize("block_m", cases.slow_unless([(128,), (16,)], [128, 64, 32, 16]))
def test_gemms_do_not_spill(block_m):
    ups, downs = configs(block_m, gated=True), configs(block_m)
    for index in range(max(len(ups), len(downs))):
        pair = ups[index % len(ups)], downs[index % len(downs)]
        for built in gemms(*pair):
            assert built.spill_bytes == 0, pair
            assert "wgmma" in built.ptx or block_m < 64


@of_this_triton
@pytest.mark.skipif(TRACING, reason="recording takes some of the registers")
@pytest.mark.parametrize("block_m", cases.slow_unless([(128,)], [128, 64, 32, 16]))
def test_gemms_with_biases_do_not_spill(block_m):
    tiles = configs(block_m, gated=True)[0], configs(block_m)[0]
    made = launches.layer(tiles=tiles, like_gpt_oss=True)
    for name in ("dispatch_gemm", "staged_gemm"):
        assert not made[name].compile().spills, name
    plain = launches.layer(tiles=tiles)
    assert made["dispatch_gemm"].source.hash() != plain["dispatch_gemm"].source.hash()
    forward, backward = launches.training_launches("pre", tiles, like_gpt_oss=True)
    for one in (*forward, *backward):
        assert not one.compile().spills, one.name
    made = [one.name for one in backward]
    assert made.count("bias_gradient") == 2
    assert made.count("bias_weight_gradient") == 1


@of_this_triton
@pytest.mark.skipif(TRACING, reason="recording takes some of the registers")
@pytest.mark.parametrize("like_gpt_oss", [False, True])
@pytest.mark.parametrize("block_m", cases.slow_unless([(64,)], [64, 32, 16]))
def test_gemms_of_e4m3_do_not_spill(block_m, like_gpt_oss):
    problem = [GemmProblem(torch.float8_e4m3fn, **PROBLEM, gated=gated) for gated in (True, False)]
    tiles = tuple(next(candidates(one, block_m)) for one in problem)
    made = launches.layer(tiles=tiles, is_quantized=True, like_gpt_oss=like_gpt_oss)
    for name in ("dispatch_gemm", "staged_gemm", "quantize_rows"):
        assert not made[name].compile().spills, name
    assert "e4m3" in made["staged_gemm"].compile().ptx or block_m < 64


@of_this_triton
def test_what_runs_concurrently_with_a_gemm_finds_room():
    """However many stages sums return in."""
    pair = configs(128, gated=True)[0], leave_room_for_sums(configs(128)[0])
    for stages in (1, 6, 8, 16):
        with chosen(num_return_stages=stages):
            made = launches.layer(tiles=pair)
        concurrent = made["push_fused"], *[made["copy_rows"]] * 2
        find_room(made["dispatch_gemm"].compile(), concurrent)
        find_room(made["staged_gemm"].compile(), [made["return_sums"]] * 2)
        for name in ("dispatch_gemm", "staged_gemm", "fused_sum"):
            assert made[name].compile().spill_bytes == 0


@of_this_triton
def test_what_runs_concurrently_with_claimed_tiles_finds_room():
    """Their loops stay pipelined, as the claim is one instruction to the compiler; and what the
    last tile left to this one, the stage that it was in, is written where a tile ends alone."""
    pair = configs(128, gated=True)[0], leave_room_for_sums(configs(128)[0])
    with chosen(claims_tiles=True):
        up, down = (launches.layer(tiles=pair)[f"{name}_gemm"] for name in ("dispatch", "staged"))
        _, backward = launches.trained_layer("pre", pair)
    made = recorded()
    for gemm in (up, backward["dispatch_gemm"]):
        find_room(gemm.compile(), [made["push_fused"], made["copy_rows"]])
    for gemm in (down, backward["staged_gemm"]):
        find_room(gemm.compile(), [made["return_sums"]] * 2)
        # The end of a tile in the pipelined loop, and in that for products of no depth; the last.
        ptx, drain = gemm.compile().ptx, "cp.async.bulk.wait_group 0; fence"
        ends = re.findall(f"{re.escape(drain)}|known here", ptx)
        assert ends == [drain, "known here", drain, "known here", drain]
        assert "wgmma.wait_group.sync.aligned 0;" in ptx[: ptx.index("known here")]
    for gemm in (up, down, backward["dispatch_gemm"], backward["staged_gemm"]):
        assert gemm.compile().spill_bytes == 0
        assert "bar.red.popc.u32" in gemm.compile().ptx
        assert "wgmma.wait_group.sync.aligned 1;" in gemm.compile().ptx


def find_room(gemm, others):
    """Other launches do, with a GEMM of 8 warps on their SM: it has 228 KiB of shared memory, 1 KiB
    of it for each program, and four quarters, each of which runs a fourth of the warps and has
    16,384 registers."""
    built = [(launch.options.num_warps, launch.compile()) for launch in others]
    assert not any(one.spills for _, one in built)
    free = 16384 - 2 * 32 * round_up(gemm.registers, 8)
    most = max(32 * round_up(one.registers, 8) for _, one in built)
    assert sum(num_warps for num_warps, _ in built) <= 4 * (free // most)
    assert gemm.shared_bytes + sum(one.shared_bytes + 1024 for _, one in built) <= 227 * 1024


def test_kernels_record_where_they_are_told_to():
    """By one instruction to the compiler, so that GEMMs stay pipelined: products are in flight
    while the next rows are waited for."""
    both = gemms(configs(128, gated=True)[0], configs(128)[0])
    others = [recorded()[name].compile() for name in (*CONCURRENT, "fused_sum")]
    for built in (*both, *others):
        assert ("%smid" in built.ptx) == TRACING
    for built in both:
        assert "wgmma.wait_group.sync.aligned 1;" in built.ptx


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_all_compile(arch):
    for launch in recorded(arch=arch).values():
        launch.compile(arch)
    compile_kernel(ping_kernel, {"times": "*i64", "context": "*i64"}, {"ROUNDS": 200}, arch)


@of_this_triton
@pytest.mark.slow
@pytest.mark.parametrize("block_m", [128, 64, 32, 16])
def test_kernels_of_training_do_not_spill(block_m):
    """And what runs concurrently with the products of a backward finds room there."""
    ups, downs = configs(block_m, gated=True), configs(block_m)
    for index in range(max(len(ups), len(downs))):
        pair = ups[index % len(ups)], downs[index % len(downs)]
        for save in ("rows", "pre"):
            forward, backward = launches.trained_layer(save, pair)
            made = [forward["dispatch_gemm"], *backward.values()]
            for launch in made:
                assert not launch.compile().spills, (launch.name, pair)
    arriving = [backward["push_fused"], backward["copy_rows"]]
    find_room(backward["dispatch_gemm"].compile(), arriving)
    find_room(backward["staged_gemm"].compile(), [backward["return_sums"]] * 2)


@of_this_triton
@pytest.mark.parametrize(
    ("into", "accumulate"),
    [pytest.param(torch.bfloat16, False, marks=pytest.mark.slow), (torch.float32, True)],
)
def test_what_runs_concurrently_with_gradients_of_weights_finds_room(into, accumulate):
    """Of new tensors as of a sink, to which they are added."""
    pair = configs(128, gated=True)[0], configs(128)[0]
    with chosen(num_stages=2):  # where rows come at once, nothing runs concurrently
        _, backward = launches.trained_layer("pre", pair, into=into, accumulate=accumulate)
    arriving, last = backward["dispatch_wgrad"].compile(), backward["wgrad"].compile()
    assert TRACING or not (arriving.spills or last.spills)  # recording takes some registers
    find_room(arriving, [backward["push_fused"], backward["copy_rows"]])
    for name in ("return_sums", "fused_sum"):
        find_room(last, [backward[name]] * 2)


def test_all_layouts_of_weights_use_the_same_kernels():
    pair = configs(128, gated=True)[0], configs(128)[0]
    plain, other = (launches.trained_layer("pre", pair, interleaved=one) for one in (False, True))
    for made, again in zip(plain, other, strict=True):
        assert made.keys() == again.keys()
        assert all(made[name].source.hash() == again[name].source.hash() for name in made)


@pytest.mark.parametrize("num_topk", cases.slow_unless([(3,), (16,)], [1, 2, 3, 16]))
def test_sums_compile_for_any_topk(num_topk):
    made = recorded(num_topk=num_topk)
    for name in ("return_sums", "fused_sum"):
        made[name].compile()


def test_stages_are_announced_after_their_stores():
    """Before programs are counted their TMA stores are drained and fenced, and all threads meet;
    the count releases."""
    _, down = gemms(configs(128, gated=True)[0], configs(128)[0])
    ptx, last = down.ptx, 0
    for _ in range(ptx.count("cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0;")):
        last = ptx.index("cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0;", last + 1)
        release = ptx.index("atom.global.gpu.release.add.u64", last)
        assert "cp.async.bulk.tensor" not in ptx[last:release]
    assert last


def test_rows_are_read_after_their_flags():
    """In the pipelined loop each tile's counter is acquired, and fenced, before its loads."""
    up, _ = gemms(configs(128, gated=True)[0], configs(128)[0])
    loop = up.ptx[up.ptx.index("wgmma.mma_async") - 6000 :]
    wait = loop.index("ld.acquire.gpu.global.b64 seen, [")
    assert wait < loop.index("fence.proxy.async", wait) < loop.index("cp.async.bulk.tensor", wait)


@pytest.mark.parametrize("name", ["dispatch_gemm", "dispatch_wgrad"])
def test_rows_of_a_backward_are_read_after_their_flags(name):
    """As in a forward; the products stay in flight while the next rows are waited for."""
    _, backward = launches.trained_layer("pre", (configs(128, gated=True)[0], configs(128)[0]))
    ptx = backward[name].compile().ptx
    assert "wgmma.wait_group.sync.aligned 1;" in ptx
    wait = ptx.index("ld.acquire.gpu.global.b64 seen, [")
    # Of rows. Triton 3.7 writes shared::cta.
    loads = re.finditer(r"cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global", ptx)
    assert wait < ptx.index("fence.proxy.async", wait) < next(loads).start()


def test_launches_of_a_backward():
    """Gradients of weights are launched after the sums that return, and before those are added up;
    x is sent again for that of w_gate_up where it was not saved, and for the pre-activations."""
    pair = configs(128, gated=True)[0], configs(128)[0]
    route = "layout layout_sum exchange_fused place_rows staged_schedule push_fused copy_rows "
    again = "exchange_fused staged_schedule push_fused copy_rows "
    first = "dispatch_gemm send_return_metadata activation_gradient "
    last = "staged_gemm return_sums wgrad "
    wanted = {
        "all": route + first + last + "wgrad fused_sum",
        "rows": route + "dispatch_gemm send_return_metadata grouped_gemm activation_gradient "
        f"{last}wgrad fused_sum",
        "pre": f"{route}{first}{last}fused_sum {again}dispatch_wgrad release",
        "none": f"{route}dispatch_gemm release {again}{first}{last}fused_sum {again}"
        "dispatch_wgrad release",
    }
    for save, names in wanted.items():
        assert [one.name for one in launches.training_launches(save, pair)[1]] == names.split()


def test_launches_of_a_backward_that_delays():
    """It keeps rows of dy and of x, and computes no gradient of weights."""
    pair = configs(128, gated=True)[0], configs(128)[0]
    for save, num_kept in dict(all=1, rows=1, pre=2, none=2).items():
        _, made = launches.training_launches(save, pair, is_delayed=True)
        names = [one.name for one in made]
        assert names.count("keep_rows") == num_kept
        assert names.index("fused_sum") < names.index("keep_rows")
        assert not {"wgrad", "dispatch_wgrad"}.intersection(names)
