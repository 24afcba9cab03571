"""Wrong calls are refused before a kernel runs; a lost rank is named after the deadline."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import cases
import pytest
import torch
from dispatch_cases import make_inputs
from failure_cases import EXPERTS, dispatch, first_use, new_buffer, tokens

from moe_engine import (
    BackendError,
    Buffer,
    CapacityError,
    DtypeError,
    MoeEngineError,
    Options,
    PeerTimeout,
    RoutingError,
    ShapeError,
    combine,
    moe_ffn,
)
from moe_engine import dispatch as dispatch_verbs
from moe_engine.deadline import timeout_seconds
from moe_engine.emulation import PerRank, RankError

# --- Lost peers ------------------------------------------------------------------------------


def used_buffer(group, *tokens):
    return cases.used_buffer(group, partial(new_buffer, group), lambda b: first_use(b, *tokens))


def lose_a_rank(group, lost, before, x, topk_idx, topk_weights):
    """Rank `lost` is killed before the launch named `before`; what the others then see."""
    buffer, timeout_s, _ = used_buffer(group, x, topk_idx, topk_weights)
    if torch.distributed.get_rank(group) == lost:
        module = combine if hasattr(combine, before) else dispatch_verbs
        assert hasattr(module, before)
        setattr(module, before, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    try:
        recv_x, _, _, _, handle, _ = dispatch(buffer, x, topk_idx, topk_weights)
        buffer.combine(recv_x, handle)
        buffer.check()
    except PeerTimeout as error:
        seconds = time.monotonic() - start
        with pytest.raises(PeerTimeout):  # and again at every later call
            buffer.get_dispatch_layout(topk_idx.to(cases.device()), EXPERTS)
        return error.peer, error.phase, seconds / timeout_s, str(error)
    return None


@pytest.mark.parametrize(
    ("before", "phase"),
    [
        pytest.param("exchange", "counts", marks=pytest.mark.slow),
        ("push", "rows"),
        pytest.param("return_and_sum", "counts", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_named(pool, before, phase):
    if pool.device == "cuda":
        pytest.skip("a killed process takes its part of the NCCL group along")
    before_the_run = cases.shared_files()
    x, idx, w = make_inputs(3, [5], 16, EXPERTS, 2, "uniform", "fp32")
    results = pool.run(
        lose_a_rank, 1, before, PerRank(x), PerRank(idx), PerRank(w), num_ranks=3,
        expect_death={1},
    )  # fmt: skip
    assert results[1] is None
    for rank in (0, 2):
        peer, seen_phase, deadlines, text = results[rank]
        assert (peer, seen_phase) == (1, phase)
        assert 1 <= deadlines < 5
        assert f"rank {rank} waited" in text
        assert "MOE_ENGINE_TIMEOUT_S" in text
    assert cases.shared_files() <= before_the_run


def stay_away(group, x, topk_idx, topk_weights):
    buffer, _, _ = used_buffer(group, x, topk_idx, topk_weights)
    seen = None
    if torch.distributed.get_rank(group) != 0:
        try:
            dispatch(buffer, x, topk_idx, topk_weights)
            buffer.check()
        except PeerTimeout as error:
            seen = error.peer, error.phase
    torch.distributed.barrier(group)
    buffer.destroy()
    return seen


def test_a_rank_that_never_calls_is_named(pool):
    x, idx, w = make_inputs(2, [5], 16, EXPERTS, 2, "uniform", "fp32")
    results = pool.run(stay_away, PerRank(x), PerRank(idx), PerRank(w), num_ranks=2)
    assert results == [None, (0, "counts")]


# --- Calls that do not match -----------------------------------------------------------------


def call_with(group, hidden, num_topk):
    buffer = new_buffer(group, hidden=64)
    idx = cases.route("uniform", 8, EXPERTS, num_topk, 0)
    try:
        dispatch(buffer, *tokens(8, hidden, num_topk, idx))
        buffer.check()
    except ShapeError as error:
        return str(error)
    finally:
        torch.distributed.barrier(group)
    return None


@pytest.mark.parametrize(
    ("hidden", "num_topk"), [([16, 24], [2, 2]), ([17, 20], [2, 2]), ([16, 16], [1, 2])]
)
def test_ranks_that_disagree_are_told(pool, hidden, num_topk):
    texts = pool.run(call_with, PerRank(hidden), PerRank(num_topk), num_ranks=2)
    assert all("different shapes" in text for text in texts)


# --- Bad values ------------------------------------------------------------------------------


def bad_ids(group, debug):
    buffer = new_buffer(group, debug=debug)
    x, w = cases.tokens(4, 16, 2, torch.float32, 0)
    idx = torch.tensor([[0, 1], [EXPERTS, -1], [2, -7], [3, 4]])
    texts = []
    for _ in range(2):
        try:
            buffer.get_dispatch_layout(idx.to(cases.device()), EXPERTS)
            buffer.check()
        except RoutingError as error:
            texts.append(str(error))
    good = idx.clamp(-1, EXPERTS - 1)
    recv, ids, *_ = dispatch(buffer, x, good, w)  # the Buffer works on
    buffer.destroy()
    return texts, recv.shape[0], int((ids >= 0).sum())


def bad_ids_in_a_layer(group):
    """One rank's bad ids do not stop the call: both ranks finish it, and one raises afterwards."""
    rank = torch.distributed.get_rank(group)
    buffer = new_buffer(group)
    x, w = cases.tokens(4, 16, 2, torch.float32, 0)
    idx = torch.tensor([[0, 11], [EXPERTS if rank else 3, -1], [2, 7], [3, 4]])
    args = [t.to(cases.device()) for t in (x, idx, w, UP[: EXPERTS // 2], DOWN[: EXPERTS // 2])]
    moe_ffn(*args, buffer)
    text = None
    try:
        buffer.check()
    except RoutingError as error:
        text = str(error)
    args[1].clamp_(-1, EXPERTS - 1)
    moe_ffn(*args, buffer)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return text


def test_bad_ids_do_not_end_a_call_in_the_middle(pool):
    first, second = pool.run(bad_ids_in_a_layer, num_ranks=2)
    assert first is None
    assert "1 expert ids" in second


def bad_ids_before_a_backward(group):
    """The gradient of two layers, the second with a bad id on rank 1, and what check says."""
    rank = torch.distributed.get_rank(group)
    buffer = new_buffer(group)
    x, w = cases.tokens(4, 16, 2, torch.float32, 0)
    idx = torch.tensor([[0, 11], [3, -1], [2, 7], [3, 4]])
    weights = (torch.full_like(one[: EXPERTS // 2], 0.25) for one in (UP, DOWN))
    args = [t.to(cases.device()) for t in (w, *weights)]
    x, idx = x.to(args[0].device).requires_grad_(), idx.to(args[0].device)
    bad = idx.clone()
    bad[1, 1] = EXPERTS if rank else -1
    moe_ffn(moe_ffn(x, idx, *args, buffer), bad, *args, buffer).sum().backward()
    text = None
    try:
        buffer.check()
    except RoutingError as error:
        text = str(error)
    torch.distributed.barrier(group)
    buffer.destroy()
    return x.grad.cpu(), text


def test_bad_ids_do_not_end_a_backward(pool):
    """Its other calls would be missing on one rank, and the others would wait for them."""
    (first, text), (second, told) = pool.run(bad_ids_before_a_backward, num_ranks=2)
    torch.testing.assert_close(first, second)  # the ranks have the same tokens
    assert first.any()
    assert text is None
    assert "2 expert ids" in told  # of the forward, and of the backward


@pytest.mark.parametrize("debug", [False, True])
def test_bad_ids_are_reported_and_skipped(pool, debug):
    [(texts, num_rows, num_ids)] = pool.run(bad_ids, debug, num_ranks=1)
    assert len(texts) == 2
    assert "2 expert ids" in texts[0]
    assert (num_rows, num_ids) == (4, 6)


def ids_of_64_bits(group):
    """The ids that arrive of tokens with a good one and one that would be good in 32 bits."""
    buffer = new_buffer(group)
    x, w = cases.tokens(2, 16, 2, torch.float32, 0)
    idx = torch.tensor([[0, 2**32 + 1], [-(2**32), 3]])
    try:
        _, ids, *_ = dispatch(buffer, x, idx, w)
    except RoutingError as error:
        _, ids, *_ = error.result
    buffer.destroy()
    return ids.tolist()


def test_ids_are_not_cut_to_32_bits(pool):
    assert pool.run(ids_of_64_bits, num_ranks=1) == [[[0, -1], [-1, 3]]]


def negative_counts(group):
    """What ranks say of a layout that a caller has written over on rank 0."""
    buffer = new_buffer(group)
    x, idx, w = tokens(6, 16, 2, cases.route("uniform", 6, EXPERTS, 2, 0))
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    if torch.distributed.get_rank(group) == 0:
        per_rank[1] = -1
    text = None
    try:
        buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, w)
        buffer.check()
    except CapacityError as error:
        text = str(error)
    torch.distributed.barrier(group)
    buffer.destroy()
    return text


def test_negative_counts_end_the_call_on_all_ranks(pool):
    texts = pool.run(negative_counts, num_ranks=2)
    assert all("more rows for rank" in text for text in texts)


def worst_tokens(group, num_worst_tokens):
    buffer = new_buffer(group)
    x, idx, w = tokens(6, 16, 2, cases.route("uniform", 6, EXPERTS, 2, 0))
    recv, ids, _, counts, _, _ = dispatch(buffer, x, idx, w, num_worst_tokens=num_worst_tokens)
    buffer.check()
    buffer.destroy()
    return recv.cpu(), ids.cpu(), counts, x


def test_worst_tokens(pool):
    [(recv, ids, counts, x)] = pool.run(worst_tokens, 9, num_ranks=1)
    assert torch.equal(recv[:6], x)
    assert (ids[6:] == -1).all()
    assert counts == []
    with pytest.raises(RankError, match="more rows than num_worst_tokens") as caught:
        pool.run(worst_tokens, 5, num_ranks=1)
    assert caught.value.cause_type is CapacityError


# --- Refused before a kernel runs ------------------------------------------------------------

X = torch.zeros(4, 16)
IDX = torch.zeros(4, 2, dtype=torch.int64)
W = torch.zeros(4, 2)
UP, DOWN = torch.zeros(EXPERTS, 16, 16), torch.zeros(EXPERTS, 16, 8)
COUNTS = torch.zeros(1, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.bool)
PER_EXPERT = torch.zeros(EXPERTS, dtype=torch.int32)

REFUSED = {
    "ids of another type": (DtypeError, "layout", (IDX.int(), EXPERTS)),
    "ids of one dimension": (ShapeError, "layout", (IDX[0], EXPERTS)),
    "no top-k": (ShapeError, "layout", (IDX[:, :0], EXPERTS)),
    "no experts": (ShapeError, "layout", (IDX, 0)),
    "not a tensor": (DtypeError, "ffn", ([1.0], IDX, W, UP, DOWN)),
    "x of fp16": (DtypeError, "ffn", (X.half(), IDX, W, UP, DOWN)),
    "x of three dimensions": (ShapeError, "ffn", (X[None], IDX, W, UP, DOWN)),
    "no columns": (ShapeError, "ffn", (X[:, :0], IDX, W, UP, DOWN)),
    "weights of another length": (ShapeError, "ffn", (X, IDX, W[:3], UP, DOWN)),
    "weights of another type": (DtypeError, "ffn", (X, IDX, W.bfloat16(), UP, DOWN)),
    "experts of another width": (ShapeError, "ffn", (X, IDX, W, UP[:, :, :8], DOWN)),
    "experts of another type": (DtypeError, "ffn", (X, IDX, W, UP.bfloat16(), DOWN)),
    "gate without up": (ShapeError, "ffn", (X, IDX, W, UP[:, :15], DOWN)),
    "down of another shape": (ShapeError, "ffn", (X, IDX, W, UP, DOWN[:, :, :4])),
    "experts that are not contiguous": (
        ShapeError,
        "ffn",
        (X, IDX, W, UP.transpose(1, 2).contiguous().transpose(1, 2), DOWN),
    ),
    "rows that are no multiple of 16 bytes": (
        ShapeError,
        "ffn",
        (X[:, :15], IDX, W, UP[:, :, :15].contiguous(), DOWN[:, :15].contiguous()),
    ),
    "x on another device": (ShapeError, "ffn", (X.to("meta"), IDX, W, UP, DOWN)),
    "ids on another device": (ShapeError, "layout", (IDX.to("meta"), EXPERTS)),
    "too many tokens": (
        CapacityError,
        "ffn",
        (X.repeat(9, 1), IDX.repeat(9, 1), W.repeat(9, 1), UP, DOWN),
    ),
    "a gradient that would be lost": (
        BackendError,
        "dispatch",
        (X.clone().requires_grad_(), None, COUNTS[0], None, COUNTS[1], PER_EXPERT, IDX, W),
    ),
    "dispatch without a layout": (ShapeError, "dispatch", (X,)),
    "ids without weights": (
        ShapeError,
        "dispatch",
        (X, None, COUNTS[0], None, COUNTS[1], PER_EXPERT, IDX),
    ),
    "layout of other tokens": (
        ShapeError,
        "dispatch",
        (X, None, COUNTS[0], None, COUNTS[1][:3], PER_EXPERT, IDX, W),
    ),
    "half a handle": (ShapeError, "combine", (X, (X, X))),
}


def on_device(tensor):
    return tensor if tensor.is_meta else tensor.to(cases.device())


def refuse(group, name):
    """The error that the call `name` gives, and that no kernel ran before it."""
    buffer = new_buffer(group)
    calls = {
        "layout": buffer.get_dispatch_layout,
        "dispatch": buffer.dispatch,
        "combine": buffer.combine,
        "ffn": lambda *args: moe_ffn(*args, buffer),
    }
    kind, verb, args = REFUSED[name]
    args = [on_device(a) if isinstance(a, torch.Tensor) else a for a in args]
    try:
        calls[verb](*args)
    except kind as error:
        return str(error), int(buffer._engine.slots.context.fields[0])
    finally:
        buffer.destroy()
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool, name):
    [(text, epoch)] = pool.run(refuse, name, num_ranks=1)
    assert text.endswith((".", ")"))
    assert epoch == 0


def three_biases(group):
    buffer = new_buffer(group)
    x, idx, w = tokens(6, 16, 2, cases.route("uniform", 6, EXPERTS, 2, 0))
    recv, _, _, _, handle, _ = dispatch(buffer, x, idx, w)
    with pytest.raises(ShapeError, match="at most 2"):
        buffer.combine(recv, handle, bias=[recv] * 3)
    with pytest.raises(ShapeError, match="bias has shape"):
        buffer.combine(recv, handle, bias=recv[:2])
    with pytest.raises(ShapeError, match="x has shape"):
        buffer.combine(recv[:2], handle)
    with pytest.raises(ShapeError, match="x has shape"):
        buffer.dispatch(recv[:2], handle)
    with pytest.raises(DtypeError, match=r"handle\.send_token_idx is a NoneType"):
        buffer.combine(recv, (handle[0], None, *handle[2:]))
    buffer.destroy()
    with pytest.raises(BackendError, match="destroyed"):
        buffer.combine(recv, handle)
    buffer.destroy()


def test_handles_must_fit(pool):
    pool.run(three_biases, num_ranks=1)


def make_bad_buffers(group):
    with pytest.raises(CapacityError, match="size_hint"):
        Buffer(group, 0)
    with pytest.raises(MoeEngineError, match="num_slots"):
        Buffer(group, 1 << 20, options=Options(num_slots=1))
    with pytest.raises(BackendError, match="comm="):
        Buffer(group, 1 << 20, comm=object())
    with pytest.raises(BackendError):
        Buffer(group, 1 << 20, backend="pigeon")
    rank = torch.distributed.get_rank(group)
    for options in (Options(num_slots=2 + rank), Options(max_tokens=4 + rank)):
        with pytest.raises(ShapeError, match="differ"):
            Buffer(group, 1 << 20, options=options)
    for bad in (Options(max_tokens=-1), Options(timeout_s=-1.0)):
        with pytest.raises(MoeEngineError, match="must be"):
            Buffer(group, 1 << 20, options=bad)
    with pytest.raises(MoeEngineError, match="max_tokens is 1073741824"):
        Buffer.for_tokens(group, 1 << 30, 16, 8, 2)
    buffer = Buffer(group, 1 << 20)
    with pytest.raises(ShapeError, match="multiple"):
        buffer.get_dispatch_layout(IDX.to(cases.device()), 7)
    buffer.destroy()


def test_buffers_that_cannot_be(pool):
    pool.run(make_bad_buffers, num_ranks=2)


def test_num_sms_must_be_even():
    with pytest.raises(ShapeError, match="even"):
        Buffer.set_num_sms(7)


def test_cpu_tensors_need_the_interpreter():
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="TRITON_INTERPRET"):
            Buffer(None, 1 << 20)


def test_timeout_variable(monkeypatch):
    monkeypatch.setenv("MOE_ENGINE_TIMEOUT_S", "2.5")
    assert timeout_seconds() == 2.5
    monkeypatch.setenv("MOE_ENGINE_TIMEOUT_S", "soon")
    with pytest.raises(BackendError, match="MOE_ENGINE_TIMEOUT_S"):
        timeout_seconds()
