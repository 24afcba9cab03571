"""Rows read where they lie: `dispatch(in_place=True)` and `release`."""

from __future__ import annotations

from weakref import ref

import cases
import pytest
import torch
import triton
import triton.language as tl
from dispatch_cases import make_buffer, make_inputs, poison

from moe_engine import BackendError, RoutingError, reference
from moe_engine.device.lang import as_pointer
from moe_engine.emulation import PerRank


def rows_at(address, like):
    """The rows [N, H] at `address` [N], read by a kernel as a user would write one."""
    out = like.view(torch.int16).new_zeros(len(address), like.shape[1])
    if len(address):
        read_rows[(len(address),)](address, out, like.shape[1], BLOCK=64)
    return out.view(like.dtype)


@triton.jit
def read_rows(address, out, hidden, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    at = as_pointer(tl.load(address + row), out.dtype.element_ty) + columns
    tl.store(out + row * hidden + columns, tl.load(at, mask=columns < hidden), columns < hidden)


def read_in_place(group, backend, num_worst_tokens, num_experts, x, topk_idx, topk_weights):
    """Rows received in place and as copies, with their metadata, twice on one Buffer."""
    x, topk_idx, topk_weights = (t.to(cases.device()) for t in (x, topk_idx, topk_weights))
    buffer = make_buffer(group, x, num_experts, topk_idx.shape[1], 64, backend)
    poison(buffer)
    torch.distributed.barrier(group)
    results = []
    for _ in range(2):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        args = x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights, 1
        address, ids, weights, counts, handle, _ = buffer.dispatch(
            *args, num_worst_tokens, in_place=True
        )
        num_rows = int(handle.rank_prefix_matrix[-1, group.rank()])
        rows = rows_at(address[:num_rows], x)
        with pytest.raises(BackendError, match="release"):
            buffer.combine(rows, handle)
        buffer.release()
        copies = buffer.dispatch(*args, num_worst_tokens)
        with pytest.raises(BackendError, match="no rows in place"):
            buffer.release()
        assert (counts or []) == (copies[3] or [])
        assert len(address) == (num_worst_tokens or num_rows)
        for have, want in ((rows, copies[0]), (ids, copies[1]), (weights, copies[2])):
            assert torch.equal(have[:num_rows], want[:num_rows])
        assert (ids[num_rows:] == -1).all()
        assert buffer.combine(copies[0], handle)[0].shape == x.shape
        results.append(rows.cpu())
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    assert torch.equal(*results)
    return results[0]


@pytest.mark.parametrize("num_worst_tokens", [0, 192])
@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_rows_in_place(pool, backend, num_worst_tokens):
    inputs = make_inputs(3, [36, 0, 20], 48, 12, 3, "holes", "bf16")
    results = pool.run(
        read_in_place, backend, num_worst_tokens, 12, *(PerRank(part) for part in inputs),
        num_ranks=3,
    )  # fmt: skip
    for rows, want in zip(results, reference.dispatch(*inputs, 12), strict=True):
        assert torch.equal(rows, want.x)


def call_between(group, backend, x, topk_idx, topk_weights):
    """What may be called while rows are in place, when bad ids are reported, and that a destroyed
    Buffer holds no rows."""
    x, topk_idx, topk_weights = (t.to(cases.device()) for t in (x, topk_idx, topk_weights))
    buffer = make_buffer(group, x, 12, topk_idx.shape[1], 64, backend)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 12)
    args = x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights
    buffer.dispatch(*args, in_place=True)
    bad_ids = torch.full_like(topk_idx, 12)
    buffer.get_dispatch_layout(bad_ids, 12)
    with pytest.raises(RoutingError, match=str(bad_ids.numel())):
        buffer.check()
    if backend == "auto":
        assert buffer.get_local_buffer_tensor(torch.uint8).numel() > 0
    buffer.release()
    buffer.dispatch(*args)
    of_its_own = x.clone()
    buffer.dispatch(of_its_own, *args[1:], in_place=True)
    held = ref(of_its_own)
    del of_its_own
    torch.distributed.barrier(group)
    assert not buffer.is_destroyed
    buffer.destroy()
    assert buffer.is_destroyed and held() is None


@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_bad_ids_are_told_while_rows_are_in_place(pool, backend):
    inputs = make_inputs(2, [7, 20], 16, 12, 2, "uniform", "bf16")
    pool.run(call_between, backend, *(PerRank(part) for part in inputs), num_ranks=2)
