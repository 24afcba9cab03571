"""Shared experts of a Megatron MoELayer that run while its tokens travel
(`moe_shared_expert_overlap`), against the same layer that computes them before its router.

The sources are those of test_megatron.py. On a CPU Megatron's own `SharedExpertMLP` gets streams
that do nothing, so what is tested is the order of launches, results and gradients; nothing here
measures an overlap.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron_cases import SOURCES, cuda_on_cpus, make_layer, skip_without
from ops_cases import buffer_for
from test_megatron import cases_of_ranks, halves
from training_cases import end, on_device

from moe_engine.errors import BackendError
from moe_engine.integrations import megatron


def make(group, source, parts, buffer, fused, overlaps, gate, **more):
    """A MoELayer with shared experts, of the same weights on all ranks."""
    layer = make_layer(
        group, source, parts, buffer, fused, moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=gate,
        moe_shared_expert_overlap=overlaps, **more,
    )  # fmt: skip
    numbers = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for one in layer.shared_experts.parameters():
            one.copy_(torch.randn(one.shape, generator=numbers) / 4)
    return layer


def forward(layer, batch):
    x, idx, weights, _ = batch
    layer.router.routing = idx, weights
    y, _ = layer(x[:, None])  # [sequence, batch, hidden]
    return y[:, 0]


def train(layer, parts, way):
    """Two micro-batches: results, gradients of x and topk_weights, of all parameters by name."""
    layer.moe_layer_recompute = way == "recomputed"
    batches, outs = halves(parts), []
    for batch in batches:
        outs.append(forward(layer, batch))
        if way != "in flight":
            outs[-1].backward(batch[3])
    if way == "in flight":
        for y, batch in zip(outs, batches, strict=True):
            y.backward(batch[3])
    dx, dw = (torch.cat([batch[at].grad for batch in batches]) for at in (0, 2))
    found = {"y": torch.cat(outs).detach(), "x": dx, "topk_weights": dw}
    found |= {name: one.grad for name, one in layer.named_parameters()}
    layer.zero_grad()
    return {name: one.cpu() for name, one in found.items()}


WAYS = "in flight", "recomputed"


def run_overlap(group, source, fused, gate, config, *parts):
    """By each of WAYS: with the overlap, and without."""
    parts = on_device(parts)
    buffer = buffer_for(group, parts)
    how = source, parts, buffer, fused
    with cuda_on_cpus():
        layers = [make(group, *how, overlaps, gate, **config) for overlaps in (True, False)]
        found = [[train(layer, parts, way) for layer in layers] for way in WAYS]
    end(buffer)
    return found


def check_overlap(pool, source, fused, gate, **config):
    skip_without(source)
    _, ranks = cases_of_ranks()
    for ways in pool.run(run_overlap, source, fused, gate, config, *ranks, num_ranks=2):
        for way, (have, want) in zip(WAYS, ways, strict=True):
            assert have.keys() == want.keys()
            for name, one in have.items():
                assert one.any(), f"{name}, {way}"
                if name == "x" and gate:  # three summands, in another order
                    torch.testing.assert_close(one, want[name], rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(one, want[name]), f"{name}, {way}"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("gate", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("fused", [False, True], ids=["Megatron's experts", "one fused layer"])
def test_the_same_bits_as_without_overlap(pool, source, fused, gate):
    check_overlap(pool, source, fused, gate)


def test_gradients_of_weights_at_the_dispatch(pool):
    """`_RegisterDelayedWgradForExperts` waits for the shared experts, too."""
    how = {"overlap_dispatch_backward_with_experts_wgrad": True}
    check_overlap(pool, "stand-ins", True, True, **how)


def run_order(group, source, *parts):
    """What a layer does, and its backward, in order."""
    parts = on_device(parts)
    buffer, log = buffer_for(group, parts), []
    with cuda_on_cpus():
        layer = make(group, source, parts, buffer, True, True, True)
        start, wait = layer.experts.start, lambda _: log.append("shared experts wait")
        layer.shared_experts.stream = SimpleNamespace(wait_stream=wait)

        def logged_start(*args, **how):
            in_flight = start(*args, **how)
            log.append("start")

            def finish():
                y = in_flight.finish()
                log.append("finish")
                y.grad_fn.register_hook(lambda *_: log.append("backward of the layer"))
                return y

            return SimpleNamespace(finish=finish)

        def logged_linear(module, _, out):
            name = "fc1" if module is layer.shared_experts.linear_fc1 else "fc2"
            log.append(name)
            out[0].grad_fn.register_hook(lambda *_: log.append(f"backward of {name}"))

        layer.experts.start = logged_start
        layer.shared_experts.linear_fc1.register_forward_hook(logged_linear)
        layer.shared_experts.linear_fc2.register_forward_hook(logged_linear)
        batch = halves(parts)[0]
        forward(layer, batch).backward(batch[3])
    end(buffer)
    return log


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stream that logs is one of a CPU")
@pytest.mark.parametrize("source", SOURCES)
def test_order_of_launches(pool, source):
    """Shared experts come after the layer has begun, and after its backward has. Their stream waits
    for x alone."""
    skip_without(source)
    _, ranks = cases_of_ranks()
    for log in pool.run(run_order, source, *ranks, num_ranks=2):
        assert log == [
            *("start", "shared experts wait", "fc1", "finish", "fc2"),
            *("backward of the layer", "backward of fc2", "backward of fc1"),
        ]


def run_refused(group, *parts):
    parts = on_device(parts)
    buffer, found = buffer_for(group, parts), []
    layer = make(group, "stand-ins", parts, buffer, True, True, False)
    for name in "overlap_moe_expert_parallel_comm", "moe_latent_size":
        setattr(layer.config, name, 16)
        with pytest.raises(BackendError, match=f"moe_shared_expert_overlap and {name}") as error:
            megatron.use_moe_engine(layer, buffer, alignment=4)
        found.append(str(error.value))
        layer.shared_expert_overlap = False
        megatron.use_moe_engine(layer, buffer, alignment=4)
        layer.shared_expert_overlap = True
        setattr(layer.config, name, None)
    end(buffer)
    return found


def test_refused(pool):
    _, ranks = cases_of_ranks()
    texts = pool.run(run_refused, *ranks, num_ranks=2)[0]
    assert all("Unset moe_shared_expert_overlap" in one for one in texts)
