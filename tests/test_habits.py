"""What other libraries do around a Buffer: other defaults of torch, forks, threads."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager

import cases
import low_latency_cases as low_latency
import pytest
import torch

from moe_engine import BackendError, Buffer, Config, Options, moe_ffn
from moe_engine.grouped_gemm import grouped_gemm, grouped_mlp, tile_schedule, wgrad

EXPERTS, TOPK, HIDDEN, TOKENS = 4, 2, 128, 6


@contextmanager
def defaults(device, dtype):
    """torch's defaults for new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def inputs(rank, num_ranks):
    """(x, topk_idx, topk_weights, w_gate_up, w_down) of a rank, and offsets and rows of a GEMM."""
    x, w = cases.tokens(TOKENS, HIDDEN, TOPK, torch.bfloat16, rank)
    idx = cases.route("uniform", TOKENS, EXPERTS, TOPK, rank)
    generator = torch.Generator().manual_seed(rank)
    num_local = EXPERTS // num_ranks
    up = torch.randn(num_local, 32, HIDDEN, generator=generator).bfloat16()
    down = torch.randn(num_local, HIDDEN, 16, generator=generator).bfloat16()
    offsets = torch.linspace(0, TOKENS, num_local + 1).int()
    index = torch.tensor([5, 0, 2, 2, 1, 3])
    return [tensor.to(cases.device()) for tensor in (x, idx, w, up, down, offsets, index)]


def round_trip(buffer, x, idx, w):
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    layout = per_rank, None, in_rank, per_expert
    recv_x, ids, weights, counts, handle, _ = buffer.dispatch(x, None, *layout, idx, w)
    out, back, _ = buffer.combine(recv_x, handle, weights, bias=x)
    cached, *_ = buffer.dispatch(x, handle)
    worst, *_ = buffer.dispatch(x, None, *layout, idx, w, num_worst_tokens=4 * TOKENS)
    buffer.dispatch(x, None, *layout, idx, w, in_place=True)
    buffer.release()
    return recv_x, ids, weights, counts, out, back, cached, worst[: len(ids)]


def without_rows_in_place(buffer, x, idx, w):
    """A round trip of calls that stand for themselves."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    recv_x, ids, weights, counts, handle, _ = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, idx, w
    )
    out, back, _ = buffer.combine(recv_x, handle, weights, bias=x)
    cached, *_ = buffer.dispatch(x, handle)
    return recv_x, ids, weights, counts, out, back, cached, None


def verbs(group, backend, x, idx, w, up, down):
    """What every verb gives."""
    found = []
    for tokens in (0, 512):
        options = Options(decode_tokens=tokens)
        sizes = TOKENS, HIDDEN, EXPERTS, TOPK
        buffer = Buffer.for_tokens(group, *sizes, backend=backend, options=options)
        found += [moe_ffn(x, idx, w, up, down, buffer), *round_trip(buffer, x, idx, w)]
        buffer.warmup(HIDDEN, EXPERTS, TOPK)
        buffer.check()
        buffer.destroy()
    if backend == "collective":
        return found
    buffer = low_latency.make_buffer(group, TOKENS, HIDDEN, EXPERTS, enable_shrink=True)
    for form in ("bf16", "rounded"):
        rows, counts, handle = low_latency.dispatch(buffer, x, idx, TOKENS, EXPERTS, form)
        y = rows if form == "bf16" else rows[0].bfloat16()
        found += [counts, low_latency.combine(buffer, y, idx, w, handle)]
    masks = counts.new_empty(group.size())
    buffer.low_latency_query_mask_buffer(masks)
    buffer.destroy()
    return [*found, masks]


def products(x, w, up, down, offsets, index):
    """A grouped MLP with its gradients, and other products."""
    parts = [part.clone().requires_grad_() for part in (x, up, down, w[:, 0].contiguous())]
    x, up, down, weight = parts
    b_down = down.new_ones(len(down), HIDDEN).requires_grad_()
    y = grouped_mlp(x, up, down, offsets, row_index=index, row_weight=weight, b_down=b_down)
    y.float().square().sum().backward()
    with torch.no_grad():
        schedule = tile_schedule(offsets, TOKENS, 64)
        z = grouped_gemm(x, up, offsets, schedule=schedule, activation="swiglu")
        grad = wgrad(y.detach(), x, offsets)
    return [y.detach(), z, grad, b_down.grad, *(part.grad for part in parts)]


def with_defaults(group, device, dtype, backend):
    """Whether other defaults change what anything gives."""
    x, idx, w, up, down, offsets, index = inputs(group.rank(), group.size())
    args = group, backend, x, idx, w, up, down
    calls = [lambda: verbs(*args), lambda: products(x, w, up, down, offsets, index)]
    for call in calls[: 1 if backend == "collective" else 2]:
        want = call()
        with defaults(device or cases.device(), dtype):
            found = call()
        assert len(want) == len(found)
        for number, (one, other) in enumerate(zip(want, found, strict=True)):
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            assert same, f"item {number} of {call} differs"
            assert isinstance(one, list) or one.dtype == other.dtype


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(None, torch.float64, marks=pytest.mark.slow),
        ("meta", torch.bfloat16),
    ],
)
def test_other_defaults_change_nothing(pool, device, dtype):
    for num_ranks in (1, 2):
        pool.run(with_defaults, device, dtype, "auto", num_ranks=num_ranks)
    pool.run(with_defaults, device, dtype, "collective", num_ranks=2)


# --- Keywords, forks, threads --------------------------------------------------------------------


def test_keywords_of_deep_ep_are_taken():
    for use_fabric in (True, False):
        buffer = Buffer(
            None, 1 << 20, allow_mnnvl=True, use_fabric=use_fabric, backend="collective"
        )
        buffer.destroy()


def in_a_fork(group):
    """The calls on a Buffer that raise in a child of the process that made it."""
    buffer = low_latency.make_buffer(group, TOKENS, HIDDEN, EXPERTS)
    x, idx, w, up, down, _, _ = inputs(0, 1)
    _, _, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
    )
    calls = {
        "layer": lambda: moe_ffn(x, idx, w, up, down, buffer),
        "layout": lambda: buffer.get_dispatch_layout(idx, EXPERTS),
        "next buffer": lambda: buffer.get_next_low_latency_combine_buffer(handle),
        "hook": hook,
        "check": buffer.check,
        "destroy": buffer.destroy,
    }
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for name, call in calls.items():
            try:
                call()
            except BackendError as error:
                told += [name] * ("forked" in str(error))
            except BaseException:
                pass
        os.write(write_end, ",".join(told).encode())
        os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    told = os.read(read_end, 1000).decode().split(",")
    os.close(read_end)
    hook()  # the parent goes on
    buffer.check()
    buffer.destroy()
    return told == list(calls)


def test_a_fork_is_told(pool):
    if pool.device == "cuda":
        pytest.skip("a fork cannot use CUDA at all")
    assert pool.run(in_a_fork, num_ranks=1) == [True]


class Watched:
    """An engine that replaces another; its calls give other threads time to run."""

    def __init__(self, real):
        self._real, self.seen = real, []

    def __getattr__(self, name):
        return getattr(self._real, name)

    def combine(self, x, handle, topk_weights, bias, num_sms, described):
        time.sleep(0.05)
        self.seen.append((x.shape[1], num_sms))
        return x.clone(), None


def call_from_threads(*calls):
    """Make these calls at once; raise what any of them raises."""
    errors = []

    def run(call):
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_keep_their_configs():
    """Each call has the programs of its own Config, or those of set_num_sms when it began."""
    buffer = Buffer(None, 0, backend="collective")
    handles = {}
    for columns in (4, 6, 8):
        x, idx, w, *_ = inputs(0, 1)
        x = x[:, :columns].contiguous()
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        recv_x, *_, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, idx, w
        )
        handles[columns] = recv_x, handle
    buffer._engine = watched = Watched(buffer._engine)

    def combine(columns, config=None):
        for _ in range(3):
            buffer.combine(*handles[columns], config=config)

    def change():
        for _ in range(10):
            Buffer.set_num_sms(12)
            time.sleep(0.01)
            Buffer.set_num_sms(14)

    try:
        call_from_threads(
            lambda: combine(4, Config(4)), lambda: combine(6, Config(6)), lambda: combine(8), change
        )
    finally:
        Buffer.set_num_sms(20)
    assert len(watched.seen) == 9
    for columns, num_sms in watched.seen:
        assert num_sms in ((columns,) if columns < 8 else (12, 14, 20))


def two_threads(group):
    """Two threads in one Buffer, each with calls of its own shape; every result is as alone."""
    buffer = Buffer.for_tokens(group, TOKENS, HIDDEN, EXPERTS, TOPK)
    x, idx, w, up, down, _, _ = inputs(0, 1)
    tokens = {"first": (x, idx, w), "second": (x[:4] * 2, idx[:4], w[:4])}
    want = {name: round_trip(buffer, *part) for name, part in tokens.items()}
    layers = {name: moe_ffn(*part, up, down, buffer) for name, part in tokens.items()}

    def work(name):
        for _ in range(2):
            recv_x, *_, out, _, cached, _ = without_rows_in_place(buffer, *tokens[name])
            assert torch.equal(recv_x, want[name][0]), name
            assert torch.equal(out, want[name][4]), name
            assert torch.equal(cached, want[name][6]), name
            assert torch.equal(moe_ffn(*tokens[name], up, down, buffer), layers[name]), name

    call_from_threads(lambda: work("first"), lambda: work("second"))
    buffer.check()
    buffer.destroy()


def test_two_threads_may_share_a_buffer(pool):
    pool.run(two_threads, num_ranks=1)
