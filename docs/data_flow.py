"""Draw data_flow.svg, the four steps of a layer on two ranks: python docs/data_flow.py"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

STEPS = ["route", "dispatch", "grouped GEMM", "combine"]
BOXES = {
    "tokens\n[T, H]": 0.0,
    "top-k ids\ncounts, slots": 1.1,
    "slot\none row per\n(token, rank)": 2.6,
    "up + SwiGLU\ndown": 4.0,
    "sum of local\nexperts' rows": 5.2,
    "sum over ranks\n[T, H]": 6.8,
}


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "moe_engine"
    figure, axes = plt.subplots(figsize=(11, 4.2))
    color = ["#2f6f9f", "#c46a2b"]
    for rank in (0, 1):
        y = 1.6 - 1.6 * rank
        axes.text(-0.75, y, f"rank {rank}", ha="center", va="center", weight="bold")
        for text, x in BOXES.items():
            box = {"boxstyle": "round,pad=0.35", "fc": "white", "ec": color[rank], "lw": 1.5}
            axes.text(x, y, text, ha="center", va="center", fontsize=8.5, bbox=box)
        for start, end in ((0.4, 0.62), (3.12, 3.5), (4.48, 4.7)):
            arrow(axes, (start, y), (end, y), "0.4")
        for other in (0, 1):
            to = 1.6 - 1.6 * other
            arrow(axes, (1.65, y), (2.05, to), color[rank])
            arrow(axes, (5.75, y), (6.2, to), color[rank])
    for x, text in ((0.7, STEPS[0]), (1.9, STEPS[1]), (4.0, STEPS[2]), (6.0, STEPS[3])):
        axes.text(x, 2.45, text, ha="center", weight="bold")
    axes.text(1.9, -0.85, "push over NVLink", ha="center", fontsize=8, color="0.4")
    axes.text(6.0, -0.85, "one summed row returns", ha="center", fontsize=8, color="0.4")
    axes.set_xlim(-1.2, 7.6)
    axes.set_ylim(-1.1, 2.7)
    axes.axis("off")
    path = Path(__file__).with_name("data_flow.svg")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def arrow(axes: plt.Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    style = {"arrowstyle": "->", "color": color, "lw": 1.3}
    axes.annotate("", end, start, arrowprops=style)


main()
