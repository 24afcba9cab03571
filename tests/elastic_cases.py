"""What the tests of ElasticBuffer share: calls on ranks, and the comparison with the oracle."""

from __future__ import annotations

from typing import Any

import torch
from deep_ep_cases import deep_ep
from dispatch_cases import make_inputs

from moe_engine import reference
from moe_engine.emulation import PerRank

HIDDEN, EXPERTS, TOPK, MOST_TOKENS = 64, 12, 3, 20


def elastic(group, **more):
    """An ElasticBuffer for the sizes of these tests."""
    shape = dict(num_max_tokens_per_rank=MOST_TOKENS, hidden=HIDDEN, num_topk=TOPK)
    return deep_ep().ElasticBuffer(group, **(shape | more))


def run_client(pool, client, *args, num_ranks=2, kind="holes", num_tokens=(20, 11, 0, 7)):
    """Run `client(group, *args, x, topk_idx, topk_weights)` on ranks: (results, inputs)."""
    inputs = make_inputs(num_ranks, list(num_tokens), HIDDEN, EXPERTS, TOPK, kind, "bf16")
    results = pool.run(client, *args, *map(PerRank, inputs), num_ranks=num_ranks)
    return results, inputs


def to_cpu(value: Any) -> Any:
    """Tensors in tuples, lists and dicts on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, tuple | list):
        return type(value)(to_cpu(one) for one in value)
    return {k: to_cpu(v) for k, v in value.items()} if isinstance(value, dict) else value


def fields(handle):
    """The fields of a handle that tests compare."""
    names = "num_recv_tokens num_expanded_tokens num_recv_tokens_per_expert_list "
    names += "psum_num_recv_tokens_per_scaleup_rank psum_num_recv_tokens_per_expert "
    names += "num_unaligned_recv_tokens_per_expert recv_src_metadata dst_buffer_slot_idx"
    return {name: to_cpu(getattr(handle, name)) for name in names.split()}


def make_y(metadata: torch.Tensor, num_topk: int, hidden: int) -> torch.Tensor:
    """bf16 [N, K, H]: what an expert might give for each k of the tokens whose metadata these are.
    It follows from the token alone, so that every rank can compute it."""
    token = metadata[:, 0, None, None].float()
    k = torch.arange(num_topk, device=metadata.device)[None, :, None].float()
    columns = torch.arange(1, hidden + 1, device=metadata.device).float()
    return torch.sin((token * 7 + k * 3 + 1) * columns * 0.01).bfloat16()


def expected(inputs, alignment=1, max_tokens=MOST_TOKENS):
    """(received, places) of all ranks."""
    received = reference.dispatch(*inputs, EXPERTS)
    num_ranks = len(received)
    sizes = num_ranks, EXPERTS // num_ranks, max_tokens, alignment
    return received, [reference.place(one, *sizes) for one in received]


def expected_sums(inputs, received, places, bias=None, dtype=None, ranks_per_node=None):
    """bf16 [T, H] of each rank: the sum of `make_y` over the experts of each token, as V2 makes it:
    rounded (to `dtype`, None for bf16) on each rank, and then in the order of ranks; on nodes of
    ranks_per_node ranks, of the nodes, each of which rounds its sum likewise."""
    rows = []
    for one, place in zip(received, places, strict=True):
        y = make_y(place.src_metadata, TOPK, HIDDEN)
        y[one.topk_idx < 0] = 0
        rows.append(reference.sum_topk(y.to(dtype or y.dtype), torch.ones(len(y), TOPK)))
    sizes = [len(part) for part in inputs[0]], EXPERTS
    sums = reference.combine(rows, received, inputs[1], *sizes, bias, ranks_per_node)
    return [one.bfloat16() for one in sums]


def check_fields(have, received, place, expand, waits):
    """The fields of a handle are those of the oracle."""
    num_rows = len(received.x)
    metadata = place.src_metadata.clone()
    if not expand:
        metadata[:, 2:] = -1
    assert torch.equal(have["recv_src_metadata"][:num_rows], metadata)
    assert (have["recv_src_metadata"][num_rows:] == -1).all()
    assert torch.equal(have["psum_num_recv_tokens_per_scaleup_rank"], place.psum_per_rank)
    assert torch.equal(have["num_unaligned_recv_tokens_per_expert"], place.num_per_expert)
    ends = place.psum_per_expert
    if not expand:  # with padding: where the next expert's rows begin
        begins = ends - place.num_per_expert
        ends = torch.cat([begins[1:], begins.new_tensor([place.num_expanded])])
    assert torch.equal(have["psum_num_recv_tokens_per_expert"], ends)
    if waits:
        assert have["num_recv_tokens"] == num_rows
        assert have["num_expanded_tokens"] == place.num_expanded
        assert sum(have["num_recv_tokens_per_expert_list"]) == place.num_expanded
    else:
        assert have["num_recv_tokens_per_expert_list"] == []
