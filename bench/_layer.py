"""What benches of a layer share: experts, tokens, and a layer by NCCL's all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
import triton
from _common import draw_topk, silu_mul_kernel
from einops import einsum, rearrange, reduce

from moe_engine.grouped_gemm import gemm_config, grouped_gemm, tile_schedule
from moe_engine.layer_config import MODELS

ERROR = 6e-3
"""The largest relative difference of two layers in bf16, which round differently."""


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """||out - want|| / ||want||."""
    return float((out.float() - want.float()).norm() / want.float().norm())


def num_passes(y: torch.Tensor) -> int:
    """In how many passes the layer ran that gave y, which requires grad: 1 where rows had room."""
    assert y.grad_fn is not None
    return sum(map(len, y.grad_fn.batches))


class Experts:
    """The experts of a model on one rank of num_ranks, with random weights."""

    def __init__(self, model: str, num_ranks: int, rank: int = 0):
        self.model = model
        self.num_experts, self.hidden, self.columns, self.num_topk = MODELS[model]
        self.num_local = self.num_experts // num_ranks
        torch.manual_seed(rank)
        self.up = self._draw(2 * self.columns, self.hidden)
        self.down = self._draw(self.hidden, self.columns)

    @classmethod
    def of(cls, group: dist.ProcessGroup, model: str) -> Self:
        """This rank's."""
        return cls(model, dist.get_world_size(group), dist.get_rank(group))

    def _draw(self, rows: int, depth: int) -> torch.Tensor:
        w = torch.empty(self.num_local, rows, depth, dtype=torch.bfloat16, device="cuda")
        return w.normal_(std=depth**-0.5)

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Two grouped GEMMs of torch's on rows in expert order; ends int32 [L]."""
        if len(rows) == 0:
            return rows
        h = torch._grouped_mm(rows, self.up.transpose(1, 2), offs=ends)
        act = h.new_empty(len(rows), self.columns)
        grid = (len(h), triton.cdiv(self.columns, 1024))
        silu_mul_kernel[grid](h, act, self.columns, BLOCK=1024)
        return torch._grouped_mm(act, self.down.transpose(1, 2), offs=ends)

    def scheduled(self, rows: torch.Tensor, ends: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The same by two grouped GEMMs of ours, whose tiles are scheduled now."""
        offsets = torch.cat([ends.new_zeros(1), ends])
        configs = gemm_config(self.up, len(rows), "swiglu"), gemm_config(self.down, len(rows))
        up, down = (tile_schedule(offsets, len(rows), config.block_m) for config in configs)

        def call() -> torch.Tensor:
            act = grouped_gemm(rows, self.up, offsets, activation="swiglu", schedule=up)
            return grouped_gemm(act, self.down, offsets, schedule=down)

        return call


@dataclass(frozen=True)
class Copies:
    """Rows [N, H] that came over NCCL, one per (token, expert), in expert order; ends int32 [L].

    The rest is for their return: send_order [T * K] and recv_order [N], the (token, k) and the
    arrived rows in the order of their experts; how many rows went to and came from each rank.
    """

    rows: torch.Tensor
    ends: torch.Tensor
    send_order: torch.Tensor
    recv_order: torch.Tensor
    sent: list[int]
    received: list[int]


class Tokens:
    """One rank's tokens of a model, and where they go: x bf16 [T, H], idx int64 and weights
    float32 [T, K]. bf16 can hold the weights, as the sum after the all-to-all multiplies in it."""

    def __init__(
        self, group: dist.ProcessGroup, model: str, num_tokens: int, routing: str, seed: int
    ):
        self.group, self.num_ranks = group, dist.get_world_size(group)
        self.num_experts, hidden, _, num_topk = MODELS[model]
        torch.manual_seed(100 + seed)
        self.x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.idx = draw_topk(routing, num_tokens, self.num_experts, num_topk, seed)
        self.weights = torch.rand(num_tokens, num_topk, device="cuda").bfloat16().float()

    def received_counts(self) -> torch.Tensor:
        """int64 [L]: rows that this rank's experts receive."""
        counts = torch.bincount(self.idx.flatten(), minlength=self.num_experts)
        dist.all_reduce(counts, group=self.group)
        return counts.view(self.num_ranks, -1)[dist.get_rank(self.group)]

    def received(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As many random rows as this rank's experts receive, and int32 [L], their ends."""
        counts = self.received_counts()
        rows = self.x.new_empty(int(counts.sum()), self.x.shape[1]).normal_()
        return rows, counts.cumsum(0).int()

    def send_copies(self) -> Copies:
        """One copy per (token, expert): sort, all-to-all, sort. The host waits for the counts."""
        flat = self.idx.flatten()
        send_order = flat.argsort()
        sent = torch.bincount(flat, minlength=self.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        out = reduce(sent, "(r l) -> r", "sum", r=self.num_ranks).tolist()
        into = reduce(received, "(r l) -> r", "sum", r=self.num_ranks).tolist()
        rows = self.x.new_empty(sum(into), self.x.shape[1])
        copies = self.x[send_order // self.idx.shape[1]]
        dist.all_to_all_single(rows, copies, into, out, group=self.group)
        num_local = self.num_experts // self.num_ranks
        local = torch.arange(num_local, device=flat.device).repeat(self.num_ranks)
        experts = local.repeat_interleave(received, output_size=sum(into))
        recv_order = experts.argsort(stable=True)
        ends = reduce(received, "(r l) -> l", "sum", r=self.num_ranks).cumsum(0).int()
        return Copies(rows[recv_order], ends, send_order, recv_order, out, into)

    def return_copies(self, y: torch.Tensor, copies: Copies) -> torch.Tensor:
        """Return rows y [N, H] of the experts to their tokens; the weighted sums [T, H]."""
        rows = torch.empty_like(y)
        rows[copies.recv_order] = y
        by_expert = y.new_empty(len(copies.send_order), y.shape[1])
        dist.all_to_all_single(by_expert, rows, copies.sent, copies.received, group=self.group)
        inverse = torch.empty_like(copies.send_order)
        inverse[copies.send_order] = torch.arange(len(inverse), device=inverse.device)
        y_TKH = rearrange(by_expert[inverse], "(t k) h -> t k h", k=self.idx.shape[1])
        return einsum(y_TKH, self.weights.to(y_TKH.dtype), "t k h, t k -> t h")
