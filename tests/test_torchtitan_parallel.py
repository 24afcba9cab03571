"""torchtitan's layers under FSDP2, tensor and sequence parallelism, against one process.

A block of the stand-ins of `torchtitan_cases.py` is made parallel by torch's functions: each rank
of tensor parallelism hands its own slice of the tokens to the router and the experts.
`test_torchtitan_model.py` has torchtitan's own model.
"""

from __future__ import annotations

from types import SimpleNamespace

import cases
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from data_parallel_cases import WholeExperts, end
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan_cases import load, make_stand_in

from moe_engine.errors import DtypeError, ShapeError
from moe_engine.integrations import torchtitan

HIDDEN, INTERMEDIATE, HEADS, EXPERTS, TOPK, TOKENS = 16, 8, 2, 8, 2, 4
TOLERANCE = 1e-5

# --- A block of stand-ins ------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x_TD):
        heads = (one(x_TD).unflatten(-1, (-1, HIDDEN // HEADS)) for one in self.inputs())
        q, k, v = (one.transpose(0, 1) for one in heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(0, 1).flatten(1))

    def inputs(self):
        return self.wq, self.wk, self.wv


class Block(nn.Module):
    def __init__(self, routed_experts):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.router, self.routed_experts = nn.Linear(HIDDEN, EXPERTS), routed_experts

    def forward(self, x_TD):
        x_TD = x_TD + self.attention(self.norm(x_TD))
        scores, ids = self.router(x_TD).softmax(-1).topk(TOPK)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        return x_TD + self.routed_experts(x_TD, scores, ids, counts)


class WholeRoutedExperts(WholeExperts):
    """All experts in plain torch: the oracle."""

    def forward(self, x_TD, scores, ids, _):
        return super().forward(x_TD, ids, scores)


def whole_block():
    torch.manual_seed(0)
    block = Block(None)
    block.routed_experts = WholeRoutedExperts(EXPERTS)
    return block.to(cases.device())


def batches(dp):
    """Tokens and factors of the loss, [T, D] for each data-parallel rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(dp, 2, TOKENS, HIDDEN, generator=generator).to(cases.device())


def meshes(tp, ep):
    """(dense, with dimensions dp and tp; sparse, efsdp and ep), as torchtitan cuts the ranks."""
    size, device = dist.get_world_size(), cases.device().type
    dense = init_device_mesh(device, (size // tp, tp), mesh_dim_names=("dp", "tp"))
    return dense, init_device_mesh(device, (size // ep, ep), mesh_dim_names=("efsdp", "ep"))


def parallel_block(way, whole, dense, sparse):
    """The block on this rank, with the weights of the whole one."""
    ep = sparse["ep"]
    share = EXPERTS // ep.size()
    inner = SimpleNamespace(dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=share)
    routed = make_stand_in(way, inner, EXPERTS, TOPK, torch.float32).to(cases.device())
    mine = slice(ep.get_local_rank() * share, (ep.get_local_rank() + 1) * share)
    experts = routed.inner_experts
    load(experts, whole.routed_experts.gate_up_proj[mine], whole.routed_experts.down_proj[mine])
    for name, weight in list(experts.named_parameters()):
        part = DTensor.from_local(weight.detach(), ep, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(part))
    routed.token_dispatcher.wire_meshes(ep_mesh=ep)
    block = Block(routed).to(cases.device())
    block.load_state_dict(whole.state_dict(), strict=False)
    columns = ColwiseParallel()
    plan = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "router": SequenceParallel(sequence_dim=0, use_local_output=True),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)
        ),
        "attention.wq": columns,
        "attention.wk": columns,
        "attention.wv": columns,
        "attention.wo": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(block, dense["tp"], plan)


def shard(block, dense, sparse):
    """FSDP2: sums of gradients, as in torchtitan, as losses are divided by all tokens."""
    fully_shard(block.routed_experts, mesh=sparse["efsdp"])
    fully_shard(block, mesh=dense["dp"])
    sum_gradients(block)


def sum_gradients(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def run_block(group, way, tp, ep):
    """The loss and all gradients are those of one process with all tokens."""
    dense, sparse = meshes(tp, ep)
    whole = whole_block()
    given = batches(dense["dp"].size())
    want = sum((whole(x) * factor).sum() for x, factor in given)
    want.backward()
    block = parallel_block(way, whole, dense, sparse)
    shard(block, dense, sparse)
    x, factor = given[dense["dp"].get_local_rank()].chunk(tp, 1)[dense["tp"].get_local_rank()]
    loss = (block(x) * factor).sum()
    loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    torch.testing.assert_close(total, want.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    wanted = dict(whole.named_parameters())
    for name, weight in block.named_parameters():
        if "experts" not in name:
            torch.testing.assert_close(weight.grad.full_tensor(), wanted[name].grad)
    experts = block.routed_experts.inner_experts
    have = {name: one.grad.full_tensor() for name, one in experts.named_parameters()}
    gate, up = have["w13"].unbind(2) if "w13" in have else (have["w1_EFD"], have["w3_EFD"])
    want_gate_up = whole.routed_experts.gate_up_proj.grad
    torch.testing.assert_close(torch.cat([gate, up], 1), want_gate_up)
    torch.testing.assert_close(have["w2_EDF"], whole.routed_experts.down_proj.grad)
    finish(block.routed_experts.token_dispatcher)


def finish(dispatcher):
    torchtitan._buffers.clear()
    end(dispatcher.buffer)


@pytest.mark.parametrize(
    ("way", "tp", "ep"),
    [
        ("w13", 1, 2),
        ("w13", 2, 2),
        ("w13", 2, 4),
        ("w1 and w3", 1, 4),
        ("dispatcher", 1, 2),
        ("dispatcher", 2, 4),
    ],
)
def test_blocks_train_as_one_process(pool, way, tp, ep):
    pool.run(run_block, way, tp, ep, num_ranks=4)


# --- Tensor parallelism inside the experts -------------------------------------------------------


def run_columns(group, way):
    """Without expert parallelism a rank has columns of each expert, and a Buffer of its own. Tokens
    and gradients come of collectives that torch has not waited for."""
    whole, rank = whole_block().routed_experts, group.rank()
    x, dy = batches(1)[0]
    scores, ids = torch.randn(TOKENS, EXPERTS, device=x.device).softmax(-1).topk(TOPK)
    dist.broadcast(scores, 0, group)
    dist.broadcast(ids, 0, group)
    leaf = x.clone().requires_grad_()
    want = whole(leaf, scores, ids, None)
    want.backward(dy)

    columns = INTERMEDIATE // group.size()
    mine = slice(rank * columns, (rank + 1) * columns)
    inner = SimpleNamespace(dim=HIDDEN, hidden_dim=columns, num_experts=EXPERTS)
    routed = make_stand_in(way, inner, EXPERTS, TOPK, torch.float32).to(cases.device())
    up = torch.cat([half[:, mine] for half in whole.gate_up_proj.chunk(2, 1)], 1)
    load(routed.inner_experts, up, whole.down_proj[:, :, mine])
    routed.token_dispatcher.wire_meshes(ep_mesh=None)
    assert routed.token_dispatcher.buffer.group_size == 1
    slices = [one.chunk(group.size())[rank].contiguous() for one in (x, dy)]
    x, dy = (all_gather_tensor(one, 0, group) for one in slices)
    assert type(x) is type(dy) is AsyncCollectiveTensor
    x.requires_grad_()
    out = routed(x, scores, ids, None)
    out.backward(dy)
    for have, wanted in ((out.detach(), want.detach()), (x.grad, leaf.grad)):
        dist.all_reduce(total := have.clone(), group=group)
        torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(routed.inner_experts.w2_EDF.grad, whole.down_proj.grad[:, :, mine])
    finish(routed.token_dispatcher)


@pytest.mark.parametrize("way", ["w13", "dispatcher"])
def test_columns_of_experts(pool, way):
    pool.run(run_columns, way, num_ranks=2)


# --- What is refused -----------------------------------------------------------------------------


def refuse(group):
    dense, sparse = meshes(1, 2)
    x = batches(1)[0, 0]
    scores = torch.ones(TOKENS, TOPK, device=x.device)
    ids = torch.zeros_like(scores, dtype=torch.int64)
    block = parallel_block("w13", whole_block(), dense, sparse)
    routed = block.routed_experts
    with pytest.raises(DtypeError, match="x is a DTensor"):
        routed(DTensor.from_local(x, dense["dp"], [Shard(0)]), scores, ids, None)
    experts = routed.inner_experts
    fully_shard(experts, mesh=sparse["efsdp"])  # whose forward the fused layer does not call
    with pytest.raises(ShapeError, match="2 experts on this rank, where 2 ranks share 8"):
        routed(x, scores, ids, None)
    finish(routed.token_dispatcher)


def test_what_is_refused(pool):
    pool.run(refuse, num_ranks=4)
