"""What the tests of the low-latency verbs share: inputs, calls on a Buffer, the comparison."""

from __future__ import annotations

from types import MappingProxyType

import cases
import torch
from einops import rearrange

from moe_engine import Buffer, Options
from moe_engine import low_latency_reference as reference
from moe_engine.emulation import PerRank
from moe_engine.grouped_gemm.quantization import BLOCK, EXPONENT_BIAS

FORMS = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "rounded": {"round_scale": True},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
}
"""The formats of rows: keywords of a dispatch."""
NO_FLAGS = MappingProxyType({})
ON_GPU_CALLS = 20
EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 12, 3, 512, 4
"""Of most tests: on a GPU each other shape compiles."""
SHAPE = MAX_TOKENS, EXPERTS


def make_inputs(num_ranks, num_tokens, hidden, num_experts, num_topk, kind, seed=0):
    """Per-rank lists (x bf16, topk_idx, topk_weights); rank r has num_tokens[r % len] tokens.

    Blocks of 128 columns differ in magnitude, some are zero. Weights are powers of two, so that
    their products are exact and sums have the same bits with and without fused multiply-adds.
    """
    inputs = []
    for rank in range(num_ranks):
        count = num_tokens[rank % len(num_tokens)]
        generator = torch.Generator().manual_seed(seed + rank)
        x = torch.randn(count, hidden, generator=generator)
        sizes = torch.randint(-20, 13, (count, -(-hidden // 128)), generator=generator)
        sizes = torch.where(sizes < -17, 0.0, torch.exp2(sizes.float()))
        x *= sizes.repeat_interleave(128, dim=1)[:, :hidden]
        idx = cases.route(kind, count, num_experts, num_topk, seed + rank)
        if kind == "duplicates":
            idx[::2, -1] = idx[::2, 0]
        weights = torch.exp2(torch.randint(-3, 3, idx.shape, generator=generator).float())
        inputs.append((x.bfloat16(), idx, weights))
    return [list(part) for part in zip(*inputs, strict=True)]


def make_buffer(group, max_tokens, hidden, num_experts, num_slots=2, timeout_s=None, **more):
    """A Buffer of the hinted size for `num_slots` calls in flight."""
    num_bytes = Buffer.get_low_latency_rdma_size_hint(
        max_tokens, hidden, group.size(), num_experts, num_slots
    )
    options = Options(num_slots=num_slots, timeout_s=timeout_s)
    return Buffer(group, 0, num_bytes, low_latency_mode=True, options=options, **more)


def poison(buffer):
    """NaN everywhere a row can lie; rows must be written before they are read."""
    for memory in buffer._low_latency.memories:
        memory.block.local[memory.layout.slots :].fill_(0xFF)
    if buffer.device.type == "cuda":
        torch.cuda.synchronize()  # the barrier that follows is one of the hosts alone


def to_device(*tensors):
    return [tensor.to(cases.device()) for tensor in tensors]


def cast_back(rows, scales):
    """bf16 [..., H] of e4m3 rows and their scales, float32 or packed."""
    if scales.dtype == torch.int32:
        shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
        exponents = rearrange(scales[..., None] >> shifts & 255, "... i b -> ... (i b)")
        scales = torch.exp2(exponents.float() - EXPONENT_BIAS)
    blocks = rearrange(rows.float(), "... (b c) -> ... b c", c=BLOCK)
    return rearrange(blocks * scales[..., None], "... b c -> ... (b c)").bfloat16()


def run_experts(recv_x, rank):
    """Expert e's rows times its number, in bf16; numbers of other magnitudes on other ranks."""
    rows = cast_back(*recv_x) if isinstance(recv_x, tuple) else recv_x
    num_local = rows.shape[0]
    numbers = (1.5 + torch.arange(num_local, device=rows.device)) * (-3.0) ** rank
    return (rows.float() * numbers[:, None, None]).bfloat16()


def finish(event, hook, async_finish=False, return_recv_hook=False):
    """Wait for a call as its flags ask for."""
    assert (hook is not None) is return_recv_hook
    assert (event.event is not None) is async_finish
    if hook is not None:
        hook()
    event.current_stream_wait()


def dispatch(buffer, x, topk_idx, max_tokens, num_experts, form="bf16", flags=NO_FLAGS, **more):
    """(recv_x, counts, handle) of a finished dispatch."""
    recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, topk_idx, max_tokens, num_experts, **FORMS[form], **flags, **more
    )
    finish(event, hook, **flags)
    return recv_x, counts, handle


def combine(buffer, y, topk_idx, topk_weights, handle, flags=NO_FLAGS, **more):
    """The sums of a finished combine."""
    out, event, hook = buffer.low_latency_combine(
        y, topk_idx, topk_weights, handle, **flags, **more
    )
    finish(event, hook, **flags)
    return out


def round_trip(buffer, x, topk_idx, topk_weights, max_tokens, num_experts, form, flags=NO_FLAGS):
    """A dispatch, the experts and their combine: everything that `check` compares."""
    recv_x, counts, handle = dispatch(buffer, x, topk_idx, max_tokens, num_experts, form, flags)
    y = run_experts(recv_x, buffer.rank)
    out = combine(buffer, y, topk_idx, topk_weights, handle, flags)
    return result(recv_x, counts, handle, y, out)


def result(recv_x, counts, handle, y, out):
    """Tensors of one rank by name, what lies after the counts set as the oracle has it."""
    rows, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    valid = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
    found = {
        "x": torch.where(valid[..., None], rows.view(torch.uint8), 0),
        "counts": counts,
        "src_info": torch.where(valid, handle[0], -1),
        "layout_range": handle[1],
        "y": torch.where(valid[..., None], y, 0),
        "out": out,
    }
    if scales is not None:
        assert scales.stride(1) == 1  # column-major
        found["scales"] = torch.where(valid[..., None], scales, 0)
    return found


def to_cpu(found):
    return {name: tensor.cpu() for name, tensor in found.items()}


def differences(one, other):
    """The names of what differs between two results."""
    return [name for name in one if not torch.equal(one[name], other[name])]


def check(
    results,
    x,
    topk_idx,
    topk_weights,
    max_tokens,
    num_experts,
    form,
    gone=(),
    gone_at_dispatch=None,
    node_ranks=None,
):
    """All ranks' results to the bit. Ranks in `gone` are masked and have no result; in the dispatch
    those in `gone_at_dispatch` are masked, if given. node_ranks: of a node, where there are
    several."""
    if gone_at_dispatch is None:
        gone_at_dispatch = gone
    sent = reference.without(topk_idx, gone_at_dispatch, num_experts)
    returned = reference.without(topk_idx, gone, num_experts)
    received = reference.low_latency_dispatch(x, sent, max_tokens, num_experts, **FORMS[form])
    check_received(results, received, gone)
    y = [
        part.x if have is None else have["y"] for have, part in zip(results, received, strict=True)
    ]
    sums = reference.low_latency_combine(y, received, returned, topk_weights, node_ranks)
    for rank, have in enumerate(results):
        if rank not in gone:
            assert torch.equal(have["out"], sums[rank]), f"sums of rank {rank}"


def check_received(results, received, gone=()):
    for rank, (have, want) in enumerate(zip(results, received, strict=True)):
        if rank in gone:
            continue
        assert torch.equal(have["counts"], want.counts), f"counts of rank {rank}"
        assert have["counts"].dtype == torch.int32
        assert torch.equal(have["layout_range"], want.layout_range)
        assert torch.equal(have["src_info"], want.src_info)
        assert (have["src_info"].dtype, have["layout_range"].dtype) == (torch.int32, torch.int64)
        assert torch.equal(have["x"], want.x.view(torch.uint8)), f"rows of rank {rank}"
        assert (want.scales is None) is ("scales" not in have)
        if want.scales is not None:
            assert have["scales"].dtype == want.scales.dtype
            assert torch.equal(have["scales"], want.scales), f"scales of rank {rank}"


def batches(num_ranks, count, num_tokens=(MAX_TOKENS, 3, 0)):
    """`count` inputs, each with lists of all ranks, and PerRank lists of each rank's batches."""
    kinds = ["holes", "uniform", "duplicates"]
    inputs = [
        make_inputs(num_ranks, num_tokens, HIDDEN, EXPERTS, TOPK, kinds[seed % 3], 10 * seed)
        for seed in range(count)
    ]
    return inputs, PerRank(
        [tuple(part[rank] for part in batch) for batch in inputs] for rank in range(num_ranks)
    )


def check_batches(results, inputs, forms, node_ranks=None):
    """All ranks' results of each batch, in its form, to the bit."""
    for number, (batch, form) in enumerate(zip(inputs, forms, strict=True)):
        of_batch = [found[number] for found in results]
        check(of_batch, *batch, *SHAPE, form, node_ranks=node_ranks)


def run_round_trips(group, forms, max_tokens, num_experts, x, topk_idx, topk_weights):
    """Round trips on fresh memory in each form; on GPUs 20 of each, with another rank late, all the
    same bits."""
    args = to_device(x, topk_idx, topk_weights)
    buffer = make_buffer(group, max_tokens, x.shape[1], num_experts)
    results = {}
    for form in forms:
        for call in range(ON_GPU_CALLS if args[0].is_cuda else 1):
            poison(buffer)
            torch.distributed.barrier(group)
            if args[0].is_cuda and group.rank() == call % group.size():
                torch.cuda._sleep(1_000_000)
            found = round_trip(buffer, *args, max_tokens, num_experts, form)
            found = to_cpu(found)
            different = differences(found, results.setdefault(form, found))
            assert not different, f"call {call} differs from call 0 in {different}"
            torch.distributed.barrier(group)
    buffer.check()
    buffer.destroy()
    return results


def check_case(pool, num_ranks, num_tokens, max_tokens, hidden, num_experts, num_topk, kind, forms,
               seed=0, node_ranks=None):  # fmt: skip
    """Round trips of all ranks in each form, to the bit."""
    inputs = make_inputs(num_ranks, num_tokens, hidden, num_experts, num_topk, kind, seed)
    check_inputs(pool, inputs, max_tokens, num_experts, forms, node_ranks)


def check_inputs(pool, inputs, max_tokens, num_experts, forms, node_ranks=None):
    """Round trips of all ranks with these inputs in each form, to the bit."""
    num_ranks = len(inputs[0])
    results = pool.run(
        run_round_trips, forms, max_tokens, num_experts, *map(PerRank, inputs), num_ranks=num_ranks
    )
    for form in forms:
        of_form = [result[form] for result in results]
        check(of_form, *inputs, max_tokens, num_experts, form, node_ranks=node_ranks)
