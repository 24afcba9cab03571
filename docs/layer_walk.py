"""Draw four_tokens.svg and layer_stages.svg for architecture.md: python docs/layer_walk.py

`moe_engine.reference` computes the rows of the walk; tests/test_docs.py compares the tables of the
page with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_engine import reference

NAMES = [["A", "B"], ["C", "D"]]
"""The tokens of rank 0 and of rank 1."""
TOPK_IDX = [[[0, 3], [2, 0]], [[3, 2], [0, 1]]]
"""Their experts: 0 and 1 are on rank 0, 2 and 3 on rank 1."""
NUM_EXPERTS, NUM_RANKS = 4, 2
RANK_COLOURS = ["#2f6f9f", "#c46a2b"]
TOKEN_COLOURS = {"A": "#4477aa", "B": "#66ccee", "C": "#ccbb44", "D": "#ee6677"}
STAGE_COLOURS = ["#225588", "#4488bb", "#77aacc", "#aaccdd"]

KERNELS = [
    "layout",
    "layout_sum",
    "exchange_fused",
    "place_rows",
    "staged_schedule",
    "push_fused",
    "copy_rows",
    "dispatch_gemm",
    "send_return_metadata",
    "staged_gemm",
    "return_sums",
    "fused_sum",
]
"""The kernels of a layer, in launch order."""
Row = tuple[int, int, int, str]
"""Rank, row among its expert rows, expert, token."""


def topk_idx() -> list[torch.Tensor]:
    """int64 [T, K] of each rank."""
    return [torch.tensor(ids) for ids in TOPK_IDX]


def expert_rows() -> list[Row]:
    """The expert rows of both ranks, in order."""
    rows = []
    for source, found in enumerate(reference.placed_rows(topk_idx(), NUM_EXPERTS)):
        for number, (ids, dst_rows) in enumerate(zip(TOPK_IDX[source], found.dst_row, strict=True)):
            for expert, row in zip(ids, dst_rows.tolist(), strict=True):
                owner = expert // (NUM_EXPERTS // NUM_RANKS)
                rows.append((owner, row, expert, NAMES[source][number]))
    return sorted(rows)


def sum_order(rank: int, token: int) -> list[tuple[int, int]]:
    """(rank that returns a row, the row's number there) of a token, in the order of the sum."""
    ids = topk_idx()[rank]
    in_rank = reference.layout(ids, NUM_EXPERTS, NUM_RANKS)[2]
    heads = reference.send_plan(in_rank, ids, NUM_EXPERTS)[1][token].tolist()
    return [(head % NUM_RANKS, head // NUM_RANKS) for head in heads if head >= 0]


def row_table() -> str:
    """The table of expert rows in architecture.md."""
    lines = ["| rank | expert row | expert | token | comes by |", "|---|---|---|---|---|"]
    pushed = set()
    for rank, row, expert, token in expert_rows():
        if token in NAMES[rank]:
            way = "`copy_rows`, from this rank's `x`"
        elif (rank, token) in pushed:
            way = "`copy_rows`, from the row that was pushed"
        else:
            way = f"`push_fused` of rank {1 - rank}"
            pushed.add((rank, token))
        lines.append(f"| {rank} | {row} | {expert} | {token} | {way} |")
    return "\n".join(lines)


def sum_table() -> str:
    """The table of sums in architecture.md."""
    rows: dict[tuple[int, str], dict[int, int]] = {}  # of each rank and token, by expert
    for rank, row, expert, token in expert_rows():
        rows.setdefault((rank, token), {})[expert] = row
    lines = ["| token | sum, in this order |", "|---|---|"]
    for rank, names in enumerate(NAMES):
        for number, name in enumerate(names):
            ids, parts = TOPK_IDX[rank][number], []
            for owner, _ in sum_order(rank, number):
                of_rank = rows[owner, name]
                terms = [f"w{k} * row {of_rank[e]}" for k, e in enumerate(ids) if e in of_rank]
                where = "here" if owner == rank else f"returned by rank {owner}"
                parts.append(f"({' + '.join(terms)}, {where})")
            lines.append(f"| {name}, rank {rank} | {' + '.join(parts)} |")
    return "\n".join(lines)


# --- Drawing -------------------------------------------------------------------------------------


def draw_tokens(plt: Any, path: Path) -> None:
    """Where the rows of four tokens go, and what returns."""
    figure, axes = plt.subplots(figsize=(11, 4.6))
    x_token, x_rows, x_out = 0.0, 4.0, 8.6

    def at_row(rank: int, row: int) -> float:
        return 4.4 - 3.0 * rank - 0.56 * row

    def at_token(rank: int, number: int) -> float:
        return 4.1 - 3.0 * rank - 0.9 * number

    def box(x: float, y: float, text: str, token: str) -> None:
        style = {"boxstyle": "round,pad=0.28", "fc": TOKEN_COLOURS[token], "ec": "0.3", "lw": 0.8}
        axes.text(x, y, text, ha="center", va="center", fontsize=8.5, bbox=style)

    def arrow(start: Any, end: Any, token: str, **style: Any) -> None:
        style = {"arrowstyle": "->", "color": TOKEN_COLOURS[token], "lw": 1.8} | style
        axes.annotate("", end, start, arrowprops=style)

    pushed: dict[tuple[int, str], int] = {}
    for rank, names in enumerate(NAMES):
        for number, name in enumerate(names):
            ids = TOPK_IDX[rank][number]
            box(x_token, at_token(rank, number), f"{name}: experts {ids[0]}, {ids[1]}", name)
            box(x_out, at_token(rank, number), f"out of {name}", name)
        y = 3.6 - 3.0 * rank
        colour = RANK_COLOURS[rank]
        axes.text(-1.65, y, f"rank {rank}", ha="center", weight="bold", color=colour)
    for rank, row, expert, token in expert_rows():
        box(x_rows, at_row(rank, row), f"row {row} of expert {expert}: {token}", token)
        source = 0 if token in NAMES[0] else 1
        number = NAMES[source].index(token)
        begin = (x_token + 0.85, at_token(source, number))
        is_own = source == rank
        if is_own or (rank, token) not in pushed:
            end = (x_rows - 1.2, at_row(rank, row))
            arrow(begin, end, token, ls="--" if is_own else "-")
        else:
            start = (x_rows - 1.05, at_row(rank, pushed[rank, token]))
            end = (x_rows - 1.05, at_row(rank, row))
            arrow(start, end, token, ls=":", connectionstyle="arc3,rad=1.4")
        pushed.setdefault((rank, token), row)
        sums = [r for r in expert_rows() if r[0] == rank and r[3] == token]
        if (rank, row, expert, token) != sums[0]:
            continue
        middle = sum(at_row(rank, r[1]) for r in sums) / len(sums)
        begin = x_rows + 1.2, middle
        if len(sums) > 1:
            begin = x_rows + 1.75, middle
            for _, other, _, _ in sums:
                arrow((x_rows + 1.15, at_row(rank, other)), begin, token, arrowstyle="-")
            axes.text(*begin, "+", ha="center", va="center", fontsize=9, weight="bold")
        arrow(begin, (x_out - 0.6, at_token(source, number)), token, ls="--" if is_own else "-")
    for x, text in (
        (x_token, "tokens and\ntheir top-2"),
        (1.8, "solid: push_fused\nelse: copy_rows"),
        (x_rows, "expert rows:\ndispatch_gemm, staged_gemm"),
        (6.6, "solid:\nreturn_sums"),
        (x_out, "sums of ranks:\nfused_sum"),
    ):
        axes.text(x, 4.95, text, ha="center", fontsize=8.5, weight="bold")
    axes.set_xlim(-2.2, 9.6)
    axes.set_ylim(-1.0, 5.4)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def draw_stages(plt: Any, path: Path) -> None:
    """Which kernels of a layer run concurrently, for 4 stages each way; lengths are numbers of
    rows, not times."""
    arrive = [5, 7, 9, 11]  # of 32 rows, see `stage_begin`
    returns = [14, 10, 6, 2]  # see `return_begin`
    push, copy, gemm = 8.0, 0.0, 0.0  # when each of them ends
    begin: dict[str, list[float]] = {"push_fused": [], "copy_rows": [], "dispatch_gemm": []}
    lengths: dict[str, list[float]] = {
        "push_fused": [0.8 * rows for rows in arrive],
        "copy_rows": [0.4 * rows for rows in arrive],
        "dispatch_gemm": [1.0 * rows for rows in arrive],
    }
    for rows in arrive:
        begin["push_fused"].append(push)
        push += 0.8 * rows
        begin["copy_rows"].append(max(push, copy))
        copy = max(push, copy) + 0.4 * rows
        begin["dispatch_gemm"].append(max(copy, gemm))
        gemm = max(copy, gemm) + rows
    for name, sizes in (("staged_gemm", returns), ("return_sums", [3, 3, 3, 3])):
        lengths[name], begin[name] = list(sizes), []
        now = gemm + 1
        for stage in range(4):
            ready = now
            if name == "return_sums":
                ready = max(now, begin["staged_gemm"][stage] + returns[stage])
            begin[name].append(ready)
            now = ready + sizes[stage]
    lengths["fused_sum"] = [2.5] * 4
    begin["fused_sum"], now = [], begin["staged_gemm"][3] + returns[3]
    for stage in range(4):
        now = max(now, begin["return_sums"][stage] + 3)
        begin["fused_sum"].append(now)
        now += 2.5
    figure, axes = plt.subplots(figsize=(11, 4.2))
    for line, name in enumerate(KERNELS):
        y = -line
        if name in begin:
            for stage, (start, size) in enumerate(zip(begin[name], lengths[name], strict=True)):
                axes.barh(y, size, left=start, color=STAGE_COLOURS[stage], ec="white", height=0.72)
                colour = "white" if stage < 2 else "black"
                middle = start + size / 2
                axes.text(middle, y, str(stage), ha="center", va="center", fontsize=7, color=colour)
        else:
            start = copy + 0.3 if name == "send_return_metadata" else 0.2 + 1.5 * line
            axes.barh(y, 1.3 if line < 5 else 4, left=start, color="0.65", ec="white", height=0.72)
    axes.set_yticks([-line for line in range(len(KERNELS))], KERNELS, fontsize=9)
    axes.set_xticks([])
    axes.set_xlabel("time (a scheme, not a measurement); the number is the stage")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "moe_engine"
    folder = Path(__file__).parent
    draw_tokens(plt, folder / "four_tokens.svg")
    draw_stages(plt, folder / "layer_stages.svg")
    print(row_table(), sum_table(), sep="\n\n")


if __name__ == "__main__":
    main()
