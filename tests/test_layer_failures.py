"""A rank that is lost in the middle of a layer: the others raise an error that names it."""

from __future__ import annotations

import cases
import pytest
import torch

from moe_engine import (
    Buffer,
    LayerConfig,
    Options,
    PeerTimeout,
    ShapeError,
    combine,
    dispatch,
    moe_ffn,
)
from moe_engine.layer_config import LayerChoices

STEPS = {
    "exchange_fused": "counts",
    "push_fused": "rows",
    "send_return_metadata": "metadata",
    "gemm_combine": "returned rows",
}


def backward(x, idx, *others):
    """A layer, and a function that runs its backward."""
    *weights, buffer = others
    leaves = [part.clone().requires_grad_() for part in (x, *weights)]
    out = moe_ffn(leaves[0], idx, *leaves[1:], buffer)
    return lambda: torch.autograd.grad(out, leaves, torch.ones_like(out))


def first_call(group, with_backward=False):
    """(arguments of a small layer, which all ranks have called, the deadline in seconds)"""
    num_experts = 2 * group.size()
    x, weights = cases.tokens(5, 16, 2, torch.float32, 0)
    idx = cases.route("uniform", 5, num_experts, 2, 0)
    args = x, idx, weights, torch.zeros(2, 16, 16), torch.zeros(2, 16, 8)
    args = [part.to(cases.device()) for part in args]

    def make(timeout_s):
        options = Options(timeout_s=timeout_s, decode_tokens=0)
        return Buffer.for_tokens(group, 5, 16, num_experts, 2, torch.float32, options=options)

    def use(buffer):
        return backward(*args, buffer)() if with_backward else moe_ffn(*args, buffer)

    buffer, timeout_s, _ = cases.used_buffer(group, make, use)
    return (*args, buffer), timeout_s


def lose_rank_1(group, step, is_backward):
    """(peer, phase) of the PeerTimeout of a layer, or of its backward, in which rank 1 stops before
    `step` and tells nobody; None on rank 1."""
    args, _ = first_call(group, is_backward)
    buffer = args[-1]
    call = backward(*args) if is_backward else lambda: moe_ffn(*args)
    if group.rank() == 1:
        buffer._break_off = lambda error: None
    module = combine if hasattr(combine, step) else dispatch
    real, seen = getattr(module, step), None

    def stop(*_):
        raise KeyError(step)

    if group.rank() == 1:
        setattr(module, step, stop)
    try:
        with cases.filled_memory():
            call()
            buffer.check()
    except PeerTimeout as error:
        seen = error.peer, error.phase
    except KeyError:
        pass
    finally:
        setattr(module, step, real)
    torch.distributed.barrier(group)
    return seen


def be_late(group):
    """The phase of the PeerTimeout of a layer in which rank 1 pushes after rank 0 gave up."""
    args, _ = first_call(group)
    buffer = args[-1]
    real, seen = dispatch.push_fused, None

    def push_late(*args):
        torch.distributed.barrier(group)
        real(*args)

    if group.rank() == 1:
        dispatch.push_fused = push_late
    try:
        moe_ffn(*args)
        buffer.check()
    except PeerTimeout as error:
        seen = error.phase
        if group.rank() == 0:
            torch.distributed.barrier(group)
    finally:
        dispatch.push_fused = real
    torch.distributed.barrier(group)
    return seen


def test_rows_that_come_after_a_program_gave_up_are_no_result(pool):
    if pool.device == "cuda":
        pytest.skip("emulated: a launch cannot be held back by the host alone")
    assert pool.run(be_late, num_ranks=2)[0] == "rows"


@pytest.mark.parametrize(
    ("step", "num_ranks"), cases.slow_unless([(step, 2) for step in STEPS], STEPS, [2, 3])
)
def test_a_lost_rank_is_named(pool, step, num_ranks):
    if pool.device == "cuda":
        pytest.skip("a GPU's memory cannot be filled past the allocator")
    seen = (1, STEPS[step])
    found = pool.run(lose_rank_1, step, False, num_ranks=num_ranks)
    assert found == [seen, None, seen][:num_ranks]


@pytest.mark.parametrize("step", cases.slow_unless([("send_return_metadata",)], STEPS))
def test_a_rank_lost_in_a_backward_is_named(pool, step):
    if pool.device == "cuda":
        pytest.skip("a GPU's memory cannot be filled past the allocator")
    seen = (1, f"{STEPS[step]} of the backward")
    assert pool.run(lose_rank_1, step, True, num_ranks=2) == [seen, None]


def call_with_stages(group, stages):
    """The error of a rank that runs a layer in these stages, which its Buffer did not choose."""
    args, _ = first_call(group)
    buffer = args[-1]
    config = LayerConfig(*stages[torch.distributed.get_rank(group)])
    buffer._engine.layers = LayerChoices(config)
    try:
        moe_ffn(*args)
        buffer.check()
    except ShapeError as error:
        return str(error)
    finally:
        torch.distributed.barrier(group)
    return None


@pytest.mark.parametrize("stages", [[(2, 2), (3, 2)], [(2, 4), (2, 2)]])
def test_ranks_with_other_stages_are_told(pool, stages):
    for text in pool.run(call_with_stages, stages, num_ranks=2):
        assert "different shapes" in text
