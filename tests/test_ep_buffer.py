"""EPBuffer: the calls of DeepEP V2.5, by its README and by sglang's deepep_v2.5, and what is
refused."""

from __future__ import annotations

import inspect

import cases
import pytest
import torch
from deep_ep_cases import deep_ep
from elastic_cases import EXPERTS, HIDDEN, MOST_TOKENS, TOPK, expected, run_client, to_cpu
from test_elastic_clients import check_layer, weighted

from moe_engine import BackendError, DtypeError, EPBuffer, EventOverlap, ShapeError

EVENTS = "previous_event=None async_with_compute_stream=False allocate_on_comm_stream=False"
SIZES = "num_topk=0 use_fp8_dispatch=False"
SIGNATURES = {
    "__init__": f"group num_bytes=None num_max_tokens_per_rank=0 hidden=0 {SIZES} "
    "lb_allocation_plan_or_num_bytes=0 deterministic=False allow_hybrid_mode=True "
    "allow_multiple_reduction=True prefer_overlap_with_compute=True sl_idx=None "
    "num_allocated_qps=0 num_cpu_timeout_secs=300 num_gpu_timeout_secs=100 "
    "explicitly_destroy=False",
    "get_buffer_size_hint": f"group num_max_tokens_per_rank hidden {SIZES} allow_hybrid_mode=True "
    "allow_multiple_reduction=True",
    "dispatch": "x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None "
    "num_experts=None num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 "
    f"{EVENTS} handle=None do_handle_copy=False do_cpu_sync=None do_expand=False "
    "do_zero_padding=False use_tma_aligned_col_major_sf=False defer_epilogue=False",
    "combine": f"x handle topk_weights=None bias=None num_sms=0 num_qps=0 {EVENTS} "
    "defer_epilogue=False",
    "barrier": "wait_comm_stream=True with_cpu_sync=False sequential=True context_idx=None",
    "capture": "",
    "destroy": "",
    "print_memory_usage": "",
    "get_comm_stream": "",
    "get_physical_domain_size": "",
    "get_logical_domain_size": "",
    "get_theoretical_num_sms": "num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 "
    "sm_read_gbs=0 sm_write_gbs=0",
    "get_theoretical_num_qps": "num_sms",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_deep_eps(name):
    parameters = inspect.signature(getattr(EPBuffer, name)).parameters.values()
    texts = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert [text for text in texts if text != "self"] == SIGNATURES[name].split()


def make(group, **more):
    shape = dict(num_max_tokens_per_rank=MOST_TOKENS, hidden=HIDDEN, num_topk=TOPK)
    return deep_ep().EPBuffer(group, **(shape | more))


def train(group, waits, x, idx, w):
    """The README's forward with deferred epilogues, and its backward."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    cls = deep_ep().EPBuffer
    hint = cls.get_buffer_size_hint(group, MOST_TOKENS, HIDDEN, num_topk=TOPK)
    buffer = make(group)
    assert (buffer.group, buffer.num_bytes) == (group, hint)
    sms, previous = buffer.get_theoretical_num_sms(EXPERTS, TOPK), buffer.capture()
    later = dict(async_with_compute_stream=True, defer_epilogue=True, num_sms=sms - 1)
    by_expert = dict(do_expand=True, do_zero_padding=True, use_tma_aligned_col_major_sf=True)
    event = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=w,
        num_experts=EXPERTS,
        num_max_tokens_per_rank=MOST_TOKENS,
        expert_alignment=4,
        previous_event=previous,
        allocate_on_comm_stream=True,
        do_cpu_sync=waits,
        **by_expert,
        **later,
    )
    assert type(event) is EventOverlap
    rows, none, row_w, handle = event.current_stream_wait()
    assert none is None
    assert event.wait() is None
    assert handle.topk_idx is idx
    assert handle.num_sms == sms
    bias = x * 0.5
    event = buffer.combine(weighted(rows, row_w), handle=handle, bias=bias, **later)
    out, none = event.wait()
    assert none is None
    assert event.wait() is None
    # dy of a sum is 1 everywhere.
    how = dict(num_sms=sms, async_with_compute_stream=True)
    dy, _, _, same, event = buffer.dispatch(torch.ones_like(x), handle=handle, **by_expert, **how)
    event.wait()
    assert same is handle
    is_row = row_w != 0
    d_rows = torch.where(is_row[:, None], dy.float() * row_w[:, None] * 2, 0).bfloat16()
    d_row_w = torch.where(is_row, (dy.float() * rows.float()).sum(1) * 2, 0)
    dx, dw, event = buffer.combine(d_rows, handle=handle, topk_weights=d_row_w, **how)
    event.wait()
    buffer.barrier(wait_comm_stream=True, with_cpu_sync=True, context_idx=0)
    buffer.check()
    buffer.destroy()
    return to_cpu(dict(out=out - bias, dx=dx, dw=dw))


@pytest.mark.parametrize("waits", [True, False])
def test_training_as_in_the_readme(pool, waits):
    results, inputs = run_client(pool, train, waits)
    check_layer(results, inputs, expected(inputs)[0])


def sglang(group, expand, x, idx, w):
    """deepep_v2.5: the calls of deepep_v2, of an EPBuffer, and without a deferred epilogue."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    buffer = make(
        group,
        use_fp8_dispatch=True,
        allow_hybrid_mode=False,
        sl_idx=0,
        prefer_overlap_with_compute=False,
    )
    sms = buffer.get_theoretical_num_sms(EXPERTS, TOPK)
    qps = buffer.get_theoretical_num_qps(sms)
    scales = torch.ones(len(x), 2, device=x.device)
    (rows, _), ids, row_w, handle, event = buffer.dispatch(
        (x.to(torch.float8_e4m3fn), scales),
        topk_idx=idx,
        topk_weights=w,
        num_experts=EXPERTS,
        num_max_tokens_per_rank=MOST_TOKENS,
        expert_alignment=128,
        num_sms=sms,
        num_qps=qps,
        use_tma_aligned_col_major_sf=True,
        do_cpu_sync=not expand,
        do_expand=expand,
    )
    assert event.event is None
    if not expand:
        assert int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]) == len(rows)
        row_w = torch.where(ids >= 0, row_w, 0.0).sum(1)
    y = weighted(rows.bfloat16(), row_w)
    out, _, event = buffer.combine(y, handle=handle, topk_weights=None, num_sms=sms, num_qps=qps)
    assert event.event is None
    buffer.check()
    buffer.destroy()
    return to_cpu(dict(out=out))


@pytest.mark.parametrize("expand", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sglang(pool, expand):
    results, inputs = run_client(pool, sglang, expand)
    inputs = [one.to(torch.float8_e4m3fn).bfloat16() for one in inputs[0]], *inputs[1:]
    check_layer(results, inputs, expected(inputs)[0])


def refuse(group):
    for bad in (1 << 21, 1.5, object()):
        with pytest.raises(BackendError, match="lb_allocation_plan_or_num_bytes"):
            make(group, lb_allocation_plan_or_num_bytes=bad)
    with pytest.raises(ShapeError, match="sl_idx"):
        make(group, sl_idx=-1)
    buffer = make(group)
    assert (buffer.num_lb_bytes, buffer.main_context) == (0, buffer.runtime)
    x = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=cases.device())
    idx, w = torch.arange(8, device=x.device).view(4, 2), torch.ones(4, 2, device=x.device)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS)
    new, again = dict(topk_idx=idx, num_experts=EXPERTS), dict(handle=handle)
    later = dict(defer_epilogue=True)
    for error, text, call, more in (
        (ShapeError, "do_handle_copy is True", buffer.dispatch, new | dict(do_handle_copy=True)),
        (ShapeError, "defer_epilogue needs async", buffer.dispatch, new | later),
        (ShapeError, "defer_epilogue needs async", buffer.combine, again | later),
        (DtypeError, "defer_epilogue", buffer.dispatch, new | dict(defer_epilogue="yes")),
        (DtypeError, "num_sms", buffer.combine, again | dict(num_sms="20")),
        (ShapeError, "num_sms", buffer.combine, again | dict(num_sms=-1)),
        (TypeError, "previous_event_before_epilogue", buffer.combine,
         again | dict(previous_event_before_epilogue=None)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call(rows if "handle" in more else x, **more)
    with pytest.raises(ShapeError, match="context_idx"):
        buffer.barrier(context_idx=1)
    for name in ("lb_prefetch_weights", "lb_reduce_grads", "lb_get_theoretical_num_sms"):
        with pytest.raises(BackendError, match=f"EPBuffer.{name} is not there yet"):
            getattr(buffer, name)()
    # The handle keeps idx itself, which travels with weights.
    sent, _, _, _, _ = buffer.dispatch(x, topk_weights=w, handle=handle)
    idx.zero_()
    assert torch.equal(buffer.dispatch(x, handle=handle)[0], sent)
    with pytest.raises(ShapeError, match="topk_idx of handle was written to"):
        buffer.dispatch(x, topk_weights=w, handle=handle)
    handle.topk_idx = torch.arange(8, device=x.device).view(4, 2)
    assert torch.equal(buffer.dispatch(x, topk_weights=w, handle=handle)[0], sent)
    buffer.check()
    buffer.print_memory_usage()
    buffer.destroy()


def test_refused(pool):
    pool.run(refuse, num_ranks=1)
