"""The plain-Python oracle of a layer's stages and tiles."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

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
    own_first: int,
) -> tuple[list[Tile], list[int], int, list[int]]:
    """(tiles of a rank's expert rows, the stage in which the last row of each arrives, how many go
    apart, tile that begins each return stage and then their number), given how many rows each
    expert has of this rank's and of others'. See `staged_schedule_kernel`.

    num_own [2, 1], num_remote [2, 3], block_m 2, 2 stages, own_first 2, 2 return stages: tiles
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
            is_early = bool(own) and own_stage < own_first
            arrives = stages + (stage if is_early else max(own_stage, stage))  # in turns
            if is_own and is_early:
                arrives = own_stage
            returns = bisect_right(return_at[1:-1], remote_before + max(begin - own, 0))
            full = is_early and is_own and end - begin == block_m
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
