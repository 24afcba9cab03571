"""Low-latency calls that are refused before a kernel runs: each error and a part of its text."""

from __future__ import annotations

import low_latency_cases as low_latency
import pytest
import torch
from failure_cases import fields_of_calls
from low_latency_cases import dispatch, to_device

from moe_engine import BackendError, Buffer, CapacityError, DtypeError, Options, ShapeError
from moe_engine.checks import check_shrink

EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 4, 2, 128, 8
SHAPE = MAX_TOKENS, EXPERTS

X = torch.zeros(4, HIDDEN).bfloat16()
IDX = torch.zeros(4, TOPK, dtype=torch.int64)
W = torch.zeros(4, TOPK)
Y = torch.zeros(EXPERTS, MAX_TOKENS, HIDDEN).bfloat16()

DISPATCH = {
    "x of fp32": (DtypeError, "x ", (X.float(), IDX, *SHAPE), {}),
    "x of three dimensions": (ShapeError, "x ", (X[None], IDX, *SHAPE), {}),
    "x as a pair": (DtypeError, "x ", ((X, X), IDX, *SHAPE), {}),
    "no columns": (ShapeError, "hidden", (X[:, :0], IDX, *SHAPE), {"use_fp8": False}),
    "ids of int32": (DtypeError, "topk_idx", (X, IDX.int(), *SHAPE), {}),
    "ids of one dimension": (ShapeError, "topk_idx", (X, IDX[:, 0], *SHAPE), {}),
    "ids of other tokens": (ShapeError, "topk_idx", (X, IDX[:3], *SHAPE), {}),
    "no top-k": (ShapeError, "topk_idx", (X, IDX[:, :0], *SHAPE), {}),
    "ids on another device": (ShapeError, "topk_idx", (X, IDX.to("meta"), *SHAPE), {}),
    "more experts than are counted": (CapacityError, "1008", (X, IDX, MAX_TOKENS, 1017), {}),
    "no experts": (ShapeError, "num_experts", (X, IDX, MAX_TOKENS, 0), {}),
    "no room": (CapacityError, "num_max_dispatch_tokens_per_rank", (X, IDX, 0, EXPERTS), {}),
    "more tokens than said": (
        CapacityError,
        "num_max_dispatch_tokens_per_rank",
        (X, IDX, 3, EXPERTS),
        {},
    ),
    "too many for a low-latency call": (CapacityError, "4096", (X, IDX, 4097, EXPERTS), {}),
    "more than the memory holds": (
        CapacityError,
        "get_low_latency_rdma_size_hint",
        (X, IDX, 4096, EXPERTS),
        {},
    ),
    "blocks that are not full": (ShapeError, "128", (X[:, :96], IDX, *SHAPE), {}),
    "exponents that are not full": (
        ShapeError,
        "512",
        (X, IDX, *SHAPE),
        {"round_scale": True, "use_ue8m0": True},
    ),
    "exponents of scales that are not rounded": (
        ShapeError,
        "round_scale",
        (X.repeat(1, 4), IDX, *SHAPE),
        {"use_ue8m0": True},
    ),
    "two ways to wait": (
        ShapeError,
        "return_recv_hook",
        (X, IDX, *SHAPE),
        {"return_recv_hook": True, "async_finish": True},
    ),
    "statistics of another type": (
        DtypeError,
        "cumulative_local_expert_recv_stats",
        (X, IDX, *SHAPE),
        {"cumulative_local_expert_recv_stats": torch.zeros(EXPERTS, dtype=torch.int64)},
    ),
    "statistics of another length": (
        ShapeError,
        "cumulative_local_expert_recv_stats",
        (X, IDX, *SHAPE),
        {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)},
    ),
    "costs of another type": (
        DtypeError,
        "dispatch_wait_recv_cost_stats",
        (X, IDX, *SHAPE),
        {"dispatch_wait_recv_cost_stats": torch.zeros(1, dtype=torch.int32)},
    ),
    "costs of another length": (
        ShapeError,
        "dispatch_wait_recv_cost_stats",
        (X, IDX, *SHAPE),
        {"dispatch_wait_recv_cost_stats": torch.zeros(2, dtype=torch.int64)},
    ),
}


def on_device(value):
    return to_device(value)[0] if isinstance(value, torch.Tensor) and not value.is_meta else value


def refuse(group, table):
    """Each call of `table` fails as it says, and no kernel has run."""
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    fields = fields_of_calls(buffer._low_latency.ring.context)
    for name, (kind, text, args, more) in table.items():
        args, more = map(on_device, args), {key: on_device(value) for key, value in more.items()}
        with pytest.raises(kind, match=text) as caught:
            buffer.low_latency_dispatch(*args, **more)
        assert str(caught.value).endswith((".", ")")), name
    assert torch.equal(fields_of_calls(buffer._low_latency.ring.context), fields)
    buffer.destroy()


def test_dispatches_that_are_refused(pool):
    pool.run(refuse, DISPATCH, num_ranks=1)


def refuse_combine(group):
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    x, idx, weights = to_device(X, IDX, W)
    y, _, handle = dispatch(buffer, x, idx, *SHAPE)
    fields = fields_of_calls(buffer._low_latency.ring.context)
    out = torch.empty_like(x)
    costs = torch.zeros(1, dtype=torch.int64, device=x.device)
    good = y, idx, weights, handle
    refused = [
        (DtypeError, "x ", (y.float(), idx, weights, handle), {}),
        (ShapeError, "x ", (y[:, :-1], idx, weights, handle), {}),
        (ShapeError, "x ", (y[:-1], idx, weights, handle), {}),
        (ShapeError, "x ", (y[:, :, :-1], idx, weights, handle), {}),
        (DtypeError, "topk_idx", (y, idx.int(), weights, handle), {}),
        (ShapeError, "topk_idx", (y, idx[:, :1], weights[:, :1], handle), {}),
        (DtypeError, "topk_weights", (y, idx, weights.bfloat16(), handle), {}),
        (ShapeError, "topk_weights", (y, idx, weights[:, :1], handle), {}),
        (DtypeError, "handle", (y, idx, weights, handle[:3]), {}),
        (ShapeError, "return_recv_hook", good, {"async_finish": True, "return_recv_hook": True}),
        (BackendError, "logfmt", good, {"use_logfmt": True}),
        (DtypeError, "out", good, {"out": out.float()}),
        (ShapeError, "out", good, {"out": out[:-1]}),
        (ShapeError, "out overlaps x in memory", good, {"out": y.flatten(0, 1)[: len(x)]}),
        (DtypeError, "combine_wait_recv_cost_stats", good,
         {"combine_wait_recv_cost_stats": costs.int()}),
        (ShapeError, "combine_wait_recv_cost_stats", good,
         {"combine_wait_recv_cost_stats": costs.expand(2)}),
    ]  # fmt: skip
    for kind, text, args, more in refused:
        with pytest.raises(kind, match=text):
            buffer.low_latency_combine(*args, **more)
    assert torch.equal(fields_of_calls(buffer._low_latency.ring.context), fields)
    buffer.low_latency_combine(*good)
    buffer.low_latency_combine(*good, out=out)
    with pytest.raises(ShapeError, match="out overlaps x in memory"):  # also of a known kind
        buffer.low_latency_combine(*good, out=y.flatten(0, 1)[: len(x)])
    buffer.destroy()
    for call in (
        lambda: buffer.low_latency_combine(*good),
        lambda: buffer.low_latency_dispatch(x, idx, *SHAPE),
        lambda: buffer.get_next_low_latency_combine_buffer(handle),
        lambda: buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS),
    ):
        with pytest.raises(BackendError, match="destroyed"):
            call()


def test_combines_that_are_refused(pool):
    pool.run(refuse_combine, num_ranks=1)


def without_the_mode(group):
    """A Buffer for normal calls alone, one without memory, one of another backend."""
    x, idx, weights = to_device(X, IDX, W)
    buffer = Buffer(group, 1 << 20)
    for call in (
        lambda: buffer.low_latency_dispatch(x, idx, *SHAPE),
        lambda: buffer.low_latency_combine(x, idx, weights, (x,) * 5),
        lambda: buffer.get_next_low_latency_combine_buffer((x,) * 5),
        lambda: buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS),
        lambda: buffer.low_latency_update_mask_buffer(0),
        lambda: buffer.low_latency_query_mask_buffer(idx),
        buffer.low_latency_clean_mask_buffer,
    ):
        with pytest.raises(BackendError, match="low_latency_mode"):
            call()
    buffer.destroy()
    with pytest.raises(CapacityError, match="get_low_latency_rdma_size_hint"):
        Buffer(group, 0, 1 << 10, low_latency_mode=True)
    with pytest.raises(ShapeError, match="differ"):
        Buffer(group, 0, 1 << (20 + group.rank()), low_latency_mode=True)
    hint = Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, group.size(), EXPERTS)
    buffer = Buffer(group, 0, hint, low_latency_mode=True, options=Options(num_slots=2))
    with pytest.raises(ShapeError, match="multiple"):
        buffer.low_latency_dispatch(x, idx, MAX_TOKENS, 5)
    with pytest.raises(CapacityError, match="num_rdma_bytes"):
        buffer.clean_low_latency_buffer(1024, HIDDEN, EXPERTS)
    buffer.destroy()


def test_buffers_that_cannot_be_called_so(pool):
    pool.run(without_the_mode, num_ranks=2)


def test_the_hint_grows_with_every_argument():
    hint = Buffer.get_low_latency_rdma_size_hint
    sizes = [hint(64, 512, 4, 32), hint(128, 512, 4, 32), hint(128, 1024, 4, 32)]
    assert sizes == sorted(set(sizes))
    assert all(isinstance(size, int) and size % 128 == 0 for size in sizes)
    # Two calls of which every rank gets one row of every token: nothing is sent per expert.
    assert 2 * 4 * 128 * 7168 * 2 <= hint(128, 7168, 4, 256) < 3 * 4 * 128 * 7168 * 2 + (1 << 20)
    for bad in [(0, 512, 4, 32), (64, 0, 4, 32), (64, 512, 0, 32), (64, 512, 4, 0)]:
        with pytest.raises((ShapeError, CapacityError)):
            hint(*bad)


def test_ranks_that_a_word_can_mask():
    check_shrink(True, 63)
    check_shrink(False, 64)
    with pytest.raises(ShapeError, match="63"):
        check_shrink(True, 64)


def rows_that_return_wider(group):
    """Memory for 64 tokens holds more rows in e4m3, but these return in bf16."""
    num_bytes = Buffer.get_low_latency_rdma_size_hint(64, 512, 1, EXPERTS)
    buffer = Buffer(group, 0, num_bytes, low_latency_mode=True)
    x, idx = to_device(torch.ones(2, 512, dtype=torch.bfloat16), torch.zeros(2, 1).long())
    buffer.low_latency_dispatch(x, idx, 64, EXPERTS)
    with pytest.raises(CapacityError, match="100 tokens"):
        buffer.low_latency_dispatch(x, idx, 100, EXPERTS)
    large = Buffer(group, 0, 4 * num_bytes, low_latency_mode=True)
    _, _, handle, _, _ = large.low_latency_dispatch(x, idx, 100, EXPERTS)
    y, weights = x.new_zeros(EXPERTS, 100, 512), torch.ones(2, 1, device=x.device)
    with pytest.raises(CapacityError, match="same Buffer"):
        buffer.low_latency_combine(y, idx, weights, handle)
    buffer.destroy()
    large.destroy()


def test_the_way_back_is_wider_than_that_there(pool):
    pool.run(rows_that_return_wider, num_ranks=1)


def one_row_of_wider_ones(group):
    num_bytes = Buffer.get_low_latency_rdma_size_hint(4, 128, 1, EXPERTS)
    buffer = Buffer(group, 0, num_bytes, low_latency_mode=True)
    x, idx = to_device(torch.ones(5, 129, dtype=torch.bfloat16), torch.zeros(1, 1).long())
    rows, count, *_ = buffer.low_latency_dispatch(x[:1, :128], idx, 4, EXPERTS, use_fp8=False)
    assert count.tolist() == [1] + [0] * (EXPERTS - 1)
    assert (rows[0, 0] == 1).all()
    buffer.destroy()


def test_a_single_row_may_have_any_stride(pool):
    pool.run(one_row_of_wider_ones, num_ranks=1)
