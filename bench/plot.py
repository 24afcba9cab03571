"""The picture in docs, from the result lines: python bench/plot.py"""

from __future__ import annotations

import json
from collections import defaultdict

import matplotlib.pyplot as plt
from _common import RESULTS

PICTURE = RESULTS.parent.parent / "docs" / "dispatch_combine.svg"
SHAPE = {"model": "deepseek-v3", "tokens": 8192, "ranks": 4, "routing": "uniform", "dtype": "bf16"}


def main() -> None:
    """Draw GB/s over the number of programs that communicate, of the newest commit measured."""
    text = (RESULTS / "dispatch_combine.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if SHAPE.items() <= line.items()]
    lines = [line for line in lines if line["commit"] == lines[-1]["commit"]]
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        if line["impl"] == "moe_engine" and line["remote_gbs"]:
            form = line["ratio_to"].removeprefix("floor, ")
            name = line["verb"] if form == "sum" else f"{line['verb']}, {form}"
            curves[name].append((line["num_comm_sms"], line["remote_gbs"]))
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    for line in lines:
        if line["impl"] == "plain push":
            axes.axhline(line["remote_gbs"], linestyle="--", color="gray", label="plain push")
    axes.set(
        xlabel="SMs that communicate",
        ylabel="GB/s over NVLink",
        title="DeepSeek-V3 shape, 8192 tokens per rank, 4 x H200",
        xticks=[4, 8, 16, 24, 32],
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
