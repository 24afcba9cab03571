"""The plain-torch oracle of what the kernels of a layer find on their way: rows, stages, tiles."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Where one rank's tokens become expert rows, and where its own experts' rows begin."""

    expert_offsets: torch.Tensor  # int32 [L + 1]
    remote_offsets: torch.Tensor  # int32 [L + 1], the same for rows from other ranks alone
    dst_row: torch.Tensor  # int32 [T, K], row on the rank of the k's expert, -1 for bad ids
    first_row: torch.Tensor  # int32 [T, K], the token's first row on that rank


def placed_rows(topk_idx: list[torch.Tensor], num_experts: int) -> list[PlacedRows]:
    """Give each k of each token a row among those of its expert: first those of the expert's own
    rank, then those dealt from the others as long as these have any: the first row of the rank
    before it, of the one before that, ...; then the second of each, ... The rows of a source are in
    the order of its tokens, then of k.

    Example, 2 ranks of 2 experts, topk_idx [[0, 3], [2, 0]] and [[3, 2], [0, 1]], rows as
    (source, token): rank 0 has (0, 0) (0, 1) (1, 1) | (1, 1), rank 1 has (1, 0) (0, 1) | (1, 0)
    (0, 0). remote_offsets are [0, 1, 2] and [0, 1, 2], dst_row [[0, 3], [1, 1]] and
    [[2, 0], [2, 3]], first_row [[0, 3], [1, 1]] and [[0, 0], [2, 2]].
    """
    num_ranks = len(topk_idx)
    num_local = num_experts // num_ranks
    dst_row = [torch.full_like(ids, -1, dtype=torch.int32) for ids in topk_idx]
    expert_offsets, remote_offsets = [], []
    for rank in range(num_ranks):
        sources = [(rank - distance) % num_ranks for distance in range(1, num_ranks)]
        row, offsets, num_own = 0, [0], [0]
        for expert in range(rank * num_local, (rank + 1) * num_local):
            own = (topk_idx[rank] == expert).nonzero().tolist()
            theirs = [(topk_idx[source] == expert).nonzero().tolist() for source in sources]
            turns = itertools.zip_longest(*theirs)
            remote = [pair for turn in turns for pair in zip(sources, turn, strict=True) if pair[1]]
            for source, at in [*((rank, at) for at in own), *remote]:
                dst_row[source][*at] = row
                row += 1
            offsets.append(row)
            num_own.append(num_own[-1] + len(own))
        device = topk_idx[rank].device
        expert_offsets.append(torch.tensor(offsets, dtype=torch.int32, device=device))
        own_offsets = torch.tensor(num_own, dtype=torch.int32, device=device)
        remote_offsets.append(expert_offsets[-1] - own_offsets)
    first_row = []
    for ids, rows in zip(topk_idx, dst_row, strict=True):
        owner = torch.where(rows >= 0, ids // num_local, -1)
        same = (owner[:, :, None] == owner[:, None, :]) & (rows >= 0)[:, None, :]
        of_token = torch.where(same, rows[:, None, :], torch.iinfo(torch.int32).max)
        first_row.append(torch.where(rows >= 0, of_token.amin(2), -1))
    of_ranks = zip(expert_offsets, remote_offsets, dst_row, first_row, strict=True)
    return [PlacedRows(*of_rank) for of_rank in of_ranks]


# --- Stages and tiles -----------------------------------------------------------------------------

Tile = tuple[int, int, int]
"""Expert, first row, number of rows."""


def stage_begins(num_rows: int, num_stages: int) -> list[int]:
    """The expert row that begins each stage of dispatch, then num_rows; see `stage_begin`.

    32 rows, 4 stages: [0, 5, 12, 21, 32].
    """
    unit = max(1, -(-num_rows // (2 * num_stages**2)))
    begins = (unit * stage * (stage + num_stages) for stage in range(num_stages + 1))
    return [min(begin, num_rows) for begin in begins]


def return_begins(num_rows: int, num_stages: int) -> list[int]:
    """The expert row that begins each return stage, then num_rows; see `return_begin`.

    16 rows, 4 stages: [0, 7, 12, 15, 16].
    """
    rests = range(num_stages, -1, -1)
    return [num_rows - num_rows * rest**2 // num_stages**2 for rest in rests]


def staged_tiles(
    num_own: list[int],
    num_remote: list[int],
    block_m: int,
    stages: int,
    return_stages: int,
    own_apart: bool = True,
) -> tuple[list[Tile], list[int], int, list[int]]:
    """(tiles of a rank's expert rows, the stage in which the last row of each arrives, how many are
    of own rows alone, tile that begins each return stage and then their number), given how many
    rows each expert has of this rank's and of others'. See `staged_schedule_kernel`.

    num_own [2, 1], num_remote [2, 3], block_m 2, 2 stages of dispatch and of combine: tiles
    (0, 0, 2) | (0, 2, 2) (1, 4, 2) (1, 6, 2), which arrive in stages 0 2 2 3; 1; [0, 3, 3, 4].
    """
    own_begins = stage_begins(sum(num_own), stages)
    remote_begins = stage_begins(sum(num_remote), stages)
    return_at = return_begins(sum(num_remote), return_stages)
    found: dict[bool, list[tuple[Tile, int, int]]] = {True: [], False: []}
    row = own_before = remote_before = 0
    for expert, (own, remote) in enumerate(zip(num_own, num_remote, strict=True)):
        for begin in range(0, own + remote, block_m):
            end = min(begin + block_m, own + remote)
            is_own = end <= own
            own_stage = bisect_left(own_begins[1:], own_before + min(end, own)) if own else 0
            stage = 0 if is_own else bisect_left(remote_begins[1:], remote_before + end - own)
            arrives = own_stage if is_own else stages + stage
            if not own_apart:  # with the stages in turns
                arrives = stages + max(own_stage, stage)
            returns = bisect_right(return_at[1:-1], remote_before + max(begin - own, 0))
            full = own_apart and is_own and end - begin == block_m
            found[full].append(((expert, row + begin, end - begin), arrives, returns))
        row += own + remote
        own_before += own
        remote_before += remote
    own_tiles, others = found[True], found[False]
    tiles, arrivals = [], []
    for tile, arrives, _ in own_tiles + others:
        tiles.append(tile)
        arrivals.append(arrives)
    first = [sum(returns < stage for _, _, returns in others) for stage in range(return_stages)]
    first += [len(others), len(tiles)]
    return tiles, arrivals, len(own_tiles), first
