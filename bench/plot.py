"""The pictures in docs, from the result lines: python bench/plot.py"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import matplotlib.pyplot as plt
from _common import RESULTS

from moe_engine.hardware import H200

DOCS = RESULTS.parent.parent / "docs"
SHAPE = {"model": "deepseek-v3", "tokens": 8192, "routing": "uniform", "dtype": "bf16"}
UNPREPARED = "b0bdac7"
"""The commit before calls were prepared."""
Line = dict[str, Any]
plt.rcParams["svg.hashsalt"] = "moe_engine"  # the same lines give the same file


def newest(bench: str) -> list[Line]:
    """The result lines of the most H200s, of the newest commit measured on as many."""
    text = (RESULTS / f"{bench}.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["device"] == H200.name]
    ranks = max(line["ranks"] or 1 for line in lines)
    lines = [line for line in lines if (line["ranks"] or 1) == ranks]
    return [line for line in lines if line["commit"] == lines[-1]["commit"]]


def draw_dispatch_combine() -> None:
    """GB/s over the number of programs that communicate."""
    lines = [line for line in newest("dispatch_combine") if SHAPE.items() <= line.items()]
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
        title=f"DeepSeek-V3 shape, 8192 tokens per rank, {lines[0]['ranks']} x H200",
        xticks=[4, 8, 16, 24, 32],
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(DOCS / "dispatch_combine.svg", metadata={"Date": None})


def draw_grouped_gemm() -> None:
    """TFLOP/s of prefill shapes, and GB/s of weights at decode sizes."""
    lines = newest("grouped_gemm")
    figure, (prefill, decode) = plt.subplots(
        1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(3, 2)
    )
    bars: dict[str, dict[str, float]] = defaultdict(dict)
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in lines:
        if (line["verb"], line["routing"], line["dtype"]) != ("forward", "uniform", "bf16"):
            continue
        if line["ratio_to"] == "floor":
            curves[line["model"]].append((line["tokens"] / 64, H200.hbm_gbs / line["ratio"]))
        elif line["tokens"] >= 16384:
            bars[line["impl"]][line["model"]] = line["tflops"]
    for number, (name, values) in enumerate(bars.items()):
        positions = [index + (number - 1) * 0.27 for index in range(len(values))]
        prefill.bar(positions, list(values.values()), width=0.27, label=name)
    labels = [re.sub("[ -]", "\n", name) for name in bars["moe_engine"]]
    prefill.set_xticks(range(len(labels)), labels, fontsize=6)
    prefill.set(ylabel="TFLOP/s", title="Forward, bf16, one H200")
    prefill.legend(loc="lower right")
    for name, points in curves.items():
        decode.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    decode.axhline(H200.hbm_gbs, linestyle="--", color="gray", label="a large copy")
    decode.set(
        xlabel="rows per expert, 64 experts",
        ylabel="GB/s of weights",
        title="Decode sizes",
        ylim=(0, None),
        xticks=[1, 8, 16, 32],
    )
    decode.grid(alpha=0.3)
    decode.legend(loc="lower right", fontsize=7)
    figure.savefig(DOCS / "grouped_gemm.svg", metadata={"Date": None})


def draw_low_latency() -> None:
    """us of each verb over tokens, of the most ranks measured: medians, up to the 99th percentiles,
    and floors."""
    curves: dict[str, dict[str, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    lines = newest("low_latency")
    ranks = lines[0]["ranks"]
    for line in lines:
        if (line["impl"], line["routing"]) == ("moe_engine", "uniform"):
            dtype = f", {line['dtype']}" if line["verb"] == "dispatch" else ""
            curves[line["model"]][line["verb"] + dtype][line["tokens"]] = line
    figure, panels = plt.subplots(
        1, len(curves), figsize=(11, 3.8), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (model, verbs) in zip(panels[0], curves.items(), strict=True):
        for name in "dispatch, fp8", "combine", "round_trip", "layer":
            lines = [verbs[name][number] for number in sorted(verbs[name])]
            tokens, us, p99, floor = (
                [line[field] for line in lines] for field in ("tokens", "us", "p99", "floor_us")
            )
            (curve,) = axes.plot(tokens, us, marker="o", markersize=4, label=name.replace("_", " "))
            axes.fill_between(tokens, us, p99, color=curve.get_color(), alpha=0.2, linewidth=0)
            axes.plot(tokens, floor, linestyle="--", linewidth=1, color=curve.get_color())
        axes.set(xscale="log", yscale="log", xlabel="tokens per rank", title=model)
        measured = sorted(set().union(*verbs.values()))
        axes.set_xticks(measured, map(str, measured))
        axes.minorticks_off()
        axes.set_yticks(ticks := [5, 10, 20, 50, 100, 200, 500, 1000, 2000], map(str, ticks))
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"us, {ranks} x H200 (dashed: floor; band: to p99)")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(DOCS / "low_latency.svg", metadata={"Date": None})


def draw_host() -> None:
    """us of the host for each entry point, one rank: before calls were prepared, and of the newest
    commit."""
    text = (RESULTS / "host.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["ranks"] == 1]
    measured: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for line in lines:  # of two runs of one commit, the faster one
        times = measured[line["impl"], line["commit"]]
        us, verb = line["host_us"], line["verb"]
        times[verb] = min(us, times.get(verb, us))
    newest = lines[-1]["commit"]
    bars = {
        "Triton's launches": measured["moe_engine", UNPREPARED],
        "prepared calls": measured["moe_engine", newest],
        "torch": measured["torch", newest],
        "transformers": measured["transformers, grouped_mm", newest],
        "DeepEP": measured["deep_ep", newest],
    }
    bars = {name: times for name, times in bars.items() if times}
    verbs, height = list(bars["prepared calls"]), 0.84 / len(bars)
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for number, (name, times) in enumerate(bars.items()):
        shift = height * (number - (len(bars) - 1) / 2)
        places = [at + shift for at, verb in enumerate(verbs) if verb in times]
        drawn = axes.barh(
            places, [times[verb] for verb in verbs if verb in times], height, label=name
        )
        axes.bar_label(drawn, fmt="%.0f", fontsize=7, padding=2)
    axes.set(xscale="log", xlim=(10, 2500), xlabel="us of the host for a call, one GPU")
    axes.set_yticks(range(len(verbs)), [verb.replace("_", " ") for verb in verbs])
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=len(bars))
    figure.savefig(DOCS / "host.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw_dispatch_combine()
    draw_grouped_gemm()
    draw_low_latency()
    draw_host()
