"""`Experts` under Megatron-FSDP, where the package megatron-fsdp is installed: SGD steps of two
expert-parallel groups of two ranks, against the oracle. Its streams and device are stand-ins."""

from __future__ import annotations

import cases
import pytest
import torch
import torch.distributed as dist
from megatron_cases import DelayedWgradForExperts, cuda_on_cpus, make_config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training_cases import end, make_case, new_buffer

from moe_engine import reference
from moe_engine.emulation import PerRank
from moe_engine.integrations.megatron_experts import Experts

CASE = dict(num_ranks=2, num_local=2, num_topk=2, intermediate=16, kind="holes")
STEPS, MICRO_BATCHES, LR = 2, 2, 0.003


class Layer(nn.Module):
    """A unit of Megatron-FSDP. It takes parameters for those of experts where `.experts.` is in
    their names."""

    def __init__(self, experts, delayed):
        super().__init__()
        self.experts, self.delayed = experts, delayed

    def need_backward_dw(self):
        return self.delayed

    def backward_dw(self, **_):
        self.experts.backward_dw()

    def forward(self, x, idx, weights):
        if self.delayed:
            x = DelayedWgradForExperts.apply(self, x)
        return self.experts(x, idx, weights)[0]


class Model(nn.Module):
    def __init__(self, layer, hidden):
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(hidden)), layer

    def forward(self, x, idx, weights):
        return self.layer(x * self.scale, idx, weights)


def shard(model, strategy):
    """The model and an optimizer, both sharded, with gradients that are sums over ranks."""
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    names = "ep", "dp", "tp"
    experts = DeviceMesh("cpu", torch.tensor([[[0], [2]], [[1], [3]]]), mesh_dim_names=names)
    model = fully_shard_model(
        model,
        device_mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=names[1:]),
        expt_device_mesh=experts,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Layer],
        zero_dp_strategy=strategy,
        device=torch.device("cpu"),
        calculate_per_token_loss=True,
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=None, main_grads_dtype=torch.float32
        ),
    )
    return model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=LR))


def run_steps(_, strategy, config, *parts):
    """The results of a rank before each step, and after the last one."""
    x, idx, weights, up, down, dy = parts
    group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    buffer, found = new_buffer(group, x, 2 * len(up), idx.shape[1], 16), []
    experts = Experts(len(up), make_config("stand-ins", parts, 4, **config), buffer=buffer)
    with torch.no_grad():
        experts.gate_up_proj.copy_(up)
        experts.down_proj.copy_(down)
    layer = Layer(experts, "overlap_dispatch_backward_with_experts_wgrad" in config)
    with cuda_on_cpus():
        model, optimizer = shard(Model(layer, x.shape[1]), strategy)
        for _ in range(STEPS):
            for _ in range(MICRO_BATCHES):
                y = model(x, idx, weights)
                y.backward(dy)
            found.append(y.detach())
            optimizer.step()
            optimizer.zero_grad()
        found.append(model(x, idx, weights).detach())
    end(buffer)
    return found


def wanted(groups):
    """What all ranks should find, from the oracle."""
    ups, downs = groups[0][3:5]
    scale, found = torch.ones(ups[0].shape[2], dtype=torch.float64), [[] for _ in range(4)]
    for _ in range(STEPS + 1):
        grads, outs, of_scale = [], [], 0
        for x, idx, weights, _, _, dy in groups:
            args = [one * scale for one in x], idx, weights, ups, downs
            outs += reference.moe_ffn(*args)
            grads.append(reference.moe_ffn_gradients(*args, dy))
            of_scale += sum((dx * one).sum(0) for (dx, *_), one in zip(grads[-1], x, strict=True))
        for have, out in zip(found, outs, strict=True):
            have.append(out)
        sums = [
            [one + other for one, other in zip(*both, strict=True)]
            for both in zip(*grads, strict=True)
        ]
        rate = LR * MICRO_BATCHES
        scale = scale - rate * of_scale
        ups = [one - rate * grad[2] for one, grad in zip(ups, sums, strict=True)]
        downs = [one - rate * grad[3] for one, grad in zip(downs, sums, strict=True)]
    return found


FUSED = {"gradient_accumulation_fusion": True}
DELAYED = {"overlap_dispatch_backward_with_experts_wgrad": True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="has run on CPU ranks alone")
@pytest.mark.parametrize(
    "strategy, config",
    [
        ("optim_grads_params", FUSED),
        pytest.param("optim_grads_params", {}, marks=pytest.mark.slow),
        pytest.param("optim_grads", FUSED, marks=pytest.mark.slow),
        pytest.param("optim_grads_params", DELAYED, marks=pytest.mark.slow),
        pytest.param("optim_grads_params", FUSED | DELAYED, marks=pytest.mark.slow),
    ],
    ids=["main_grad", "autograd", "main_grad, whole weights", "delayed", "main_grad, delayed"],
)
def test_steps(pool, strategy, config):
    pytest.importorskip("megatron_fsdp", reason="pip install megatron-fsdp")
    groups = [make_case(num_tokens=[6, 4], **CASE), make_case(num_tokens=[6, 4], seed=3, **CASE)]
    groups[1][3:5] = groups[0][3:5]
    ranks = [PerRank([*one, *other]) for one, other in zip(*groups, strict=True)]
    found = pool.run(run_steps, strategy, config, *ranks, num_ranks=4)
    doubles = [[[*map(double, part)] for part in parts] for parts in groups]
    for have, want in zip(found, wanted(doubles), strict=True):
        for one, other in zip(have, want, strict=True):
            assert cases.relative_error(one, other) < 1e-5


def double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor
