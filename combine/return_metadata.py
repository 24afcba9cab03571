"""How a layer's combine is prepared: each rank is told which of its rows it sums for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device.constants import constants
from ..dispatch import Dispatched
from ..dispatch.fused_kernels import copy_rows_kernel, dispatch_gemm_kernel
from ..grouped_gemm.specialized import KERNELS as SPECIALIZED_KERNELS
from ..symm.slots import Slots, header_bytes
from ..utils import next_power_of_2
from .return_metadata_kernels import (
    MetadataSizes,
    PlacedTopk,
    ReturnRows,
    SentCounts,
    send_return_metadata_kernel,
)


@dataclass(frozen=True, slots=True)
class ReturnMetadata:
    """What a rank knows of the sums that return to it: send_head int32 [T, R], see
    `reference.send_plan`; to_sum int32 [return stages, T]: the tokens of which the last sum returns
    in each stage, `StageCounters.num_to_sum` of them; where these rows lie."""

    send_head: torch.Tensor
    to_sum: torch.Tensor
    rows: ReturnRows


def send_return_metadata(dispatched: Dispatched, slots: Slots) -> ReturnMetadata:
    """Tell each rank which of its expert rows belong to each token of this one."""
    tokens, counters = dispatched.tokens, dispatched.counters
    num_tokens, num_topk = tokens.topk_idx.shape
    num_ranks, num_stages = slots.num_ranks, dispatched.config.num_return_stages
    row, plan = tokens.row, dispatched.plan
    new = plan.dst_row.new_empty
    metadata = ReturnMetadata(
        new((num_tokens, num_ranks)),
        new((num_stages, num_tokens)),
        ReturnRows(
            first=header_bytes(tokens.num_experts, num_ranks),
            num_bytes=row.num_bytes,
            list_offset=row.list_offset,
            dst_rows_offset=row.dst_rows_offset,
            weights_offset=row.weights_offset,
        ),
    )
    topk = PlacedTopk(tokens.topk_idx, tokens.topk_weights, plan.dst_row, plan.remote_idx)
    sizes = MetadataSizes(
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        RANKS=num_ranks,
        RANKS_PAD=next_power_of_2(num_ranks),
        RETURN_STAGES=num_stages,
        BLOCK_TOKENS=tokens.layout.block_tokens,
    )
    slots.context.launch(
        send_return_metadata_kernel,
        (len(tokens.layout.earlier_counts),),
        topk,
        SentCounts(tokens.layout.earlier_counts, dispatched.offsets.num_remote),
        counters.listed,
        metadata.to_sum,
        counters.num_to_sum,
        metadata.send_head,
        slots.context.fields,
        num_tokens,
        tokens.num_experts // num_ranks,
        metadata.rows,
        SIZES=constants(sizes),
        step="send_return_metadata",
        after=(dispatch_gemm_kernel, *SPECIALIZED_KERNELS, copy_rows_kernel),
        shares_sms=True,
        num_warps=4,
    )
    return metadata
