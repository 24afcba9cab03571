"""ElasticBuffer: the test contract of DeepEP V2, in which everything is equal bit for bit to an
all-to-all in plain torch; counts the host does not wait for; the surface; what is refused."""

from __future__ import annotations

import inspect
from itertools import product

import cases
import elastic_cases
import pytest
import torch
from deep_ep_cases import deep_ep
from dispatch_cases import make_inputs
from elastic_cases import EXPERTS, HIDDEN, MOST_TOKENS, TOPK, elastic, expected, make_y

import moe_engine
from moe_engine import BackendError, DtypeError, ElasticBuffer, EventHandle, ShapeError, reference
from moe_engine.errors import TooManyTokens

# --- The surface -----------------------------------------------------------------------------

EVENTS = (
    "previous_event=None previous_event_before_epilogue=None async_with_compute_stream=False "
    "allocate_on_comm_stream=False"
)
SIZES = "num_topk=0 use_fp8_dispatch=False"
SIGNATURES = {
    "__init__": f"group num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 {SIZES} "
    "deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True "
    "prefer_overlap_with_compute=True sl_idx=3 num_allocated_qps=0 num_cpu_timeout_secs=300 "
    "num_gpu_timeout_secs=100 explicitly_destroy=False",
    "get_buffer_size_hint": f"group num_max_tokens_per_rank hidden {SIZES} allow_hybrid_mode=True "
    "allow_multiple_reduction=True",
    "dispatch": "x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None "
    "num_experts=None num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 "
    f"{EVENTS} handle=None do_handle_copy=True do_cpu_sync=None do_expand=False "
    "do_zero_padding=False use_tma_aligned_col_major_sf=False",
    "combine": f"x handle topk_weights=None bias=None num_sms=0 num_qps=0 {EVENTS}",
    "barrier": "use_comm_stream=True with_cpu_sync=False sequential=True",
    "capture": "",
    "destroy": "",
    "get_comm_stream": "",
    "get_physical_domain_size": "",
    "get_logical_domain_size": "",
    "get_theoretical_num_sms": "num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 "
    "sm_read_gbs=200 sm_write_gbs=50",
    "get_theoretical_num_qps": "num_sms",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_deep_eps(name):
    parameters = inspect.signature(getattr(ElasticBuffer, name)).parameters.values()
    texts = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert [text for text in texts if text != "self"] == SIGNATURES[name].split()


@pytest.mark.parametrize("name", ["engram_fetch", "pp_send", "all_gather", "agrs_new_session"])
def test_what_is_not_there_yet_says_so(name):
    with pytest.raises(BackendError, match=f"ElasticBuffer.{name} is not there yet"):
        getattr(ElasticBuffer, name)(1, num_sms=2)


def look_around(group):
    """Attributes and calls that send nothing, on one rank."""
    hint = ElasticBuffer.get_buffer_size_hint(group, 128, 256, num_topk=4)
    assert hint % (2 << 20) == 0
    assert ElasticBuffer.get_buffer_size_hint(group, 4096, 7168) > 2 * 4096 * 7168 * 2
    buffer = ElasticBuffer(group, num_bytes=hint, num_max_tokens_per_rank=128, hidden=256)
    assert (buffer.num_bytes, buffer.num_max_tokens_per_rank, buffer.group) == (hint, 128, group)
    assert (buffer.rank_idx, buffer.num_ranks) == (0, 1)
    assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, 1)
    assert deep_ep().get_physical_domain_size(group) == (1, 1)
    assert deep_ep().get_logical_domain_size(group, allow_hybrid_mode=False) == (1, 1)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, 1)
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, 1)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, 0)
    assert buffer.get_theoretical_num_sms(256, 8) == 20
    assert (buffer.num_allocated_qps, buffer.get_theoretical_num_qps(2)) == (65, 33)
    assert buffer.runtime is not None
    assert buffer.nccl_comm_handle is None
    assert type(ElasticBuffer.capture()) is EventHandle
    buffer.destroy()
    assert buffer.runtime is None
    direct = ElasticBuffer(group, hint, allow_hybrid_mode=False)
    assert (direct.num_allocated_qps, direct.get_theoretical_num_qps(20)) == (17, 9)


def test_attributes_and_hints(pool):
    pool.run(look_around, num_ranks=1)


# --- DeepEP V2's test contract -----------------------------------------------------------------

MODES = [
    (copies, alignment, fp8, num_bias, event, is_async, allocates)
    for copies, alignment, fp8, num_bias, event, is_async in product(
        (True, False), (128, 1), (True, False), (0, 1, 2), (False, True), (False, True)
    )
    for allocates in ((True,) if event else (False, True))
]
"""do_handle_copy, expert_alignment, fp8, biases, previous_event, async_with_compute_stream,
allocate_on_comm_stream: as DeepEP's own test combines them."""
FEW = [(0, True), (53, False), (99, False), (143, True)]
"""Modes that every run takes, and whether the host waits for the counts; each value is there."""


def test_the_modes_are_deep_eps():
    assert len(MODES) == 144
    few = [MODES[number] for number, _ in FEW]
    for values, of_few in zip(zip(*MODES, strict=True), zip(*few, strict=True), strict=True):
        assert set(values) == set(of_few)


def run_modes(group, modes, do_cpu_sync, x, idx, w):
    buffer = elastic(group, deterministic=True)
    with cases.filled_memory():
        for mode in modes:
            check_mode(buffer, mode, do_cpu_sync, (x, idx, w))
    buffer.barrier()
    buffer.check()
    buffer.destroy()


def check_mode(buffer, mode, waits, inputs):
    """All calls in one mode, on this rank, of inputs of all ranks."""
    copies, alignment, fp8, num_bias, with_event, is_async, allocates = mode
    rank, device, num_local = buffer.rank_idx, cases.device(), EXPERTS // buffer.num_ranks
    x, idx, w = (parts[rank].to(device) for parts in inputs)
    bias = [[part * 0.5, part * 0.25][:num_bias] for part in inputs[0]]
    received, places = expected(inputs, alignment)
    want, place, num_rows = received[rank], places[rank], len(received[rank].x)
    want_scales = reference.dispatch([make_scales(one) for one in inputs[0]], *inputs[1:], EXPERTS)

    def launch(name, **arguments):
        arguments |= dict(
            num_sms=buffer.get_theoretical_num_sms(EXPERTS, TOPK),
            num_qps=buffer.get_theoretical_num_qps(4),
            async_with_compute_stream=is_async,
            allocate_on_comm_stream=allocates,
        )
        if with_event:
            arguments["previous_event"] = buffer.capture()
        values = getattr(buffer, name)(**arguments)
        assert (values[-1].event is not None) is is_async
        if is_async:
            values[-1].current_stream_wait()
        return values

    def check_rows(have, expand, padded=False):
        """bf16 rows, or fp8 rows with their scales, are those of the oracle."""
        parts = have if fp8 else (have,)
        for part, row in zip(parts, (want.x, want_scales[rank].x), strict=False):
            rows = part.float().cpu()
            row = (row.to(torch.float8_e4m3fn) if part is parts[0] and fp8 else row).float()
            assert torch.equal(rows[slots] if expand else rows[:num_rows], row[from_row])
            if padded:
                assert (rows[is_padding] == 0).all()

    here = place.src_metadata[:, 2:].long()
    from_row, k = (here >= 0).nonzero(as_tuple=True)
    slots, is_padding = here[from_row, k], torch.ones(place.num_expanded, dtype=torch.bool)
    is_padding[slots] = False
    is_padding = is_padding.nonzero().flatten()
    of_experts = from_row, k
    sent = (x.to(torch.float8_e4m3fn), make_scales(x).to(device)) if fp8 else x
    arguments = dict(
        x=sent,
        topk_idx=idx,
        topk_weights=w,
        num_experts=EXPERTS,
        num_max_tokens_per_rank=MOST_TOKENS,
        expert_alignment=alignment,
        do_handle_copy=copies,
        do_cpu_sync=waits,
    )
    by_expert = dict(do_expand=True, use_tma_aligned_col_major_sf=True)
    # Rows by token.
    from_row = torch.arange(num_rows)
    recv_x, recv_idx, recv_w, handle, _ = launch("dispatch", **arguments)
    check_rows(recv_x, False)
    assert torch.equal(recv_idx[:num_rows].cpu(), want.topk_idx)
    assert (recv_idx[num_rows:] == -1).all()
    assert torch.equal(recv_w[:num_rows].cpu(), want.topk_weights)
    assert (handle.topk_idx is not idx) is copies
    elastic_cases.check_fields(elastic_cases.fields(handle), want, place, False, waits)
    again = launch("dispatch", x=sent, handle=handle)
    check_rows(again[0], False)
    assert torch.equal(again[1], recv_idx)
    assert again[2] is None
    assert again[3] is handle
    # Rows by expert.
    from_row = of_experts[0]
    rows, no_ids, row_w, by_experts, _ = launch("dispatch", **arguments, **by_expert)
    assert no_ids is None
    check_rows(rows, True)
    row_weights = want.topk_weights[of_experts]
    assert torch.equal(row_w.cpu()[slots], row_weights)
    elastic_cases.check_fields(elastic_cases.fields(by_experts), want, place, True, waits)
    padded = dict(do_zero_padding=True, handle=by_experts)
    rows, _, row_w, _, _ = launch("dispatch", x=sent, topk_weights=w, **by_expert, **padded)
    check_rows(rows, True, padded=True)
    assert torch.equal(row_w.cpu()[slots], row_weights)
    assert (row_w[is_padding.to(device)] == 0).all()
    if fp8:
        assert rows[1].stride(0) == 1
        assert rows[1].stride(1) % 4 == 0
    # Statistics are added to.
    stats = torch.ones(num_local, dtype=torch.int32, device=device)
    launch("dispatch", **arguments, cumulative_local_expert_recv_stats=stats)
    assert torch.equal(stats.cpu() - 1, place.num_per_expert)
    # Sums.
    y = make_y(place.src_metadata, TOPK, HIDDEN)
    y[want.topk_idx < 0] = 0
    summed = torch.empty(handle.num_recv_tokens, HIDDEN, dtype=torch.bfloat16)
    summed[:num_rows] = reference.sum_topk(y, torch.ones(num_rows, TOPK))
    rows_y = torch.empty(by_experts.num_expanded_tokens, HIDDEN, dtype=torch.bfloat16)
    rows_y[slots] = y[of_experts]
    added = tuple(one.to(device) for one in bias[rank])
    added = added[0] if num_bias == 1 else added or None
    of_node = buffer.num_nvlink_ranks if buffer.num_rdma_ranks > 1 else None
    sums = elastic_cases.expected_sums(inputs, received, places, bias, ranks_per_node=of_node)
    weights = torch.where(inputs[1][rank] >= 0, inputs[2][rank], 0.0)
    for of, values, of_values in ((handle, summed, recv_w), (by_experts, rows_y, row_w)):
        more = dict(handle=of, topk_weights=of_values, bias=added)
        out, out_w, _ = launch("combine", x=values.to(device), **more)
        assert torch.equal(out.cpu(), sums[rank])
        assert torch.equal(out_w.cpu(), weights)


def make_scales(x):
    """float32 [T, 3], by columns: what may come with fp8 rows."""
    columns = x[:, :3].float().cpu().abs() + 1
    return columns.T.contiguous().T


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_contract_of_v2(pool, num_ranks):
    inputs = make_inputs(num_ranks, [20, 13, 0, 5], HIDDEN, EXPERTS, TOPK, "holes", "bf16")
    for do_cpu_sync in (True, False):
        modes = [MODES[number] for number, waits in FEW if waits is do_cpu_sync]
        pool.run(run_modes, modes, do_cpu_sync, *inputs, num_ranks=num_ranks)


def copy_in_turns(group, waits, x, idx, w):
    """Rows by expert, new and again by their handle, and their sums."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    buffer = elastic(group, num_max_tokens_per_rank=160)
    with cases.filled_memory():
        how = dict(num_experts=EXPERTS, do_expand=True, do_cpu_sync=waits)
        rows, _, _, handle, _ = buffer.dispatch(x, idx, w, **how)
        again = buffer.dispatch(x, handle=handle, do_expand=True)[0]
        out, _, _ = buffer.combine(rows, handle)
    buffer.check()
    buffer.destroy()
    return elastic_cases.to_cpu((rows, again, out))


@pytest.mark.parametrize("waits", [True, False])
def test_programs_that_copy_take_turns(pool, waits):
    """Rows for several blocks of all programs, of sources that bring different numbers of them."""
    sizes = dict(num_ranks=2, num_tokens=(150, 70), kind="uniform")
    results, inputs = elastic_cases.run_client(pool, copy_in_turns, waits, **sizes)
    received, places = expected(inputs)
    for rank, (rows, again, out) in enumerate(results):
        want = reference.expand(received[rank].x, places[rank])
        assert torch.equal(rows[: len(want)], want)
        assert torch.equal(again[: len(want)], want)
        x, idx = inputs[0][rank].float(), inputs[1][rank]
        torch.testing.assert_close(out.float(), x * (idx >= 0).sum(1, True), rtol=0.02, atol=0.02)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["holes", "duplicates", "one_hot"])
@pytest.mark.parametrize("do_cpu_sync", [True, False])
@pytest.mark.parametrize("part", range(6))
def test_all_modes_of_v2(pool, kind, do_cpu_sync, part):
    inputs = make_inputs(2, [20, 13], HIDDEN, EXPERTS, TOPK, kind, "bf16")
    pool.run(run_modes, MODES[part::6], do_cpu_sync, *inputs, num_ranks=2)


# --- Nothing to send, ids out of range, growing --------------------------------------------------


def edges(group, x, idx, w):
    """Weights that are not given, memory that grows, a combine of other rows than were received."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    more = dict(num_experts=EXPERTS, num_max_tokens_per_rank=MOST_TOKENS)
    grows = ElasticBuffer(group, num_bytes=1 << 20)
    grown, *_ = grows.dispatch(x.repeat(1, 300), idx, w, do_expand=True, **more)
    grows.check()
    buffer = ElasticBuffer(group, num_bytes=1 << 20)
    rows, _, none, handle, _ = buffer.dispatch(x, idx, do_expand=True, **more)
    assert none is None
    by_token = buffer.dispatch(x, handle=handle)
    assert by_token[0].shape == (handle.num_recv_tokens, HIDDEN)
    assert buffer.dispatch(x, topk_weights=w, handle=handle)[2].shape == by_token[1].shape
    out, _, _ = buffer.combine(rows, handle)
    wide, _, _, other, _ = buffer.dispatch(x.repeat(1, 300), idx, w, **more)  # more than there is
    wide_out, _, _ = buffer.combine(wide, other)
    assert torch.equal(grown[:, -HIDDEN:], rows)
    buffer.check()
    for one in (grows, buffer):
        one.destroy()
    return elastic_cases.to_cpu((rows, by_token[1], out, wide_out[:, :HIDDEN]))


@pytest.mark.parametrize(
    "kind",
    cases.slow_unless([("nothing",), ("duplicates",)], ["nothing", "empty_rank", "duplicates"]),
)
def test_edges(pool, kind):
    sizes = dict(num_ranks=4, num_tokens=(9, 0, 20, 4))
    results, inputs = elastic_cases.run_client(pool, edges, kind=kind, **sizes)
    received, places = expected(inputs)
    for rank, (rows, ids, out, wide) in enumerate(results):
        assert torch.equal(rows, reference.expand(received[rank].x, places[rank]))
        assert torch.equal(ids, received[rank].topk_idx)
        x, idx = inputs[0][rank].float(), inputs[1][rank]
        torch.testing.assert_close(out.float(), x * (idx >= 0).sum(1, True), rtol=0.02, atol=0.02)
        in_rank = reference.layout(idx, EXPERTS, 4)[2].sum(1, True)
        torch.testing.assert_close(wide.float(), x * in_rank, rtol=0.02, atol=0.02)


def overflow(group):
    """Ids twice in a row, and fewer local experts than top-k: more rows than the host makes room
    for, which are not written; the next call says so."""
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=2, hidden=8, num_topk=3)
    x = torch.ones(2, 8, dtype=torch.bfloat16, device=cases.device())
    idx, w = x[:, :3].long() * 0, x[:, :3].float()
    with pytest.raises(moe_engine.CapacityError, match="more rows than"):
        buffer.dispatch(x, idx, w, num_experts=1, do_expand=True, do_cpu_sync=False)
        buffer.check()


def test_rows_beyond_the_room_are_refused(pool):
    pool.run(overflow, num_ranks=1)


# --- Refused -------------------------------------------------------------------------------------


def refuse(group):
    buffer = elastic(group)
    x = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=cases.device())
    idx, w = x[:, :TOPK].long(), x[:, :TOPK].float()
    dispatch, combine, fp8 = buffer.dispatch, buffer.combine, x.to(torch.float8_e4m3fn)
    new = dict(topk_idx=idx, topk_weights=w, num_experts=EXPERTS)
    by_token, by_expert = dispatch(x, **new)[3], dispatch(x, **new, do_expand=True)[3]
    event = ElasticBuffer.capture()
    epoch = int(buffer.runtime.slots.context.fields[0])
    shape, dtype = ShapeError, DtypeError
    refused = [
        (dtype, "x is float32", dispatch, (x.float(),), new),
        (dtype, r"x\[0\] is bfloat16", dispatch, ((x, w),), new),
        (shape, "topk_idx is None", dispatch, (x,), {}),
        (shape, "num_experts is None", dispatch, (x, idx), {}),
        (shape, "num_experts is 0", dispatch, (x, idx), {"num_experts": 0}),
        (dtype, "topk_idx is int32", dispatch, (x, idx.int()), {"num_experts": EXPERTS}),
        (shape, "topk_weights has shape", dispatch, (x,), new | {"topk_weights": w[:2]}),
        (shape, "expert_alignment is 0", dispatch, (x,), new | {"expert_alignment": 0}),
        (shape, "num_sms is -1", dispatch, (x,), new | {"num_sms": -1}),
        (shape, "num_qps is 66", dispatch, (x,), new | {"num_qps": 66}),
        (shape, "do_zero_padding needs do_expand", dispatch, (x,), new | {"do_zero_padding": True}),
        (dtype, "do_expand is 2", dispatch, (x,), new | {"do_expand": 2}),
        (dtype, "do_cpu_sync is 'no'", dispatch, (x,), new | {"do_cpu_sync": "no"}),
        (shape, "previous_event needs allocate", dispatch, (x,), new | {"previous_event": event}),
        (dtype, "previous_event is a EventOverlap", combine, (x, by_token),
         {"previous_event": moe_engine.EventOverlap()}),
        (shape, "cumulative_local_expert_recv_stats has shape", dispatch, (x,),
         new | {"cumulative_local_expert_recv_stats": idx[:, 0].int()}),
        (shape, "topk_idx is given with a handle", dispatch, (x, idx), {"handle": by_token}),
        (shape, "do_cpu_sync is given with", dispatch, (x,),
         {"handle": by_token, "do_cpu_sync": True}),
        (shape, "num_experts is 24, and 12", dispatch, (x,),
         {"handle": by_token, "num_experts": 24}),
        (shape, "do_expand is set, and handle", dispatch, (x,),
         {"handle": by_token, "do_expand": True}),
        (shape, "must be", dispatch, (x[:3],), {"handle": by_token}),
        (dtype, "handle is a tuple", dispatch, (x,), {"handle": tuple(by_token.sent)}),
        (dtype, "handle is a NoneType", combine, (x, None), {}),
        (dtype, "x is float8_e4m3fn", combine, (fp8, by_token), {}),
        (shape, "x has shape", combine, (x[:3], by_token), {}),
        (shape, "x has shape", combine, (x, by_expert), {}),
        (shape, "topk_weights has shape", combine, (x, by_token), {"topk_weights": w[:, 0]}),
        (shape, "bias has shape", combine, (x, by_token), {"bias": x[:, :8]}),
        (shape, "num_scaleout_topk is 1", buffer.get_theoretical_num_sms, (12, 3, 1), {}),
    ]  # fmt: skip
    for kind, text, call, args, more in refused:
        with pytest.raises(kind, match=text):
            call(*args, **more)
    assert int(buffer.runtime.slots.context.fields[0]) == epoch
    buffer.destroy()
    with pytest.raises(BackendError, match="destroyed"):
        dispatch(x, **new)
    for text, more in (
        ("num_max_tokens_per_rank is 0", {}),
        ("hidden is 0", {"num_max_tokens_per_rank": 8}),
        (r"\bnum_bytes is -5", {"num_bytes": -5}),
        ("num_cpu_bytes is 4", {"num_bytes": 1 << 20, "num_cpu_bytes": 4}),
        ("num_gpu_timeout_secs is 0", {"num_bytes": 1 << 20, "num_gpu_timeout_secs": 0}),
        ("sl_idx is -1", {"num_bytes": 1 << 20, "sl_idx": -1}),
        ("deterministic is 3", {"num_bytes": 1 << 20, "deterministic": 3}),
    ):
        with pytest.raises(moe_engine.MoeEngineError, match=text):
            ElasticBuffer(group, **more)
    many = elastic(group, num_max_tokens_per_rank=2)
    with pytest.raises(TooManyTokens, match="4 tokens came"):
        many.dispatch(x, **new)


def test_bad_arguments_are_refused_before_a_kernel_runs(pool):
    pool.run(refuse, num_ranks=1)
