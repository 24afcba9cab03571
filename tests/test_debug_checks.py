"""Debug mode: counts and handles that hold wrong values are refused before a kernel runs."""

from __future__ import annotations

import dataclasses
import os

import cases
import low_latency_cases as low_latency
import pytest
import torch
from failure_cases import fields_of_calls
from hypothesis import given
from hypothesis import strategies as st

from moe_engine import Buffer, Handle, MoeEngineError, Options, RoutingError, ShapeError, reference
from moe_engine.debug_checks import check_handle_values, check_layout_values

EXPERTS, TOPK, HIDDEN = 6, 2, 128


def layouts(num_ranks, num_tokens, kind, seed):
    """topk_idx and the layout of each rank."""
    idx = [cases.route(kind, num_tokens, EXPERTS, TOPK, seed + r) for r in range(num_ranks)]
    return idx, [reference.layout(ids, EXPERTS, num_ranks) for ids in idx]


def handle_of(rank, idx, layouts, extra_rows=0):
    """The handle that a dispatch gives to `rank`."""
    prefix = torch.stack([per_rank for per_rank, _, _ in layouts]).cumsum(0).int()
    sources = [in_rank[:, rank].nonzero().flatten().int() for _, _, in_rank in layouts]
    in_rank = layouts[rank][2]
    tokens, head = reference.send_plan(in_rank, idx[rank], EXPERTS)
    rows = torch.cat([*sources, torch.full((extra_rows,), -7, dtype=torch.int32)])
    num_local = EXPERTS // len(layouts)
    return Handle(prefix, tokens, prefix.new_zeros(len(layouts), num_local), rows, in_rank, head)


@given(
    num_ranks=st.sampled_from([1, 2, 3]),
    num_tokens=st.integers(0, 6),
    kind=st.sampled_from(cases.ROUTINGS),
    seed=st.integers(0, 99),
    extra_rows=st.integers(0, 3),
)
def test_what_a_dispatch_gives_is_right(num_ranks, num_tokens, kind, seed, extra_rows):
    idx, layout = layouts(num_ranks, num_tokens, kind, seed)
    for rank in range(num_ranks):
        check_layout_values(*layout[rank], idx[rank], rank)
        check_layout_values(*layout[rank], None, rank)
        check_handle_values(handle_of(rank, idx, layout, extra_rows), rank)


def changed(tensor, at, value):
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


IDX, LAYOUT = layouts(2, 4, "uniform", 3)
WRONG_LAYOUTS = {
    "a count of more tokens": (0, lambda t: changed(t, 0, 5), "num_tokens_per_rank is"),
    "a negative count": (0, lambda t: changed(t, 0, -1), "num_tokens_per_rank is"),
    "a negative expert": (1, lambda t: changed(t, 0, -1), "num_tokens_per_expert"),
    "experts of other tokens": (1, lambda t: t.flip(0) + 1, "num_tokens_per_expert"),
    "other tokens": (2, lambda t: t.flip(1), "is_token_in_rank"),
    "an id that is no expert's": (3, lambda t: changed(t, (0, 0), EXPERTS), "expert ids"),
    "a negative id": (3, lambda t: changed(t, (0, 0), -2), "expert ids"),
}


@pytest.mark.parametrize("name", WRONG_LAYOUTS)
def test_wrong_layouts(name):
    index, change, text = WRONG_LAYOUTS[name]
    args = [*LAYOUT[1], IDX[1]]
    args[index] = change(args[index])
    if index == 2:  # counts follow
        args[0] = args[2].sum(0).int()
    kind = RoutingError if index == 3 else ShapeError
    with pytest.raises(kind, match=text):
        check_layout_values(*args, 1)
    if index < 2 and name != "experts of other tokens":
        with pytest.raises(ShapeError, match=text):
            check_layout_values(*args[:3], None, 1)


WRONG_HANDLES = {
    "rows that fall": ("rank_prefix_matrix", lambda t: t.flip(0), "falls"),
    "more rows than there are": ("rank_prefix_matrix", lambda t: t + 1, "received rows"),
    "other rows sent": (
        "rank_prefix_matrix",
        lambda t: t - torch.tensor([[0, 0], [1, 0]], dtype=torch.int32),
        "rows sent to each rank",
    ),
    "a token beyond": ("send_token_idx", lambda t: changed(t, (0, 0), 4), r"send_token_idx\[0\]"),
    "a negative token": (
        "send_token_idx",
        lambda t: changed(t, (1, 0), -1),
        r"send_token_idx\[1\]",
    ),
    "a row beyond": ("send_head", lambda t: changed(t, (0, 0), 99), "send_head"),
    "a row less": ("send_head", lambda t: changed(t, 0, -1), "send_head"),
    "other tokens": ("is_token_in_rank", lambda t: ~t, "is_token_in_rank"),
    "a negative source": ("recv_src_idx", lambda t: changed(t, 0, -1), "recv_src_idx"),
    "fewer rows": ("recv_src_idx", lambda t: t[:-1], "received rows"),
}


@pytest.mark.parametrize("name", WRONG_HANDLES)
def test_wrong_handles(name):
    field, change, text = WRONG_HANDLES[name]
    handle = handle_of(1, IDX, LAYOUT)
    check_handle_values(handle, 1)
    with pytest.raises(ShapeError, match=text):
        check_handle_values(handle._replace(**{field: change(getattr(handle, field))}), 1)


# --- In a Buffer ---------------------------------------------------------------------------------


def in_debug_mode(group, by_variable):
    """A Buffer in debug mode refuses wrong values without a launch, and goes on."""
    os.environ["MOE_ENGINE_DEBUG"] = "1" if by_variable else "0"
    try:
        options = Options(debug=not by_variable)
        buffer = Buffer.for_tokens(group, 8, HIDDEN, EXPERTS, TOPK, options=options)
        ring = low_latency.make_buffer(group, 8, HIDDEN, EXPERTS)
    finally:
        del os.environ["MOE_ENGINE_DEBUG"]
    assert buffer.options.debug
    assert ring.options.debug is by_variable
    x, w = cases.tokens(6, HIDDEN, TOPK, torch.bfloat16, 0)
    idx = cases.route("uniform", 6, EXPERTS, TOPK, 0)
    x, idx, w = low_latency.to_device(x, idx, w)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    good = x, None, per_rank, None, in_rank, per_expert, idx, w
    recv_x, *_, handle, _ = buffer.dispatch(*good)
    fields = fields_of_calls(buffer._engine.slots.context)
    head = handle._replace(send_head=handle.send_head + 99)
    plan = handle._replace(send_token_idx=handle.send_token_idx - 1)
    for call in (
        lambda: buffer.dispatch(*good[:2], per_rank + 1, *good[3:]),
        lambda: buffer.dispatch(*good[:6], idx + EXPERTS, w),
        lambda: buffer.dispatch(x, plan),
        lambda: buffer.combine(recv_x, head),
    ):
        with pytest.raises(MoeEngineError, match="rank 0"):
            call()
    assert torch.equal(fields_of_calls(buffer._engine.slots.context), fields), "a kernel ran"
    assert torch.equal(buffer.dispatch(x, handle)[0], recv_x)
    buffer.destroy()
    if by_variable:
        y, _, known = low_latency.dispatch(ring, x, idx, 8, EXPERTS)
        fields = fields_of_calls(ring._low_latency.ring.context)
        for part, at, value in (
            ("returns", (0, 0, 0), TOPK + 1),
            ("returns", (0, 0, 0), -1),
            ("returns", (0, 0, 1 + TOPK), TOPK),
            ("returns", (0, 0, 1), 8 * EXPERTS),
            ("call", (1,), 9),
        ):
            other = dataclasses.replace(known, memory=known.memory.clone())
            getattr(other, part)[at] = value
            with pytest.raises(ShapeError, match=rf"handle\.{part}"):
                low_latency.combine(ring, y, idx, w, other)
        with pytest.raises(RoutingError, match="expert ids"):
            low_latency.combine(ring, y, idx - 5, w, known)
        assert torch.equal(fields_of_calls(ring._low_latency.ring.context), fields), "a kernel ran"
        low_latency.combine(ring, y, idx, w, known)
    ring.destroy()


@pytest.mark.parametrize("by_variable", [True, False])
def test_debug_mode(pool, by_variable):
    pool.run(in_debug_mode, by_variable, num_ranks=1)
