"""Calls of real Buffers, and what they launch: what tests of bundles look up, and make on a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from unittest import mock

import cases
import nvshmem_cases
import torch

from moe_engine import Buffer, ElasticBuffer, Options, moe_ffn, ops, symm
from moe_engine.engines import internode_layer
from moe_engine.engines.kernel_verbs import KernelVerbs
from moe_engine.hardware import H200, stand_in
from moe_engine.kernel_bundle import Variant
from moe_engine.launch import collecting, is_collecting
from moe_engine.tools.lone_rank import kernel_engine

SIZES = dict(hidden=256, num_topk=4)


def launched(group, function, *args):
    """(kernel, key) of each launch that calls of Buffers make as on GPUs, on ranks of a CPU. None
    is made: so each rank believes that it received some rows."""
    keys = set()

    def collect(kernel, grid, arguments, options):
        variant = Variant.of(kernel, 90, arguments, options)
        keys.add((variant.name, variant.key))

    def received(engine, counts):
        per_expert = torch.tensor([3, 0, 5, 1])
        return torch.cat([torch.tensor([7]), per_expert])

    def new_rows(*args):
        rows = new_rows_of_engine(*args)
        if rows.topk_idx is not None:
            rows.topk_idx.zero_()
        return rows

    new_rows_of_engine = KernelVerbs.new_rows
    with (
        stand_in(H200),
        nvshmem_cases.version_installed(3, 6, 5),
        collecting(collect),
        mock.patch.object(symm, "_check_emulation", lambda: None),
        mock.patch.object(KernelVerbs, "_received", received),
        mock.patch.object(KernelVerbs, "new_rows", new_rows),
    ):
        function(group, *args)
    return keys


def layouts(shape):
    """The kernels of a layout, the smallest there are."""
    engine = kernel_engine(shape.num_ranks, 8, shape.region_bytes(8))
    engine.layout(shape.tokens(8)[1], shape.num_experts)


def inputs_of(count, requires_grad=False):
    """x, topk_idx and topk_weights of a rank."""
    x = torch.zeros(count, 256, dtype=torch.bfloat16, requires_grad=requires_grad)
    topk_idx = (torch.arange(count)[:, None] + torch.arange(4)) % 16
    return x, topk_idx, torch.zeros(count, 4)


def normal_calls(group):
    """Dispatches and combines in all their forms, by Buffers of both kinds."""
    num_experts = 4 * group.size()
    grows = Buffer(group, Buffer.size_hint(40, 512, group.size(), num_experts, 4))
    fixed = Buffer.for_tokens(group, 40, num_experts=num_experts, **SIZES)
    for buffer, count in ((fixed, 40), (grows, 7), (fixed, 1), (grows, 0)):
        x, idx, weights = inputs_of(count)
        rows = x.to(torch.float8_e4m3fn), torch.zeros(count, 2)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
        counts = dict(num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node)
        counts |= dict(is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
        for sent, routed, more in (
            (x, (idx, weights), {}),
            (rows, (idx, weights), {}),
            (x, (idx, weights), dict(num_worst_tokens=160)),
            (rows, (idx, weights), dict(in_place=True)),
            (x, (None, None), {}),
        ):
            names = dict(zip(("topk_idx", "topk_weights"), routed, strict=True))
            *_, handle, _ = buffer.dispatch(sent, **counts, **names, **more)
            if "in_place" in more:
                buffer.release()
        for again in (x, rows):
            buffer.dispatch(again, handle)
        y = torch.zeros(len(handle[7]), 256, dtype=x.dtype)
        buffer.combine(y, handle)
        buffer.combine(y, handle, torch.zeros(len(y), 4), (x, x))
    destroy(group, grows, fixed)


def low_latency_calls(group):
    """Of all formats, with and without hooks and counts."""
    num_ranks, num_experts = group.size(), 4 * group.size()
    hint = Buffer.get_low_latency_rdma_size_hint(40, 256, num_ranks, num_experts)
    buffers = (
        Buffer.for_tokens(group, 40, num_experts=num_experts, **SIZES),
        Buffer(group, num_rdma_bytes=hint, low_latency_mode=True),
    )
    formats = {}, dict(use_fp8=False), dict(round_scale=True)
    for number, (buffer, form) in enumerate((one, form) for one in buffers for form in formats):
        x, idx, weights = inputs_of((0, 1, 7, 16, 33, 40)[number])
        for hooked, most in ((False, 40), (True, 33)):
            stats = torch.zeros(4, dtype=torch.int32) if hooked else None
            waited = torch.zeros(num_ranks, dtype=torch.int64) if hooked else None
            if len(x) > most:
                continue
            more = dict(cumulative_local_expert_recv_stats=stats, return_recv_hook=hooked)
            more["dispatch_wait_recv_cost_stats"] = waited
            *_, handle, _, hook = buffer.low_latency_dispatch(
                x, idx, most, num_experts, **form, **more
            )
            if hooked:
                hook()
            y = torch.zeros(4, num_ranks * most, 256, dtype=x.dtype)
            more = dict(combine_wait_recv_cost_stats=waited, return_recv_hook=hooked)
            *_, add_up = buffer.low_latency_combine(y, idx, weights, handle, **more)
            if hooked:
                add_up()
    destroy(group, *buffers)


def decode_layers(group):
    """`moe_ffn` of few tokens."""
    buffer = Buffer.for_tokens(group, 40, num_experts=4 * group.size(), **SIZES)
    for count in (0, 1, 7, 16, 33, 40):
        x, idx, weights = inputs_of(count)
        up = torch.zeros(4, 256, 256, dtype=x.dtype)
        down = torch.zeros(4, 256, 128, dtype=x.dtype)
        moe_ffn(x, idx, weights, up, down, buffer)
        moe_ffn(x, idx, weights, up, down, buffer, max_tokens=max(1, count))
    assert cases.num_low_latency_calls(buffer) or is_collecting()
    destroy(group, buffer)


def layers(group):
    """`moe_ffn` forward and backward, and expert rows."""
    num_experts, options = 4 * group.size(), Options(decode_tokens=0)
    buffer = Buffer.for_tokens(group, 40, num_experts=num_experts, **SIZES, options=options)
    for count in (1, 40):
        x, idx, weights = inputs_of(count)
        up = torch.zeros(4, 256, 256, dtype=x.dtype)
        down = torch.zeros(4, 256, 128, dtype=x.dtype)
        moe_ffn(x, idx, weights, up, down, buffer)
        x, idx, weights = inputs_of(count, requires_grad=True)
        for save in ("none", "all"):
            leaves = x, up.requires_grad_(), down.requires_grad_()
            y = moe_ffn(x, idx, weights, up, down, buffer, save=save)
            torch.autograd.grad(y, leaves, torch.zeros_like(y))
        for max_rows in (None, 640):
            got = ops.dispatch(x, idx, weights, num_experts, buffer, max_rows=max_rows)
            y = ops.combine(got.rows, got.plan, buffer)
            torch.autograd.grad(y, x, torch.zeros_like(y))
    destroy(group, buffer)


def in_parts():
    """Layers have two parts, whichever are predicted to be faster; nothing tells how many rows."""
    sizes = internode_layer.Sizes(40, 30, 20)
    return mock.patch.multiple(internode_layer, is_faster=lambda *_: True, _sizes=lambda *_: sizes)


def layers_in_parts(group):
    with in_parts():
        layers(group)


def layers_in_e4m3(group):
    """Layers with e4m3 weights, of each kind."""
    for decode_tokens, how in ((40, nullcontext()), (0, nullcontext()), (0, in_parts())):
        options = Options(decode_tokens=decode_tokens)
        sizes = SIZES | dict(num_experts=4 * group.size(), options=options)
        buffer = Buffer.for_tokens(group, 40, **sizes)
        up, down = (torch.zeros(4, 256, n, dtype=torch.float8_e4m3fn) for n in (256, 128))
        scales = (torch.zeros(4, 2, n) for n in (2, 1))
        weights = [*zip((up, down), scales, strict=True)]
        with how:
            for count in (1, 16, 40):
                moe_ffn(*inputs_of(count), *weights, buffer)
        destroy(group, buffer)


def elastic_calls(group):
    """Calls of ElasticBuffers, of rows by token and by expert."""
    num_experts, sizes = 4 * group.size(), dict(num_max_tokens_per_rank=40, hidden=256)
    buffers = [
        ElasticBuffer(group, num_topk=num_topk, allow_multiple_reduction=many, **sizes)
        for num_topk, many in ((4, True), (0, False))
    ]
    for buffer, count, alignment in zip(buffers * 2, (40, 7, 1, 16), (1, 128, 8, 1), strict=True):
        x, idx, weights = inputs_of(count)
        rows = x.to(torch.float8_e4m3fn), torch.zeros(count, 2)
        stats = torch.zeros(4, dtype=torch.int32)
        for sent, expand, by_column in product((x, rows), (False, True), (False, True)):
            how = dict(do_expand=expand, use_tma_aligned_col_major_sf=by_column)
            more = how | dict(do_zero_padding=expand and by_column)
            *_, handle, _ = buffer.dispatch(
                sent, idx, weights, stats if by_column else None, num_experts=num_experts,
                expert_alignment=alignment, do_cpu_sync=False, **more,
            )  # fmt: skip
            buffer.dispatch(sent, topk_weights=weights, handle=handle, **more)
            buffer.dispatch(sent, handle=handle, **more)
            num_rows = handle.num_expanded_tokens if expand else handle.num_recv_tokens
            y, values = torch.zeros(num_rows, 256, dtype=x.dtype), torch.zeros(num_rows, 4)
            buffer.combine(y, handle)
            buffer.combine(y, handle, values[:, 0].clone() if expand else values, (x, x))
    destroy(group, *buffers)


def destroy(group, *buffers):
    """Give their memory back, once all ranks have ended their calls."""
    for buffer in () if is_collecting() else buffers:
        buffer.check()
    torch.distributed.barrier(group)
    for buffer in buffers:
        buffer.destroy()
