"""Host side of a layer's dispatch: one function per launch, in the order of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.ragged_tma import create_ragged_descriptor

from ..device.constants import constants
from ..device.context import Kind, Role
from ..device.lang import INTERPRETED
from ..device.signature import RowShape
from ..grouped_gemm import num_compute_programs
from ..grouped_gemm.config import GemmConfig
from ..grouped_gemm.descriptors import expert_weights, outputs
from ..grouped_gemm.launch import storing_pre
from ..grouped_gemm.operands import Epilogue, Rows, Weights
from ..grouped_gemm.quantization import BLOCK, QuantizedRows, quantize_launch
from ..grouped_gemm.quantization_kernels import quantize_rows_kernel
from ..grouped_gemm.schedule_kernels import ClaimedTiles, Tiles
from ..grouped_gemm.specialized import TileCounters, is_specialized, launch_specialized
from ..hardware import gpu, leave_room
from ..layer_config import LayerConfig
from ..prepared import apart
from ..routing import RoutingLayout
from ..row_vectors import RowVectors
from ..symm.slots import ReturnRowLayout, Slots
from ..utils import next_power_of_2
from .exchange_kernels import ExchangeSizes, exchange_fused_kernel
from .fused_kernels import (
    CopyLists,
    CopySizes,
    RowSize,
    UpOutputs,
    copy_rows_kernel,
    dispatch_gemm_kernel,
    keep_rows_kernel,
    push_fused_kernel,
)
from .place_rows_kernels import (
    ExpertRowParts,
    PlaceSizes,
    RoutedTopk,
    RowBegins,
    RowPlan,
    place_rows_kernel,
)
from .stages import StageCounters, StagedSchedule
from .stages_kernels import staged_schedule_kernel

PUSH_BATCH, COPY_BATCH = 32, 64
"""Rows that a program looks up at a time."""
PUSH_ROWS, PUSH_VECS = 4, 512
"""Rows that a program copies at a time, and vectors of each. Twice as many in flight, or more
warps, take the links no faster, and a concurrent GEMM half of its speed (bench/notes/layer.md)."""
MOST_TAIL = 64
"""The most vectors of a row's last block that are loaded together with the block before."""


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """What a rank sends to the experts of a layer: x [T, H] contiguous, topk_idx int64 [T, K] and
    topk_weights float32 [T, K], and their layout; is_cast: x travels in e4m3."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    layout: RoutingLayout
    is_cast: bool = False

    @property
    def row(self) -> ReturnRowLayout:
        """How their sums return."""
        return ReturnRowLayout(self.x.shape[1] * self.x.itemsize, self.topk_idx.shape[1])

    @property
    def num_scales(self) -> int:
        """The scales of a row that travels."""
        return triton.cdiv(self.x.shape[1], BLOCK) if self.is_cast else 0

    @property
    def num_experts(self) -> int:
        return self.layout.num_tokens_per_expert.numel()


class LayerCall(NamedTuple):
    """What a call of a layer says of itself: its kind, and the number of what is saved for the
    backward (`SAVE_POLICIES`)."""

    kind: int = int(Kind.MOE_FFN)
    saved: int = 0


FORWARD = LayerCall()


class ExpertOffsets(NamedTuple):
    """Where the rows of experts begin, on the device; see `exchange_fused_kernel`.

    expert_offsets and remote_offsets int32 [L + 1]: of each expert of this rank, among all its rows
    and among those from other ranks; num_remote int32 [R]: rows that each rank gets from others;
    expert_begin and remote_begin int32 [E]: the offsets on all ranks; counts int32 [E]: how many
    rows each expert gets from all ranks; num_to_push int64 [R, S]: 0, for `place_rows` to count in;
    overflow int32 [1]: rows for which the fullest rank has no room, None where all have room.
    """

    expert_offsets: torch.Tensor
    remote_offsets: torch.Tensor
    num_remote: torch.Tensor
    expert_begin: torch.Tensor
    remote_begin: torch.Tensor
    counts: torch.Tensor
    num_to_push: torch.Tensor
    overflow: torch.Tensor | None = None


def exchange_fused(
    tokens: LayerTokens,
    most_rows: int,
    config: LayerConfig,
    slots: Slots,
    call: LayerCall = FORWARD,
    expected_rows: int = -1,
) -> ExpertOffsets:
    """Tell every rank this rank's counts and learn theirs. Begins a call; other ranks must call
    with as many stages of dispatch and combine, and begin the same kind of call. Where it follows a
    call of the same tokens, with their layout, it says that this rank has read what came in that
    one. expected_rows: how many must come to this rank; -1: any number. There is room for most_rows
    on each rank; more can come where layers run in passes."""
    num_ranks, num_experts = slots.num_ranks, tokens.num_experts
    num_local = num_experts // num_ranks
    new, row = tokens.layout.earlier_counts.new_empty, tokens.row
    offsets = ExpertOffsets(
        new(num_local + 1),
        new(num_local + 1),
        new(num_ranks),
        new(num_experts),
        new(num_experts),
        apart(new(num_experts)),
        new((num_ranks, config.num_stages), dtype=torch.int64),
        new(1) if slots.num_passes > 1 else None,
    )
    sizes = ExchangeSizes(
        RANKS_PAD=next_power_of_2(num_ranks),
        EXPERTS=num_local,
        EXPERTS_PAD=next_power_of_2(num_local),
        ALL_EXPERTS_PAD=next_power_of_2(num_experts),
        RANKS=num_ranks,
        STAGES_PAD=next_power_of_2(config.num_stages),
    )
    slots.context.launch(
        exchange_fused_kernel,
        (2 * num_ranks,),
        tokens.layout.num_tokens_per_expert,
        offsets,
        slots.context.fields,
        RowShape(row.payload_bytes, row.num_topk, tokens.x.itemsize, tokens.num_scales),
        call,
        slots.context.callers.running,
        expected_rows,
        most_rows,
        config.num_stages,
        config.num_return_stages,
        SIZES=constants(sizes),
        step="exchange_fused",
        shares_sms=True,
    )
    return offsets


def place_rows(
    tokens: LayerTokens,
    offsets: ExpertOffsets,
    parts: ExpertRowParts,
    slots: Slots,
    with_weights: bool = False,
) -> RowPlan:
    """Find the expert rows of this rank's tokens, and tell the other ranks which of their rows are
    copies and, with_weights, the weight of each row, in these parts of `slots.expert_rows`. See
    `place_rows_kernel`."""
    layout, (num_tokens, num_topk) = tokens.layout, tokens.topk_idx.shape
    num_ranks, num_stages = offsets.num_to_push.shape
    new = tokens.topk_idx.new_empty
    plan = RowPlan(
        dst_row=new((num_tokens, num_topk), dtype=torch.int32),
        remote_idx=new((num_tokens, num_topk), dtype=torch.int32),
        own_order=new(num_tokens * num_topk),
        to_push=new((num_ranks, num_stages, num_tokens)),
        num_to_push=offsets.num_to_push,
    )
    sizes = PlaceSizes(
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        RANKS=num_ranks,
        BLOCK_TOKENS=layout.block_tokens,
        STEP=32,
    )
    slots.context.launch(
        place_rows_kernel,
        (len(layout.earlier_counts),),
        RoutedTopk(tokens.topk_idx, tokens.topk_weights if with_weights else None),
        layout.earlier_counts,
        RowBegins(offsets.expert_begin, offsets.remote_begin, offsets.num_remote),
        plan,
        slots.expert_rows.peer_addresses,
        slots.context.fields,
        num_tokens,
        tokens.num_experts // num_ranks,
        num_stages,
        parts,
        SIZES=constants(sizes),
        after=(exchange_fused_kernel, quantize_rows_kernel),
        shares_sms=True,
        num_warps=8,
    )
    return plan


def push_fused(
    x: torch.Tensor, plan: RowPlan, counters: StageCounters, config: LayerConfig, slots: Slots
) -> None:
    """Copy rows of x [T, H], one for each token and other rank, into the expert rows of these."""
    vectors = RowVectors.of(x.shape[1], x.dtype)
    slots.context.launch(
        push_fused_kernel,
        (2 if INTERPRETED else config.num_push_programs,),
        vectors.view(x),
        plan.to_push,
        plan.num_to_push,
        counters.pushed,
        slots.expert_rows.peer_addresses,
        slots.context.fields,
        len(x),
        config.num_stages,
        RowSize(vectors.num_vecs, x.shape[1] * x.itemsize),
        **_copy_options(vectors, PUSH_BATCH, slots),
        step="push_fused",
        after=(staged_schedule_kernel,),
    )


def copy_rows(
    x: torch.Tensor,
    rows: torch.Tensor,
    lists: CopyLists,
    offsets: ExpertOffsets,
    counters: StageCounters,
    config: LayerConfig,
    slots: Slots,
) -> None:
    """Copy x [T, H] to this rank's own experts, and expert rows [M, H] that other ranks push to
    further experts of their tokens."""
    vectors = RowVectors.of(rows.shape[1], rows.dtype)
    rank = slots.context.rank
    slots.context.launch(
        copy_rows_kernel,
        (num_copy_programs(config),),
        vectors.view(x),
        vectors.view(rows),
        lists,
        offsets.expert_offsets[-1:],
        offsets.num_remote[rank : rank + 1],
        counters.copied,
        slots.context.fields,
        config.num_stages,
        config.own_first,
        RowSize(vectors.num_vecs, rows.shape[1] * rows.itemsize),
        **_copy_options(vectors, COPY_BATCH, slots),
        step="copy_rows",
        after=(push_fused_kernel,),
    )


def num_copy_programs(config: LayerConfig) -> int:
    """Programs of `copy_rows`, for which `dispatch_gemm` waits at each tile."""
    return 2 if INTERPRETED else config.num_copy_programs


def _copy_options(vectors: RowVectors, batch: int, slots: Slots) -> dict[str, Any]:
    """Launch options of programs that copy rows of these vectors, `batch` looked up at a time."""
    block = min(next_power_of_2(vectors.num_vecs), PUSH_VECS)
    tail = vectors.num_vecs % block if vectors.num_vecs > block else 0
    sizes = CopySizes(
        BATCH=batch,
        BLOCK_ROWS=batch if INTERPRETED else PUSH_ROWS,
        BLOCK_VECS=block,
        TAIL_VECS=next_power_of_2(tail) if 0 < tail <= MOST_TAIL else 0,
        ALIGNED=vectors.aligned,
        RANKS=slots.num_ranks,
        RANKS_PAD=next_power_of_2(slots.num_ranks),
    )
    return {"SIZES": constants(sizes), "num_warps": 1, "shares_sms": True}


def keep_rows(
    rows: torch.Tensor, kept: torch.Tensor, num_rows: torch.Tensor, after: Any, slots: Slots
) -> None:
    """Copy expert rows [M, H], num_rows int32 [1] of them, to `kept`, after the launch of a kernel
    that ends when all have arrived; see `keep_rows_kernel`."""
    vectors = RowVectors.of(rows.shape[1], rows.dtype)
    slots.context.launch(
        keep_rows_kernel,
        (2 if INTERPRETED else 8 * gpu(rows.device).num_sms,),
        vectors.view(rows),
        vectors.view(kept),
        num_rows,
        slots.context.fields,
        RowSize(vectors.num_vecs, rows.shape[1] * rows.itemsize),
        **_copy_options(vectors, COPY_BATCH, slots),
        step="keep_rows",
        after=(after,),
    )


def quantize(
    x: torch.Tensor,
    out: QuantizedRows,
    after: Any,
    slots: Slots,
    num_rows: torch.Tensor | None = None,
) -> None:
    """Cast rows x [M, K], the first num_rows int32 [1] of them, to e4m3, after the launch of
    `after`."""
    grid, arguments, options = quantize_launch(x, out, num_rows)
    slots.context.launch(
        quantize_rows_kernel,
        grid,
        *arguments,
        **options,
        step="quantize",
        after=(after,),
        shares_sms=True,
    )


def dispatch_gemm(
    a: Rows,
    weights: Weights,
    epilogue: Epilogue,
    out: torch.Tensor | QuantizedRows,
    dispatched: Dispatched,
    tiles: GemmConfig,
    slots: Slots,
    has_arrived: bool = False,
) -> None:
    """out [M, I] = the activation of the expert rows a [M, H] times weights [L, 2I, H] or [L, 2, I,
    H], while they arrive; epilogue.pre gets gate and up [M, 2I]. A non-gated activation takes
    weights [L, I, H], and pre is [M, I]. In a backward a has rows of dy, and the weights [L, H, I]
    are transposed. has_arrived: a is complete, whatever arrives meanwhile, so no tile waits.
    Specialised tiles wait for all rows at once, and cast what they store if `out` is such rows."""
    schedule, counters = dispatched.schedule, dispatched.counters
    config, parts, step = dispatched.config, epilogue.parts, "dispatch_gemm"
    programs = num_compute_programs(a.x.device, tiles)
    listed = schedule.tiles, schedule.num_tiles
    if is_specialized(tiles, weights, epilogue):
        counted, trace = TileCounters(counters.claimed[:1]), slots.context.traced(Role.UP)
        of = a, weights, epilogue, out, Tiles(*listed), tiles, counted, trace
        call: dict[str, Any] = dict(step=step, after=(copy_rows_kernel,), shares_sms=True)
        launch_specialized(slots.context.launch, programs, *of, **call)
        return
    assert isinstance(out, torch.Tensor)
    tiles = storing_pre(tiles.unspecialized(), epilogue)
    block = tiles.block_m, tiles.block_n // parts // tiles.subtiles
    slots.context.launch(
        dispatch_gemm_kernel,
        (programs,),
        create_ragged_descriptor(a.x, [tiles.block_m, tiles.block_k]),
        expert_weights(a, weights, tiles, parts),
        UpOutputs(*outputs(epilogue, out[None], *block)),
        ClaimedTiles(*listed, claims_of(counters.claimed[:1], config, weights)),
        counters.copied,
        slots.context.fields,
        0 if has_arrived else num_copy_programs(config),
        config.num_stages,
        TRANSPOSED=weights.transposed,
        RANKS_PAD=next_power_of_2(slots.num_ranks),
        **(leave_room() | tiles.launch_options(epilogue.activation)),
        step="dispatch_dgrad" if weights.transposed else step,
        after=(copy_rows_kernel,),
        shares_sms=True,
    )


def claims_of(claimed: torch.Tensor, config: LayerConfig, weights: Weights) -> torch.Tensor | None:
    """`claimed`, where programs claim the tiles of a product. Tiles of e4m3 that are not
    specialised have no register left for it."""
    return claimed if config.claims_tiles and weights.scale is None else None


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A layer's dispatch, launched: the tokens sent, rows [M, H] of this rank's experts, and what
    combine needs to know of them."""

    tokens: LayerTokens
    rows: torch.Tensor
    offsets: ExpertOffsets
    plan: RowPlan
    schedule: StagedSchedule
    counters: StageCounters
    config: LayerConfig
