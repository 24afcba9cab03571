"""DeepEP's V1 interface: signatures, events, configs, several Buffers, what is refused."""

from __future__ import annotations

import gc
import inspect
from pathlib import Path

import cases
import pytest
import torch
from deep_ep_cases import (
    EXPERTS,
    HIDDEN,
    TOPK,
    check_combined,
    check_received,
    run_client,
    to_cpu,
    to_device,
)
from dispatch_cases import make_inputs

import moe_engine
from moe_engine import BackendError, Buffer, Config, reference
from moe_engine.emulation import PerRank
from moe_engine.symm.slots import RowLayout, SlotLayout, header_bytes

# --- The surface -----------------------------------------------------------------------------

EVENTS = "previous_event=None async_finish=False allocate_on_comm_stream=False"
SIGNATURES = {
    "__init__": "group=None num_nvl_bytes=0 num_rdma_bytes=0 low_latency_mode=False "
    "num_qps_per_rank=24 allow_nvlink_for_low_latency_mode=True allow_mnnvl=False "
    "explicitly_destroy=False enable_shrink=False comm=None",
    "get_dispatch_layout": "topk_idx num_experts " + EVENTS,
    "dispatch": "x handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None "
    "is_token_in_rank=None num_tokens_per_expert=None topk_idx=None topk_weights=None "
    "expert_alignment=1 num_worst_tokens=0 config=None " + EVENTS,
    "combine": "x handle topk_weights=None bias=None config=None " + EVENTS,
    "get_local_buffer_tensor": "dtype size=None offset=0 use_rdma_buffer=False",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats=None dispatch_wait_recv_cost_stats=None use_fp8=True "
    "round_scale=False use_ue8m0=False async_finish=False return_recv_hook=False",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt=False zero_copy=False "
    "async_finish=False return_recv_hook=False out=None combine_wait_recv_cost_stats=None",
    "get_next_low_latency_combine_buffer": "handle",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "low_latency_update_mask_buffer": "rank_to_mask mask=False",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks "
    "num_experts",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "set_num_sms": "new_num_sms",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_deep_eps(name):
    parameters = list(inspect.signature(getattr(Buffer, name)).parameters.values())
    texts = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    wanted = SIGNATURES[name].split()
    assert [text for text in texts if text != "self"][: len(wanted)] == wanted


def test_configs_for_any_number_of_ranks():
    for num_ranks in (1, 2, 3, 5, 64, 128):
        for make in (Buffer.get_dispatch_config, Buffer.get_combine_config):
            assert make(num_ranks).num_sms == Buffer.num_sms
    assert Config() == Config(20, 6, 256, 6, 256)
    keys = "num_max_{}_chunked_{}_tokens"
    more = {keys.format(a, b): 8 for a in ("nvl", "rdma") for b in ("send", "recv")}
    assert Config(num_sms=24, **more).num_sms == 24


def test_the_hint_holds_4096_tokens():
    for num_ranks in (1, 2, 3, 8):
        num_bytes = Config().get_nvl_buffer_size_hint(7168 * 2, num_ranks)
        layout = SlotLayout.fit(num_bytes, num_ranks)
        row = RowLayout(7168 * 2, 16).num_bytes
        assert num_bytes % 128 == 0
        assert layout.max_rows(row, header_bytes(1024, num_ranks)) >= 4096
        assert num_bytes < 1.03 * 2 * num_ranks * 4096 * 7168 * 2
    assert Config().get_rdma_buffer_size_hint(7168 * 2, 16) == 0


def between_nodes(group, x, idx, w):
    """A round by the names for several nodes: all arguments by position, then by name."""
    x, idx, w = to_device(x, idx, w)
    buffer, config = Buffer(group, 1 << 22), Config(8)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    layout = per_rank, per_node, in_rank, per_expert
    sent = x, None, *layout, idx, w
    recv_x, recv_idx, recv_w, counts, handle, _ = buffer.internode_dispatch(*sent, 1, config)
    again = buffer.internode_dispatch(x, handle=handle, config=config)[0]
    assert torch.equal(again, recv_x)
    out = buffer.internode_combine(recv_x, handle, config=config)[0]
    return to_cpu(x=recv_x, idx=recv_idx, w=recv_w, counts=counts, out=out)


def test_calls_between_nodes_are_those_of_one_node(pool):
    results, inputs = run_client(pool, between_nodes)
    received = check_received(results, inputs)
    check_combined(results, inputs, received, lambda part: part.x)


def look_around(group):
    """Calls that send nothing, on one rank, and how many programs a call with a Config uses."""
    buffer = Buffer(group, 1 << 20)
    size = buffer.num_nvl_bytes
    everything = buffer.get_local_buffer_tensor(torch.uint8)
    assert size * 0.9 < everything.numel() <= size
    part = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([3, 8]), 64)
    part.fill_(1)
    assert part.shape == (3, 8)
    assert everything[64:112].view(torch.bfloat16).eq(1).all()
    whole = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    assert whole.numel() == everything.numel()
    if cases.device().type == "cpu":
        with pytest.raises(BackendError, match="no streams"):
            buffer.get_comm_stream()
        assert not Buffer.is_sm90_compiled()
    else:
        assert buffer.get_comm_stream() is buffer.get_comm_stream()
        assert buffer.get_comm_stream() != torch.cuda.current_stream()
    used = []
    for verb in ("dispatch", "dispatch_cached", "combine"):
        run = getattr(buffer._engine, verb)

        def watched(*args, run=run):
            used.append(next(arg for arg in args[2:] if type(arg) is int and arg))
            return run(*args)

        setattr(buffer._engine, verb, watched)
    x, idx, w = to_device(torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)
    for config in (Config(8), None):
        recv, *_, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, idx, w, config=config
        )
        buffer.dispatch(recv, handle, config=config)
        buffer.combine(recv, handle, config=config)
    assert used == [8] * 3 + [Buffer.num_sms] * 3
    buffer.destroy()
    collective = Buffer(group, backend="collective")
    with pytest.raises(BackendError, match="no memory of its own"):
        collective.get_local_buffer_tensor(torch.uint8)


def test_calls_that_send_nothing(pool):
    pool.run(look_around, num_ranks=1)


def asynchronous(group, x, idx, w):
    """An asynchronous dispatch and combine after busy inputs give what plain calls give."""
    x, idx, w = to_device(x, idx, w)
    buffer = Buffer(group, Config().get_nvl_buffer_size_hint(HIDDEN * 4, group.size()))
    plain = exchange_rows(buffer, x, idx, w)
    if x.is_cuda:
        torch.cuda._sleep(20_000_000)
    late = exchange_rows(buffer, x * 1, idx.clone(), w * 1, async_finish=True)
    captured = exchange_rows(
        buffer, x * 1, idx, w, previous_event=True, async_finish=True, allocate_on_comm_stream=True
    )
    buffer.check()
    return [to_cpu(**result) for result in (plain, late, captured)]


def exchange_rows(buffer, x, idx, w, previous_event=False, **flags):
    def when():
        return flags | {"previous_event": Buffer.capture() if previous_event else None}

    per_rank, _, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS, **when())
    if flags:
        event.current_stream_wait()
    recv_x, recv_idx, recv_w, counts, handle, event = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, idx, w, **when()
    )
    assert (event.event is None) is not bool(flags)
    with event():
        del x, w
    out, _, event = buffer.combine(recv_x * 2, handle, **when())
    event.current_stream_wait()
    return {"x": recv_x, "idx": recv_idx, "w": recv_w, "counts": counts, "out": out}


@pytest.mark.parametrize("num_ranks", cases.slow_unless([(2,), (3,)], [1, 2, 3, 4]))
def test_asynchronous_calls_give_the_same(pool, num_ranks):
    results, inputs = run_client(pool, asynchronous, num_ranks=num_ranks)
    for turn in range(3):
        at_turn = [result[turn] for result in results]
        received = check_received(at_turn, inputs)
        check_combined(at_turn, inputs, received, lambda part: part.x * 2)


def keep_several(group, x, idx, w):
    """Two Buffers of other shapes, their calls interleaved; one dropped, a third made after it."""
    device = cases.device()
    hint = Config().get_nvl_buffer_size_hint(4 * HIDDEN, group.size())
    one, two = Buffer(group, hint), Buffer(group, hint // 2)
    args = to_device(x, idx, w)
    narrow = [args[0][:, :7].bfloat16(), *args[1:]]
    results = []
    for _ in range(3):
        layouts = [buffer.get_dispatch_layout(args[1], EXPERTS) for buffer in (one, two)]
        sent = [
            buffer.dispatch(rows[0], None, layout[0], None, layout[3], layout[2], *rows[1:])
            for buffer, rows, layout in zip((one, two), (args, narrow), layouts, strict=True)
        ]
        out_two, _, _ = two.combine(sent[1][0], sent[1][4])
        out_one, _, _ = one.combine(sent[0][0], sent[0][4])
        results += [out_one.cpu(), out_two.cpu()]
    torch.distributed.barrier(group)
    gc.collect()  # the interpreter leaves the tensors of a launch in a cycle
    before = num_mapped()
    del one
    gc.collect()
    gone = before - num_mapped()
    one = Buffer(group, hint)
    assert device.type == "cuda" or gone == group.size()
    for buffer, rows in ((two, narrow), (one, args)):
        results.append(exchange_rows(buffer, *rows)["out"].cpu())
    torch.distributed.barrier(group)
    return results


def num_mapped():
    """Symmetric blocks that this process maps (on a CPU)."""
    return sum("memfd:moe_engine" in line for line in Path("/proc/self/maps").open())


def test_several_buffers_at_once(pool):
    results, (x, idx, _) = run_client(pool, keep_several)
    for rank, parts in enumerate(results):
        num_ranks = reference.layout(idx[rank], EXPERTS, 2)[2].sum(1, keepdim=True)
        wide = x[rank] * num_ranks
        narrow = (x[rank][:, :7].bfloat16().float() * num_ranks).bfloat16()
        assert all(torch.equal(part, wide) for part in parts[:6:2])
        assert all(torch.equal(part, narrow) for part in parts[1:6:2])
        assert torch.equal(parts[6], (narrow.float() * 2).bfloat16())
        assert torch.equal(parts[7], wide * 2)


def align(group, x, idx, w):
    x, idx, w = to_device(x, idx, w)
    buffer = Buffer(group, 1 << 20)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    more = [None, per_rank, None, in_rank, per_expert, idx, w, 128]
    recv_x, recv_idx, recv_w, counts, handle, _ = buffer.dispatch(x, *more)
    out, out_w, _ = buffer.combine(recv_x, handle, topk_weights=recv_w)
    worst, *_, no_counts, _, _ = buffer.dispatch(x, *more, num_worst_tokens=64)
    assert no_counts == []
    assert torch.equal(worst[: len(recv_x)], recv_x)
    buffer.check()
    return to_cpu(x=recv_x, idx=recv_idx, w=recv_w, counts=counts, out=out, out_w=out_w)


@pytest.mark.parametrize("kind", ["empty_rank", "nothing", "duplicates"])
def test_alignment_and_ranks_that_receive_nothing(pool, kind):
    results, inputs = run_client(pool, align, kind=kind, num_ranks=4)
    received = check_received(results, inputs, alignment=128)
    check_combined(results, inputs, received, lambda part: part.x)
    assert (len(results[3]["x"]) == 0) is (kind != "duplicates")
    for have, idx, w in zip(results, *inputs[1:], strict=True):
        assert torch.equal(have["out_w"], torch.where(idx >= 0, w, 0.0))


def gloo_only(group, ranks, x, idx, w):
    """A round trip in a group of `ranks` alone, which has no CUDA collectives."""
    cpu_group = torch.distributed.new_group(ranks, backend="gloo")
    if group.rank() not in ranks:
        return None
    buffer = Buffer(cpu_group, 1 << 20)
    result = exchange_rows(buffer, *to_device(x, idx, w))
    buffer.check()
    torch.distributed.barrier(cpu_group)
    return to_cpu(**result)


def test_a_gloo_group_of_some_ranks(pool):
    inputs = make_inputs(2, [9, 5], HIDDEN, EXPERTS, TOPK, "holes", "fp32")
    others = pool.num_ranks - 2
    parts = [PerRank([part[0]] * others + part) for part in inputs]
    results = pool.run(gloo_only, [others, others + 1], *parts)[others:]
    received = check_received(results, inputs)
    check_combined(results, inputs, received, lambda part: part.x * 2)


# --- Refused ---------------------------------------------------------------------------------


def refuse(group):
    buffer = Buffer(group, 1 << 20)
    x, idx, w = to_device(torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2)
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    *_, handle, _ = buffer.dispatch(x, **layout, topk_idx=idx, topk_weights=w)
    epoch = int(buffer._engine.slots.context.fields[0])
    errors = moe_engine.ShapeError, moe_engine.DtypeError, moe_engine.CapacityError
    dispatch, combine, view = buffer.dispatch, buffer.combine, buffer.get_local_buffer_tensor
    layout_of = buffer.get_dispatch_layout
    refused = [
        (0, "topk_weights is None", dispatch, (x,), layout | {"topk_idx": idx}),
        (0, "topk_idx is None", dispatch, (x,), layout | {"topk_weights": w}),
        (0, "only x is sent", dispatch, (x, handle), {"topk_idx": idx}),
        (0, "expert_alignment is 0", dispatch, (x,), layout | {"expert_alignment": 0}),
        (0, "num_worst_tokens is -1", dispatch, (x,), layout | {"num_worst_tokens": -1}),
        (0, "allocate_on_comm_stream", layout_of, (idx, 2), {"allocate_on_comm_stream": True}),
        (0, "allocate_on_comm_stream", combine, (x, handle), {"allocate_on_comm_stream": True}),
        (0, "offset is 3", view, (torch.float32,), {"offset": 3}),
        (0, "offset is -4", view, (torch.float32,), {"offset": -4}),
        (1, "config is a int", dispatch, (x,), layout | {"config": 24}),
        (1, "config is a dict", combine, (x, handle), {"config": {}}),
        (1, "previous_event", combine, (x, handle), {"previous_event": 1}),
        (1, "must be float8_e4m3fn", dispatch, ((x, w),), layout),
        (2, "size is", view, (torch.float32, [1 << 20]), {}),
        (2, "there is room for 0", view, (torch.int8, [1]), {"offset": 1 << 30}),
    ]
    for kind, text, call, args, more in refused:
        with pytest.raises(errors[kind], match=text):
            call(*args, **more)
    assert int(buffer._engine.slots.context.fields[0]) == epoch
    buffer.destroy()


def test_bad_arguments_are_refused_before_a_kernel_runs(pool):
    pool.run(refuse, num_ranks=1)


def test_bad_configs_are_refused():
    for num_sms in (0, 7, -2):
        with pytest.raises(moe_engine.ShapeError, match="num_sms"):
            Config(num_sms)
    with pytest.raises(moe_engine.ShapeError, match="num_ranks"):
        Buffer.get_dispatch_config(0)
    with pytest.raises(moe_engine.ShapeError, match="hidden_bytes"):
        Config().get_nvl_buffer_size_hint(0, 2)
