"""The capacity of a Buffer: what does not fit is refused, or the memory grows on all ranks."""

from __future__ import annotations

import gc
import weakref

import cases
import pytest
import torch
from dispatch_cases import make_inputs
from failure_cases import EXPERTS, dispatch, tokens

from moe_engine import Buffer, CapacityError, RoutingError, reference
from moe_engine.dispatch import Tokens
from moe_engine.emulation import PerRank
from moe_engine.symm.slots import RowLayout, SlotLayout
from moe_engine.utils import LINE_BYTES


def exceed_a_region(group):
    """Rows wider than those the Buffer was made for, and more of them than fit: nobody writes."""
    rank = torch.distributed.get_rank(group)
    buffer = Buffer.for_tokens(group, 8, 16, EXPERTS, 2, torch.bfloat16)
    x, idx, w = tokens(0 if rank else 8, 16, 2, cases.route("uniform", 8, EXPERTS, 2, 0))
    recv, _, _, _, handle, _ = dispatch(buffer, x.bfloat16(), idx[: len(x)], w)
    wide = torch.zeros(len(recv), 16, device=recv.device)
    torch.distributed.barrier(group)  # else a rank may be told while it still dispatches
    try:
        buffer.combine(wide.repeat(1, 64), handle)
        buffer.check()
    except CapacityError as error:
        return str(error)
    finally:
        torch.distributed.barrier(group)
    return None


def test_rows_beyond_a_region_are_not_written(pool):
    source, other = pool.run(exceed_a_region, num_ranks=2)
    assert "this Buffer's memory" in source
    assert other.startswith("rank 0 abandoned call 2")
    assert source in other


def outgrow(group, x, topk_idx, topk_weights):
    """A Buffer of the smallest size that holds a row grows for any dispatch and combine."""
    x, topk_idx, topk_weights = (t.to(cases.device()) for t in (x, topk_idx, topk_weights))
    num_bytes = Buffer.size_hint(1, 2 * x.shape[1], group.size(), EXPERTS, 2)
    buffer = Buffer(group, num_bytes)
    results, sizes = [], []
    for part in (slice(0, 1), slice(None), slice(0, 5)):
        recv, _, _, _, handle, _ = dispatch(buffer, x[part], topk_idx[part], topk_weights[part])
        out, *_ = buffer.combine(recv, handle)
        results.append((recv.cpu(), out.cpu()))
        sizes.append(buffer._engine.slots.layout.num_bytes)
    buffer.check()
    torch.distributed.barrier(group)
    with pytest.raises(CapacityError, match="size_hint"):
        args = (t.repeat(9, 1) for t in (x, topk_idx, topk_weights))
        dispatch(buffer, *args, num_worst_tokens=len(x) * 9 * group.size())
    buffer.destroy()
    return results, sizes


def test_memory_grows_on_all_ranks_alike(pool):
    inputs = make_inputs(3, [40, 11, 64], 16, EXPERTS, 2, "uniform", "bf16")
    by_rank = pool.run(outgrow, *(PerRank(part) for part in inputs), num_ranks=3)
    for call, part in enumerate((slice(0, 1), slice(None), slice(0, 5))):
        x, idx, w = ([tensor[part] for tensor in side] for side in inputs)
        wanted = reference.dispatch(x, idx, w, EXPERTS)
        for rank, (results, sizes) in enumerate(by_rank):
            recv, out = results[call]
            copies = reference.layout(idx[rank], EXPERTS, 3)[2].sum(1, keepdim=True)
            assert torch.equal(recv, wanted[rank].x)
            assert torch.equal(out, (x[rank].float() * copies).bfloat16())
            assert sizes == by_rank[0][1]
            assert sizes[0] < sizes[1] == sizes[2]


def grow_with_bad_ids(group):
    """What a dispatch raises that follows one with bad ids in a Buffer that had to grow."""
    x, idx, w = tokens(30, 16, 2, cases.route("uniform", 30, EXPERTS, 2, 0))
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    idx[3, 0] = EXPERTS
    buffer = Buffer(group, Buffer.size_hint(1, 64, group.size(), EXPERTS, 2))
    engine = buffer._engine
    engine.dispatch(Tokens(x, idx, w), engine.layout(idx, EXPERTS), 0)
    with pytest.raises(RoutingError, match="1 expert ids"):
        buffer.check()
    with pytest.raises(CapacityError, match="in parts"):
        buffer._engine._grow(70_000, RowLayout(64), 0)
    buffer.destroy()


def test_growing_forgets_no_bad_ids(pool):
    pool.run(grow_with_bad_ids, num_ranks=1)


def start_without_room(group):
    """The first dispatch of a Buffer whose regions do not even hold the counts."""
    num_bytes = SlotLayout(group.size(), LINE_BYTES).num_bytes
    buffer = Buffer(group, num_bytes)
    x, idx, w = tokens(12, 16, 2, cases.route("uniform", 12, EXPERTS, 2, group.rank()))
    recv, _, _, _, handle, _ = dispatch(buffer, x, idx, w)
    out, *_ = buffer.combine(recv, handle)
    buffer.check()
    buffer.destroy()
    return (x.cpu() * handle.is_token_in_rank.sum(1, keepdim=True).cpu()), out.cpu()


def test_a_buffer_without_room_for_counts_grows_first(pool):
    for wanted, out in pool.run(start_without_room, num_ranks=2):
        assert torch.equal(wanted, out)


def grow_after_capture(group):
    """What a rank raises when memory must grow that a graph of rank 1 uses."""
    buffer = Buffer(group, Buffer.size_hint(1, 64, group.size(), EXPERTS, 2))
    buffer._engine._was_captured = group.rank() == 1
    x, idx, w = tokens(30, 16, 2, cases.route("uniform", 30, EXPERTS, 2, 0))
    with pytest.raises(CapacityError) as raised:
        dispatch(buffer, x, idx, w)
    buffer.destroy()
    return str(raised.value)


def test_captured_memory_does_not_grow(pool):
    for text in pool.run(grow_after_capture, num_ranks=2):
        assert "captured on ranks 1" in text


def let_go(group):
    """Whether the symmetric block outlives destroy(), while the Buffer itself is alive."""
    buffer = Buffer(group, Buffer.size_hint(1, 64, group.size(), EXPERTS, 2))
    block = weakref.ref(buffer._engine.slots.block.local)
    buffer.destroy()
    gc.collect()
    return block() is not None


def test_destroy_gives_the_memory_back(pool):
    assert pool.run(let_go, num_ranks=2) == [False, False]
