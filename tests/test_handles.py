"""Handles and plain arguments of the wrong kind are refused before a kernel runs."""

from __future__ import annotations

import dataclasses
from functools import partial

import cases
import low_latency_cases as low_latency
import pytest
import torch
from failure_cases import fields_of_calls

from moe_engine import (
    Buffer,
    Config,
    ElasticBuffer,
    EventHandle,
    EventOverlap,
    Handle,
    MoeEngineError,
    Options,
    moe_ffn,
)
from moe_engine.errors import DtypeError, ShapeError

EXPERTS, TOPK, HIDDEN, TOKENS = 4, 2, 128, 6


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""


class Standing(torch.Tensor):
    """A subclass that stands for another tensor, as a DTensor does."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def freed(tensor):
    """The tensor as FSDP leaves it."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def strided(tensor):
    """The same values, twice as far apart."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


BAD = {
    "none": lambda t: None,
    "a list": lambda t: t.tolist(),
    "a number": lambda t: 3,
    "another dtype": lambda t: t.to(torch.int16),
    "a float": lambda t: t.float(),
    "empty": lambda t: t[:0],
    "shorter": lambda t: t[:-1],
    "longer": lambda t: torch.cat([t, t]),
    "one more size": lambda t: t[None],
    "flat": lambda t: t.flatten() if t.dim() > 1 else t[0],
    "strided": strided,
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: (t if t.dim() > 1 else t[None]).to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t.float(), t.float()]).to(t.dtype),
    "freed": freed,
    "standing for others": Standing,
}
FIT_ANY = {("rank_prefix_matrix", "strided")}
"""What changes nothing on one rank."""


def wrong_answers(call, parts, names, besides=()):
    """What a call gives for each part of a handle in each bad form, where that is no typed error
    that names it; (part, form) in `besides` may be anything."""
    wrong = []
    for index, name in enumerate(names):
        if not isinstance(parts[index], torch.Tensor):
            continue
        for kind, change in BAD.items():
            if (name, kind) in FIT_ANY or (name, kind) in besides:
                continue
            bad = list(parts)
            bad[index] = change(parts[index])
            try:
                call(tuple(bad))
                wrong.append((name, kind, "no error"))
            except MoeEngineError as error:
                # A length that x is compared with is not noticed.
                if "handle." not in str(error) and "x has shape" not in str(error):
                    wrong.append((name, kind, str(error)))
            except Exception as error:
                wrong.append((name, kind, repr(error)))
    return wrong


def tokens():
    x, w = cases.tokens(TOKENS, HIDDEN, TOPK, torch.bfloat16, 0)
    return [t.to(cases.device()) for t in (x, cases.route("uniform", TOKENS, EXPERTS, TOPK, 0), w)]


def dispatch(buffer, x, idx, w, **more):
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    return buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, w, **more)


def bad_handles(group, backend):
    buffer = Buffer.for_tokens(group, TOKENS, HIDDEN, EXPERTS, TOPK, backend=backend)
    x, idx, w = tokens()
    recv_x, _, _, _, handle, _ = dispatch(buffer, x, idx, w)
    context = None if backend == "collective" else buffer._engine.slots.context
    before = None if context is None else fields_of_calls(context)
    wrong = wrong_answers(lambda bad: buffer.combine(recv_x, bad), handle, Handle._fields)
    # How many rows come only the values of a handle say.
    lengths = [("recv_src_idx", kind) for kind in ("empty", "shorter", "longer")]
    wrong += wrong_answers(lambda bad: buffer.dispatch(x, bad), handle, Handle._fields, lengths)
    assert context is None or torch.equal(fields_of_calls(context), before), "a kernel ran"
    for bad in (3, "handle", recv_x, {}, handle[:5], (*handle, handle[0])):
        with pytest.raises(MoeEngineError, match="handle"):
            buffer.combine(recv_x, bad)
    want, _, _ = buffer.combine(recv_x, handle)
    for good in (tuple(handle), list(handle), [t.as_subclass(Tagged) for t in handle]):
        assert torch.equal(buffer.combine(recv_x, good)[0], want)
        assert torch.equal(buffer.dispatch(x, good)[0], recv_x)
    buffer.destroy()
    return wrong


@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_handles_of_another_make(pool, backend):
    assert pool.run(bad_handles, backend, num_ranks=1) == [[]]


def bad_low_latency_handles(group):
    buffer = low_latency.make_buffer(group, TOKENS, HIDDEN, EXPERTS)
    x, idx, w = tokens()
    y, _, handle = low_latency.dispatch(buffer, x, idx, TOKENS, EXPERTS)
    fields = fields_of_calls(buffer._low_latency.ring.context)

    def changed(**fields):
        return dataclasses.replace(handle, **fields)

    def combined(bad):
        buffer.low_latency_combine(y, idx, w, changed(memory=bad[0]))

    def taken(bad):
        buffer.get_next_low_latency_combine_buffer(changed(memory=bad[0]))

    wrong = wrong_answers(combined, [handle.memory], ["memory"])
    wrong += wrong_answers(taken, [handle.memory], ["memory"])
    shifted = torch.empty(len(handle.memory) + 1, dtype=torch.int32, device=x.device)[1:]
    bad_sizes = (0, -1, 2**40, 1.0, True, "8", None, torch.tensor(16), torch.tensor([1, 1]))
    for name, good in handle.sizes._asdict().items():
        for bad in (*bad_sizes, good + 1):
            try:
                sizes = handle.sizes._replace(**{name: bad})
                buffer.low_latency_combine(y, idx, w, changed(sizes=sizes))
                wrong.append((name, bad, "no error"))
            except MoeEngineError:
                pass
    bad_sizes = handle.sizes._replace(num_ranks=2), tuple(handle.sizes), handle.sizes[:3], 3, None
    bad_handles = *(changed(sizes=bad) for bad in bad_sizes), changed(memory=shifted)
    for bad in (tuple(handle), handle[:3], 3, None, *bad_handles):
        with pytest.raises(MoeEngineError, match="handle"):
            buffer.low_latency_combine(y, idx, w, bad)
    assert torch.equal(fields_of_calls(buffer._low_latency.ring.context), fields), "a kernel ran"
    buffer.destroy()
    return wrong


def test_low_latency_handles_of_another_make(pool):
    assert pool.run(bad_low_latency_handles, num_ranks=1) == [[]]


NO_INTS = (8.0, "8", True, None, torch.tensor(16), [8], 10**5000)
NO_FLAGS = (2, -1, "yes", None, 1.0, torch.tensor([True, False]))


def refusals(calls):
    """The calls, by name and value, that no typed error refuses by the name of the argument."""
    wrong = []
    for name, (call, values) in calls.items():
        for value in values:
            try:
                call(value)
                wrong.append(f"{name} = {value!r:.40}: no error")
            except MoeEngineError as error:
                if name.split()[-1] not in str(error):
                    wrong.append(f"{name} = {value!r:.40}: {error}")
            except Exception as error:
                wrong.append(f"{name} = {value!r:.40}: {error!r}")
    return wrong


def bad_plain_arguments(group):
    options = Options(decode_tokens=0)
    buffer = Buffer.for_tokens(group, TOKENS, HIDDEN, EXPERTS, TOPK, options=options)
    x, idx, w = tokens()
    recv_x, _, _, _, handle, _ = dispatch(buffer, x, idx, w)
    up, down = x.new_zeros(EXPERTS, 32, HIDDEN), x.new_zeros(EXPERTS, HIDDEN, 16)
    fields = fields_of_calls(buffer._engine.slots.context)

    def with_(name):
        return lambda value: dispatch(buffer, x, idx, w, **{name: value})

    ints = {
        "num_experts": (lambda v: buffer.get_dispatch_layout(idx, v), (*NO_INTS, 0, -4, 2**40)),
        "expert_alignment": (with_("expert_alignment"), (*NO_INTS, 0, -1, 2.5)),
        "num_worst_tokens": (with_("num_worst_tokens"), (*NO_INTS, -1, 2**40)),
        "max_tokens": (
            lambda v: moe_ffn(x, idx, w, up, down, buffer, v),
            [v for v in (*NO_INTS, -1) if v is not None],
        ),
        "num_ranks": (Buffer.get_dispatch_config, (*NO_INTS, 0)),
        "num_sms": (Buffer.set_num_sms, (*NO_INTS, 0, -2, 7, 2**20)),
        "Config of num_sms": (Config, (*NO_INTS, 0, 7)),
        "hidden": (lambda v: buffer.warmup(v, EXPERTS, TOPK), (*NO_INTS, 0)),
        "num_topk": (lambda v: buffer.warmup(HIDDEN, EXPERTS, v), (*NO_INTS, 0)),
        "layer_config of num_topk": (lambda v: buffer.layer_config(up, v), (*NO_INTS, 0)),
        "offset": (
            lambda v: buffer.get_local_buffer_tensor(torch.int32, None, v),
            (*NO_INTS, -4, 2),
        ),
        "size": (lambda v: buffer.get_local_buffer_tensor(torch.int32, v), (8, "8", [-1], [2.0])),
    }
    flags = {
        name: (with_(name), NO_FLAGS)
        for name in ("async_finish", "in_place", "allocate_on_comm_stream")
    }
    others = {
        "config": (with_("config"), (20, {"num_sms": 20}, "fast")),
        "previous_event": (with_("previous_event"), (1, x, object())),
        "bias": (lambda v: buffer.combine(recv_x, handle, bias=v), (3, "no", {}, [None], [x] * 3)),
        "dtype": (buffer.get_local_buffer_tensor, (None, "int32", 4, torch.zeros(1))),
        "warmup of dtype": (
            lambda v: buffer.warmup(HIDDEN, EXPERTS, TOPK, v),
            ("bf16", torch.float16),
        ),
        "warmup of weights": (
            lambda v: buffer.warmup(HIDDEN, EXPERTS, TOPK, weights=v),
            (3, up, (up,), (up, down, down), (up[:1], down), (up, down[:1])),
        ),
        "warmup of biases": (
            lambda v: buffer.warmup(HIDDEN, EXPERTS, TOPK, weights=(up, down), biases=v),
            (None, 3, (None,)),
        ),
        "w_gate_up": (lambda v: moe_ffn(x, idx, w, v, down, buffer), (None, 3, up.float())),
        "w_down": (lambda v: moe_ffn(x, idx, w, up, v, buffer), (None, up, down[:, :, :8])),
        "layer_config of w_gate_up": (lambda v: buffer.layer_config(v, 2), (None, 3, up[0])),
        "topk_idx": (lambda v: moe_ffn(x, v, w, up, down, buffer), (None, idx.tolist(), idx.int())),
        "topk_weights": (lambda v: moe_ffn(x, idx, v, up, down, buffer), (None, w.bfloat16())),
        "buffer": (lambda v: moe_ffn(x, idx, w, up, down, v), (None, "buffer", group)),
    }
    wrong = refusals(ints | flags | others)
    for kind, change in BAD.items():
        for name, tensor in (("topk_idx", idx), ("w_down", down), ("topk_weights", w)):
            if (name, kind) in (("topk_idx", "strided"), ("topk_weights", "strided")):
                continue  # they may be
            if (name, kind) == ("topk_weights", "a float"):
                continue
            args = {"topk_idx": idx, "topk_weights": w, "w_gate_up": up, "w_down": down}
            call = partial(moe_ffn, x, buffer=buffer, **(args | {name: change(tensor)}))
            with pytest.raises(MoeEngineError, match=name):
                call()
    assert torch.equal(fields_of_calls(buffer._engine.slots.context), fields), "a kernel ran"
    Buffer.set_num_sms(20)
    buffer.destroy()
    return wrong


def test_plain_arguments(pool):
    assert pool.run(bad_plain_arguments, num_ranks=1) == [[]]


def bad_low_latency_arguments(group):
    buffer = low_latency.make_buffer(group, TOKENS, HIDDEN, EXPERTS, enable_shrink=True)
    x, idx, w = tokens()
    y, _, handle = low_latency.dispatch(buffer, x, idx, TOKENS, EXPERTS)
    fields = fields_of_calls(buffer._low_latency.ring.context)
    masks = torch.zeros(group.size(), dtype=torch.int32, device=x.device)
    numbers = (*NO_INTS, 0, -1, 2**40)

    def with_(name):
        def call(value):
            args = {"num_max_dispatch_tokens_per_rank": TOKENS, "num_experts": EXPERTS}
            buffer.low_latency_dispatch(x, idx, **(args | {name: value}))

        return call

    def back_with(name):
        return lambda value: buffer.low_latency_combine(y, idx, w, handle, **{name: value})

    names = ("use_fp8", "round_scale", "use_ue8m0", "async_finish", "return_recv_hook")
    back = ("use_logfmt", "async_finish", "return_recv_hook")
    wrong = refusals(
        {
            name: (with_(name), numbers)
            for name in ("num_max_dispatch_tokens_per_rank", "num_experts")
        }
        | {name: (with_(name), NO_FLAGS) for name in names}
        | {f"back with {name}": (back_with(name), NO_FLAGS) for name in back}
        | {
            "out": (back_with("out"), (3, x.float(), strided(x), x.to("meta"), freed(x))),
            "topk_weights": (
                lambda v: buffer.low_latency_combine(y, idx, v, handle),
                (None, w[:, :1], w.double(), w.to("meta")),
            ),
            "mask_status": (
                buffer.low_latency_query_mask_buffer,
                (None, masks.long(), masks[:0], masks.tolist(), masks.to("meta")),
            ),
            "rank_to_mask": (buffer.low_latency_update_mask_buffer, (*NO_INTS, -1, 1)),
            "mask": (lambda v: buffer.low_latency_update_mask_buffer(0, v), NO_FLAGS),
            "hidden": (lambda v: buffer.clean_low_latency_buffer(TOKENS, v, EXPERTS), numbers),
        }
    )
    assert torch.equal(fields_of_calls(buffer._low_latency.ring.context), fields), "a kernel ran"
    low_latency.combine(buffer, y, idx, w, handle)
    buffer.destroy()
    return wrong


def test_low_latency_arguments(pool):
    assert pool.run(bad_low_latency_arguments, num_ranks=1) == [[]]


def test_events():
    for bad in (3, "event", torch.zeros(1)):
        with pytest.raises(DtypeError, match="event is a"):
            EventOverlap(bad).current_stream_wait()
        with pytest.raises(DtypeError, match="hook_after_wait is a"):
            EventOverlap().register_hook_after_wait(bad)
        with pytest.raises(DtypeError, match="release_handle"):
            EventOverlap(EventHandle())(release_handle=bad)


def test_an_event_in_an_event():
    """As a caller wraps the event that a dispatch returned."""
    inner, calls = EventOverlap(EventHandle()), []
    inner.register_hook_after_wait(hook_after_wait=lambda: calls.append("inner") or 3)
    outer = EventOverlap(inner)
    assert outer.wait() == 3
    assert outer.wait() is None
    outer.register_hook_after_wait(lambda: 1)
    outer.register_hook_after_wait(lambda: calls.append("second"))
    assert outer.current_stream_wait(release_handle=True) == 1
    assert outer.event is None
    assert calls == ["inner", "second"]
    assert EventOverlap(EventOverlap()).wait() is None
    with EventOverlap(inner):
        pass


# --- Handles and what their callers change afterwards --------------------------------------------


def run_changed_results(group, waits, expand, copies):
    """Whether dispatches with a handle bring what the first one brought, after all that the caller
    has of that, and its ids, were changed and resized."""
    torch.manual_seed(group.rank())
    sizes = dict(num_max_tokens_per_rank=8, hidden=64, num_topk=2)
    buffer, device = ElasticBuffer(group, **sizes), cases.device()
    x = torch.randn(5, 64).bfloat16().to(device)
    idx = torch.stack([torch.randperm(4)[:2] for _ in x]).to(device)
    weights, found = torch.rand(5, 2).to(device), []
    how = dict(num_experts=4, do_cpu_sync=waits, do_expand=expand, do_handle_copy=copies)
    for _ in range(2):  # the first call of a kind, and a prepared one
        sent = idx.clone(), weights.clone()
        rows, ids, of_rows, handle, _ = buffer.dispatch(x, *sent, **how)
        num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        before, _, weights_before, _, _ = buffer.dispatch(x, topk_weights=weights, handle=handle)
        first = None if ids is None else ids.clone()
        for one in (rows, ids, of_rows, *(sent if copies else sent[1:])):
            if one is not None:
                one.resize_(one.numel() + 999, *one.shape[1:]).fill_(-1)
        if not copies:
            kept, sent[0].data = sent[0].data, sent[0].new_zeros(99, 2)
            with pytest.raises(ShapeError, match=r"topk_idx has shape \[99, 2\]"):
                buffer.dispatch(x, topk_weights=weights, handle=handle)
            with pytest.raises(ShapeError, match=r"x has shape \[99, 64\]"):
                buffer.dispatch(x.new_zeros(99, 64), handle=handle)
            buffer.dispatch(x, handle=handle)
            sent[0].data = kept
        for given in weights, None:
            again, ids, of_rows, _, _ = buffer.dispatch(x, topk_weights=given, handle=handle)
            found.append(torch.equal(again[:num_rows], before[:num_rows]))
            found.append(first is None or torch.equal(ids, first))
            if given is not None:
                found.append(torch.equal(of_rows[:num_rows], weights_before[:num_rows]))
    buffer.check()
    buffer.destroy()
    return found


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_a_handle_is_not_of_what_its_caller_changes(pool, waits, expand, copies):
    assert all(map(all, pool.run(run_changed_results, waits, expand, copies, num_ranks=2)))
