"""What the tests of training share: layers with gradients, their Buffers, and the oracle."""

from __future__ import annotations

import cases
import torch
from dispatch_cases import make_inputs, poison
from layer_cases import make_weights

from moe_engine import Buffer, Options, moe_ffn, reference, start_moe_ffn
from moe_engine.emulation import PerRank

NAMES = "x", "topk_weights", "w_gate_up", "w_down"
POLICIES = "none", "pre", "rows", "all"
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}


def new_buffer(group, x, num_experts, num_topk, max_tokens, backend="auto", **options):
    """A Buffer; by default every layer of it could run by low-latency calls."""
    sizes = max_tokens, x.shape[1], num_experts, num_topk, x.dtype
    return Buffer.for_tokens(group, *sizes, backend, Options(**options))


def poison_all(buffer):
    """NaN everywhere a row can lie, on this rank, once all ranks are here."""
    torch.distributed.barrier(buffer.group)
    poison(buffer)
    slots = getattr(buffer._engine, "slots", None)
    if slots is not None and slots._expert_rows is not None:
        slots.expert_rows.local.fill_(0xFF)
        if slots.expert_rows.local.is_cuda:
            torch.cuda.synchronize()
    torch.distributed.barrier(buffer.group)


def end(buffer):
    """Free the memory of a Buffer, once all ranks are here."""
    buffer.check()
    torch.distributed.barrier(buffer.group)
    buffer.destroy()


def make_case(
    num_ranks, num_tokens, hidden=32, intermediate=24, num_local=3, num_topk=3, kind="uniform",
    dtype="fp32", seed=0,
):  # fmt: skip
    """Per-rank lists: the arguments of a layer, and the gradient of its result."""
    sizes = num_ranks * num_local, num_topk, kind, dtype
    inputs = make_inputs(num_ranks, num_tokens, hidden, *sizes, seed)
    weights = make_weights(num_ranks, num_local, hidden, intermediate, dtype, seed)
    dy, _, _ = make_inputs(num_ranks, num_tokens, hidden, *sizes, seed + 77)
    return [*inputs, *weights, dy]


def on_device(parts):
    return [part.to(cases.device()) for part in parts]


def gradients(layer, x, idx, weights, up, down, dy):
    """The result of a layer, a function of its tensors, and its gradients, in the order of
    NAMES."""
    leaves = [one.detach().clone().requires_grad_() for one in (x, weights, up, down)]
    out = layer(leaves[0], idx, *leaves[1:])
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


def run_training(group, backend, max_tokens, policies, *parts):
    """For each policy the result and the gradients of a rank; by the last of them, and by
    `start_moe_ffn`, again and on memory full of NaN, with the same bits."""
    parts = on_device(parts)
    x, idx, _, up, _, _ = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], max_tokens, backend)
    found = {}
    with cases.filled_memory():
        for save in policies:
            found[save] = gradients(lambda *a, save=save: moe_ffn(*a, buffer, save=save), *parts)
        poison_all(buffer)
        again = gradients(lambda *a: start_moe_ffn(*a, buffer, save=save).finish(), *parts)
    for name, one, first in zip(("y", *NAMES), again, found[save], strict=True):
        assert torch.equal(one, first), f"{name} of {save} differs between calls"
    end(buffer)
    return {save: [one.cpu() for one in parts] for save, parts in found.items()}


def check_gradients(found, parts, dtype="fp32"):
    """What ranks have found, as lists of the result and the gradients, against the oracle."""
    for have, want in zip(found, reference.moe_ffn_gradients(*parts), strict=True):
        for name, one, wanted in zip(NAMES, have[1:], want, strict=True):
            assert one.shape == wanted.shape
            error = cases.relative_error(one, wanted)
            assert error < TOLERANCE[dtype] or not (one.any() or wanted.any()), f"{name}: {error}"


def check_training(pool, num_tokens, dtype="fp32", backend="auto", policies=POLICIES, **sizes):
    """Gradients of all ranks against the oracle, the same bits by each policy."""
    num_ranks = len(num_tokens)
    parts = make_case(num_ranks, num_tokens, dtype=dtype, **sizes)
    per_rank = [PerRank(part) for part in parts]
    how = backend, max(num_tokens), policies
    found = pool.run(run_training, *how, *per_rank, num_ranks=num_ranks)
    for have in found:
        for save in policies[1:]:
            for name, one, other in zip(("y", *NAMES), have[policies[0]], have[save], strict=True):
                assert torch.equal(one, other), f"{name} of {save}"
    check_gradients([have[policies[0]] for have in found], parts, dtype)
    return parts, [have[policies[0]] for have in found]
