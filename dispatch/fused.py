"""Host side of dispatch and up-projection in one launch."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..config import GemmConfig, candidates
from ..grouped_gemm import gemm_problem, num_compute_programs, ragged
from ..hardware import early_launch, launches_overlap
from ..lang import INTERPRETED
from ..routing import ExpertPlan
from ..slots import Slots, next_power_of_2
from ..stages import StagedSchedule
from ..tune import best_config
from ..words import COPY_ROWS, Words
from .fused_kernels import dispatch_gemm_kernel
from .launch import Outgoing


def push_words(config: GemmConfig) -> int:
    """Words of a row that a program pushes at a time."""
    return 64 * config.num_warps


def dispatch_gemm_config(w: torch.Tensor, num_rows: int) -> GemmConfig:
    """Tiles for about `num_rows` rows in all times w [L, 2I, H], as high as `gemm_config` has them,
    and of a width that leaves registers to the push."""
    problem = gemm_problem(w, num_rows, activation="swiglu", gathered=True)
    return next(candidates(problem, best_config(problem).block_m))


def dispatch_gemm(
    rows: Outgoing,
    plan: ExpertPlan,
    schedule: StagedSchedule,
    w: torch.Tensor,
    header_bytes: int,
    num_push_programs: int,
    config: GemmConfig,
    slots: Slots,
) -> torch.Tensor:
    """silu(gate) * up [M, I] of the rows that this rank receives, in the plan's order; its own rows
    are pushed meanwhile. w [L, 2I, H]. Ends a call; the launch before it is the expert plan's.

    `num_push_programs` push, as long as they have to; those that compute then have all of the GPU.
    """
    words, row, layout = Words.of(rows.x.shape[1], rows.x.dtype), rows.row, slots.layout
    num_columns, depth = w.shape[1] // 2, w.shape[2]
    out = rows.x.new_empty(plan.row_offset.numel(), num_columns)
    block_n, by_part = config.block_n // 2, w.view(-1, num_columns, depth)
    num_push = 0 if layout.num_ranks == 1 else num_push_programs
    dispatch_gemm_kernel[(num_push + num_compute_programs(out.device, config),)](
        words.view(rows.x),
        rows.num_tokens_per_rank,
        rows.send_token_idx,
        plan.row_offset,
        TensorDescriptor.from_tensor(by_part, [2, block_n, config.block_k]),
        ragged(out[None], config.block_m, block_n // config.subtiles),
        schedule.tiles[0],
        schedule.first_tile[0],
        schedule.counters[0],
        slots.context.words,
        num_push,
        schedule.stages_there,
        len(rows.x),
        words.num_words,
        header_bytes,
        row.num_bytes,
        num_columns,
        RANKS_PAD=next_power_of_2(layout.num_ranks),
        STAGES_PAD=next_power_of_2(schedule.stages_there + 1),
        CHUNK_ROWS=layout.chunk_rows(row.num_bytes),
        SPAN=layout.span(row.num_bytes),
        LANES=COPY_ROWS,
        BLOCK_WORDS=next_power_of_2(words.num_words) if INTERPRETED else push_words(config),
        OVERLAP=launches_overlap(),
        **config.launch_options(),
        **early_launch(),
    )
    return out
