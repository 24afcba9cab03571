"""Selective checkpointing around a router and its experts: gradients of a plain step, also where a
top-k that is computed again breaks ties otherwise."""

from __future__ import annotations

from functools import partial

import cases
import ops_cases
import pytest
import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn
from training_cases import end, make_case, new_buffer, on_device

from moe_engine import BackendError, WgradSink, moe_ffn
from moe_engine.checkpointing import SAVED_OPS, save_routing_policy
from moe_engine.emulation import PerRank

POLICIES = {
    "routing": save_routing_policy,
    "all": partial(save_routing_policy, [*SAVED_OPS]),
    "none": noop_context_fn,
}


class Block:
    """A router, of whose experts each two have the same score, and experts. Every other call breaks
    ties otherwise. Calling it gives gradients; `made` counts the layers and dispatches."""

    def __init__(self, group, how, parts):
        x, _, _, up, down, self.dy = on_device(parts)
        self.buffer = new_buffer(group, x, num_experts := group.size() * len(up), 3, 16)
        self.how, self.inputs, self.num_calls, self.made = how, (x, up, down), 0, 0
        self.ends_in_layer = False
        self.router = torch.randn(x.shape[1], num_experts // 2, device=x.device) / 8
        torch.distributed.broadcast(self.router, 0, group)
        self.sinks = [torch.zeros_like(one) for one in (up, down)]
        engine = self.buffer._engine
        for name in ("moe_ffn_forward", "dispatch", "dispatch_cached"):
            setattr(engine, name, self._noted(getattr(engine, name)))

    def _noted(self, call):
        def noted(*args, **more):
            self.made += 1
            return call(*args, **more)

        return noted

    def forward(self, x, router, up, down):
        self.num_calls += 1
        scores = (x @ router).softmax(-1).repeat_interleave(2, 1)
        ties = torch.arange(scores.shape[1], device=x.device) % 2 == self.num_calls % 2
        weights, idx = (scores + 1e-6 * ties).topk(3)
        weights /= weights.sum(1, keepdim=True)
        if self.how == "ops":
            y = ops_cases.layer(2 * x, idx, weights, up, down, self.buffer)
        else:
            sink = WgradSink(*self.sinks) if self.how == "sink" else None
            how = dict(save="none" if self.how == "none" else "pre", wgrad=sink)
            y = moe_ffn(2 * x, idx, weights, up, down, self.buffer, **how)
        return y if self.ends_in_layer else y * y.sigmoid()

    def gradients(self, policy):
        """Those of a step that begins with odd experts, and how many layers or dispatches it
        made."""
        self.num_calls, self.made = 0, 0
        for sink in self.sinks:
            sink.zero_()
        leaves = [one.clone().requires_grad_() for one in (*self.inputs, self.router)]
        args = leaves[0], leaves[3], *leaves[1:3]
        if policy is None:
            y = self.forward(*args)
        else:
            y = checkpoint(self.forward, *args, use_reentrant=False, context_fn=policy)
        self.buffer._engine.slots.calls.clear()  # so that a call that is made again does more
        grads = torch.autograd.grad(y, leaves, self.dy, allow_unused=True)
        grads = [one for one in grads if one is not None]
        return [y.detach(), *grads, *(sink.clone() for sink in self.sinks)], self.made


def run_policies(group, how, *parts):
    """For each policy, and for none: whether it gives the bits of a step without checkpoint, and by
    how many layers or dispatches it makes more. The first call of a kind is under a policy."""
    block = Block(group, how, parts)
    policies = dict(POLICIES)
    if how == "ops":  # whose tensors would have other shapes than in the forward
        del policies["none"]
    found = {name: block.gradients(policy) for name, policy in policies.items()}
    plain, num_plain = block.gradients(None)
    end(block.buffer)
    same = {name: all(map(torch.equal, plain, one)) for name, (one, _) in found.items()}
    return same, {name: made - num_plain for name, (_, made) in found.items()}


@pytest.mark.parametrize(
    "how", cases.slow_unless([("pre",), ("sink",)], ["pre", "none", "sink", "ops"])
)
def test_routing_is_saved(pool, how):
    parts = [PerRank(part) for part in make_case(2, [5, 3], num_local=2)]
    for same, more in pool.run(run_policies, how, *parts, num_ranks=2):
        assert same == {name: name != "none" for name in same}
        assert more == {name: int(name != "all" or how == "sink") for name in more}


def route_anew(group, how, *parts):
    """What is said of a recomputation with other routing. In debug mode layers find it, whose
    tensors have the shapes of the forward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_ENGINE_DEBUG", str(int(how == "pre")))
        block = Block(group, how, parts)
    block.ends_in_layer = True
    try:
        block.gradients(noop_context_fn)
    except BackendError as error:
        return str(error)
    finally:
        block.buffer.destroy()


@pytest.mark.parametrize("how", ["pre", "ops"])
def test_routing_that_is_not_saved_names_its_remedy(pool, how):
    parts = [PerRank(part) for part in make_case(2, [5, 3], num_local=2)]
    for text in pool.run(route_anew, how, *parts, num_ranks=2):
        assert "context_fn=save_routing_policy" in text
