"""DeepEP V1 for benches, where it is installed: https://github.com/deepseek-ai/DeepEP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_engine import Buffer

NUM_RANKS = 2, 4, 8
"""For which DeepEP has kernels within a node."""


def deep_ep(num_ranks: int) -> Any:
    """DeepEP's package; None where it is not installed, is moe_engine under its name, or cannot run
    on so many ranks."""
    try:
        import deep_ep
    except ImportError:
        return None
    return None if deep_ep.Buffer is Buffer or num_ranks not in NUM_RANKS else deep_ep


def normal_buffer(package: Any, group: dist.ProcessGroup, row_bytes: int) -> Any:
    """DeepEP's Buffer for normal calls with its default Config."""
    config = package.Buffer.get_dispatch_config(group.size())
    num_bytes = config.get_nvl_buffer_size_hint(row_bytes, group.size())
    return package.Buffer(group, num_bytes, explicitly_destroy=True)


def low_latency_buffer(
    kind: Any, group: dist.ProcessGroup, max_tokens: int, hidden: int, num_experts: int
) -> Any:
    """A Buffer for low-latency calls of `kind`, moe_engine's class or DeepEP's."""
    sizes = max_tokens, hidden, group.size(), num_experts
    return kind(
        group,
        num_rdma_bytes=kind.get_low_latency_rdma_size_hint(*sizes),
        low_latency_mode=True,
        num_qps_per_rank=num_experts // group.size(),
        explicitly_destroy=True,
    )


class NormalMode:
    """DeepEP's normal calls for one rank's tokens: x [T, H], idx int64 and weights float32
    [T, K]."""

    def __init__(
        self,
        package: Any,
        group: dist.ProcessGroup,
        x: torch.Tensor,
        idx: torch.Tensor,
        weights: torch.Tensor,
        num_experts: int,
    ):
        self.buffer = normal_buffer(package, group, x[0].nbytes)
        self.x, self.idx, self.weights, self.num_experts = x, idx, weights, num_experts
        self.layout_args = self.layout()
        self.handle = self.dispatch()[4]

    def layout(self) -> tuple[Any, ...]:
        """What `dispatch` takes of the layout."""
        got = self.buffer.get_dispatch_layout(self.idx, self.num_experts)
        per_rank, _, per_expert, in_rank, _ = got
        return None, per_rank, None, in_rank, per_expert

    def dispatch(self) -> tuple[Any, ...]:
        """(rows, idx, weights, rows of each expert, handle, event). The host waits for the
        counts."""
        got: tuple[Any, ...] = self.buffer.dispatch(
            self.x, *self.layout_args, self.idx, self.weights
        )
        return got

    def dispatch_cached(self) -> torch.Tensor:
        """To where the first dispatch sent its rows."""
        rows: torch.Tensor = self.buffer.dispatch(self.x, self.handle)[0]
        return rows

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """The sums of rows that lie where the first dispatch brought them."""
        out: torch.Tensor = self.buffer.combine(rows, self.handle)[0]
        return out

    def layer(self, experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Layout, dispatch, `experts(rows, ends)` of one row for each expert of a token, and
        combine."""
        self.layout_args = self.layout()
        rows, idx, weights, counts, handle, _ = self.dispatch()
        flat = idx.flatten()
        by_expert = flat.where(flat >= 0, len(counts)).argsort(stable=True)[: sum(counts)]
        token = by_expert // idx.shape[1]
        ends = torch.tensor(counts, device=rows.device).cumsum(0).int()
        y = experts(rows[token], ends) * weights.flatten()[by_expert, None]
        sums = torch.zeros(rows.shape, device=rows.device).index_add_(0, token, y)
        out: torch.Tensor = self.buffer.combine(sums.to(rows.dtype), handle)[0]
        return out

    def close(self) -> None:
        self.buffer.destroy()
