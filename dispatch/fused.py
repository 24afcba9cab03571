"""Host side of a layer's way there: one function per launch, in the order of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..device.signature import RowShape
from ..grouped_gemm import num_compute_programs, ragged
from ..grouped_gemm.config import GemmConfig
from ..hardware import has_pdl, leave_room, pdl_options, share_sms
from ..routing import LanePlaces, Layout, Places
from ..row_vectors import RowVectors
from ..symm.slots import RowLayout, Slots, layer_row
from ..utils import next_power_of_2
from .exchange_kernels import ExchangeSizes, exchange_fused_kernel
from .fused_kernels import (
    copy_rows_kernel,
    dispatch_gemm_kernel,
    push_fused_kernel,
    send_return_metadata_kernel,
)
from .stages import StagedSchedule

PUSH_BATCH, COPY_BATCH = 32, 64
"""Rows whose way a program looks up at a time."""
PUSH_ROWS, PUSH_VECS = 4, 512
"""Rows that a program copies at a time, and vectors of each. Twice as many in flight, or more
warps, take the links no faster and the GEMM beside them half of its speed (bench/NOTES.md)."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a rank sends to the experts: x [T, H] contiguous, topk_idx int64 [T, K] and topk_weights
    float32 [T, K], and their layout."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    layout: Layout

    @property
    def row(self) -> RowLayout:
        return layer_row(self.x.shape[1] * self.x.itemsize, self.topk_idx.shape[1])

    @property
    def num_experts(self) -> int:
        return self.layout.num_tokens_per_expert.numel()


def exchange_fused(lanes: Lanes, stages: int, back_stages: int, slots: Slots) -> Places:
    """Tell every rank this rank's counts and learn theirs. Begins a call; the launch before it is
    the layout's. Other ranks must call with as many stages of both ways."""
    slots.context.step = "exchange_fused"
    num_ranks, num_experts = slots.layout.num_ranks, lanes.num_experts
    num_local = num_experts // num_ranks
    new, row = lanes.layout.earlier_counts.new_empty, lanes.row
    places = Places(
        new(num_local + 1),
        new(num_local + 1),
        new(num_ranks),
        new(num_experts),
        new(num_experts),
        new((num_ranks, stages), dtype=torch.int64),
    )
    sizes = ExchangeSizes(
        RANKS_PAD=next_power_of_2(num_ranks),
        EXPERTS_PAD=next_power_of_2(num_local),
        ALL_EXPERTS_PAD=next_power_of_2(num_experts),
        RANKS=num_ranks,
        STAGES_PAD=next_power_of_2(stages),
    )
    launched = exchange_fused_kernel[(2 * num_ranks,)](
        lanes.layout.num_tokens_per_expert,
        places,
        slots.context.fields,
        num_local,
        RowShape(row.payload_bytes, row.num_topk, lanes.x.itemsize, 0),
        stages,
        back_stages,
        SIZES=constants(sizes),
        PDL=has_pdl(),
        **pdl_options(),
    )
    share_sms(launched)
    return places


def push_fused(
    x: torch.Tensor,
    to_push: torch.Tensor,
    places: Places,
    schedule: StagedSchedule,
    num_programs: int,
    slots: Slots,
) -> None:
    """Copy rows of x [T, H], one for each token and other rank, to their places among the expert
    rows of these; to_push: see `routing.place_rows`. The launch before it is the schedule's."""
    slots.context.step = "push_fused"
    num_ranks = slots.layout.num_ranks
    vectors = RowVectors.of(x.shape[1], x.dtype)
    launched = push_fused_kernel[(2 if INTERPRETED else num_programs,)](
        vectors.view(x),
        to_push,
        places.num_to_push,
        schedule.pushed,
        slots.expert_rows.peer_addresses,
        slots.context.fields,
        len(x),
        schedule.stages,
        vectors.num_vecs,
        x.shape[1] * x.itemsize,
        RANKS=num_ranks,
        RANKS_PAD=next_power_of_2(num_ranks),
        **_of_copies(vectors, PUSH_BATCH),
    )
    share_sms(launched)


def copy_rows(
    x: torch.Tensor,
    rows: torch.Tensor,
    copies: torch.Tensor,
    own_order: torch.Tensor,
    places: Places,
    schedule: StagedSchedule,
    num_programs: int,
    slots: Slots,
) -> int:
    """Copy x [T, H] to this rank's own experts, and expert rows [M, H] that are pushed to further
    experts of their tokens; copies int64 [M] and own_order: see `place_rows_kernel`. Returns the
    number of programs that do so. The launch before it is that of `push_fused`."""
    slots.context.step = "copy_rows"
    vectors = RowVectors.of(rows.shape[1], rows.dtype)
    rank = slots.context.rank
    num_programs = 2 if INTERPRETED else num_programs
    launched = copy_rows_kernel[(num_programs,)](
        vectors.view(x),
        vectors.view(rows),
        own_order,
        copies,
        places.expert_offsets[-1:],
        places.num_remote[rank : rank + 1],
        schedule.copied,
        slots.context.fields,
        schedule.stages,
        int(schedule.own_apart),
        vectors.num_vecs,
        rows.shape[1] * rows.itemsize,
        RANKS_PAD=next_power_of_2(slots.layout.num_ranks),
        **_of_copies(vectors, COPY_BATCH),
    )
    share_sms(launched)
    return num_programs


def _of_copies(vectors: RowVectors, batch: int) -> dict[str, Any]:
    """Launch options of programs that copy rows of these vectors, `batch` looked up at a time."""
    return {
        "BATCH": batch,
        "LANES": batch if INTERPRETED else PUSH_ROWS,
        "ALIGNED": vectors.aligned,
        "BLOCK_VECS": min(next_power_of_2(vectors.num_vecs), PUSH_VECS),
        "PDL": has_pdl(),
        "num_warps": 1,
        **pdl_options(),
    }


def dispatch_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    schedule: StagedSchedule,
    num_copy_programs: int,
    config: GemmConfig,
    slots: Slots,
) -> None:
    """out [M, I] = silu(gate) * up of the expert rows a [M, H] times w [L, 2I, H], while they
    arrive. The launch before it is that of `copy_rows`."""
    slots.context.step = "dispatch_gemm"
    num_columns, depth = w.shape[1] // 2, w.shape[2]
    block_n, by_part = config.block_n // 2, w.view(-1, num_columns, depth)
    launched = dispatch_gemm_kernel[(num_compute_programs(a.device, config),)](
        create_ragged_descriptor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(by_part, [2, block_n, config.block_k]),
        ragged(out[None], config.block_m, block_n // config.subtiles),
        schedule.tiles,
        schedule.first_tile[-1:],
        schedule.copied,
        slots.context.fields,
        num_copy_programs,
        schedule.stages,
        num_columns,
        depth,
        RANKS_PAD=next_power_of_2(slots.layout.num_ranks),
        PDL=has_pdl(),
        **config.launch_options(),
        **leave_room(),
        **pdl_options(),
    )
    share_sms(launched)


@dataclass(frozen=True, slots=True)
class ReturnMetadata:
    """What a rank knows of the sums that come back to it: send_head int32 [T, R], see
    `reference.send_plan`, and to_sum int32 [stages, T]: the tokens of which the last comes in each
    stage, `StagedSchedule.num_to_sum` of them."""

    send_head: torch.Tensor
    to_sum: torch.Tensor


def send_return_metadata(
    lanes: Lanes,
    lane_places: LanePlaces,
    places: Places,
    schedule: StagedSchedule,
    header_bytes: int,
    slots: Slots,
) -> ReturnMetadata:
    """Tell each rank which of its expert rows belong to each token. The launch before it is that of
    `dispatch_gemm`."""
    slots.context.step = "send_return_metadata"
    num_tokens, num_topk = lanes.topk_idx.shape
    num_ranks, row = slots.layout.num_ranks, lanes.row
    metadata = ReturnMetadata(
        lane_places.place.new_empty((num_tokens, num_ranks)),
        lane_places.place.new_empty((schedule.back_stages, num_tokens)),
    )
    launched = send_return_metadata_kernel[(len(lanes.layout.earlier_counts),)](
        lanes.topk_idx,
        lanes.topk_weights,
        lane_places.place,
        lane_places.position,
        lanes.layout.earlier_counts,
        places.num_remote,
        schedule.listed,
        metadata.to_sum,
        schedule.num_to_sum,
        metadata.send_head,
        slots.context.fields,
        num_tokens,
        lanes.num_experts // num_ranks,
        header_bytes,
        row.num_bytes,
        row.scales,
        row.ids,
        row.weights,
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        RANKS=num_ranks,
        RANKS_PAD=next_power_of_2(num_ranks),
        BACK_STAGES=schedule.back_stages,
        BLOCK=lanes.layout.block_tokens,
        PDL=has_pdl(),
        num_warps=4,
        **pdl_options(),
    )
    share_sms(launched)
    return metadata
