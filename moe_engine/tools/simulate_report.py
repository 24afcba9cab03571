"""What the model of `moe-engine simulate` says, as text and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..node_traffic import Way
from .published import VERBS, Constants, Figure, mean_error, published_figures
from .simulate import EVENT_RANKS, EVENT_TOKENS, Answer, Scenario

CAVEAT = (
    "All of this is a model: nothing was measured between nodes. Its constants are fitted to what "
    "other libraries publish; the last tables have their errors."
)


def report(scenario: Scenario, console: Console) -> list[Answer]:
    """Print what the model says of a scenario and of its sweep, and return the answers of the
    sweep. ShapeError for a scenario that cannot be."""
    answer, layer = scenario.answer(), scenario.layer
    limited = f" on {scenario.node_limit} nodes at most" if scenario.node_limit else ""
    console.print(
        f"{layer.max_tokens} tokens on each of {layer.num_ranks} ranks, "
        f"{scenario.cluster.ranks_per_node} on a node; top-{layer.num_topk} of {layer.num_experts} "
        f"experts{limited}, {scenario.routing}; hidden {layer.hidden}, {scenario.row_type} rows to "
        f"experts, bf16 back; {scenario.cluster.nic_gbs:g} GB/s of a NIC, "
        f"{scenario.cluster.link_gbs:g} of an NVLink"
    )
    console.print(CAVEAT, style="bold")
    console.print(_exchanges(answer))
    console.print(_layer(answer))
    console.print(_memory(answer))
    console.print(_events(answer))
    answers = [one.answer() for one in scenario.sweep()]
    console.print(_sweep(answers))
    for table in _published():
        console.print(table)
    return answers


def _table(title: str, *columns: str) -> Table:
    """A table whose columns hold numbers, but for the first and maybe the last."""
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    table = Table(title=f"\n{title}", **look, padding=(0, 1, 0, 0), show_edge=False)
    table.caption_justify = "left"
    for number, column in enumerate(columns):
        is_name = number in (0, len(columns) - 1)
        table.add_column(column, justify="right" if number else "left", no_wrap=is_name)
    return table


def _exchanges(answer: Answer) -> Table:
    """Time of both ways, bytes on the busiest link of each kind, and what limits."""
    links = "far send", "far receive", "near send", "near receive"
    title = "Dispatch and combine: MB on the busiest NIC (far) and NVLink (near)"
    header = [link.replace(" ", "\n") for link in links]
    table = _table(title, "model", "us", *header, "far\nGB/s", "limit")
    for verb in VERBS:
        for way in Way:
            one = answer.exchange_of(verb, way)
            sizes = [one.bytes_on[link] for link in links]
            cells = [f"{size / 1e6:.4g}" for size in sizes]
            gbs = max(sizes[:2]) / one.us / 1e3
            mark = "*" * (way is answer.way)
            table.add_row(f"{verb}, {way}{mark}", f"{one.us:.0f}", *cells, f"{gbs:.1f}", one.limit)
    table.caption = "* the way that the formula takes"
    return table


def _layer(answer: Answer) -> Table:
    """Times of a layer and of a training step."""
    title = f"A layer, whose busiest rank has {answer.shares.imbalance:.2f} times the mean rows"
    table = _table(title, "model", "us", "limit")
    backward, forward = answer.backward_us, answer.layer_us
    table.add_row("GEMMs alone", f"{answer.gemms_us:.0f}", "")
    table.add_row("dispatch, GEMMs, combine in turn", f"{answer.serial_us:.0f}", "")
    table.add_row("layer, overlapped as within a node", f"{forward:.0f}", answer.limit)
    table.add_row("its training step, forward and backward", f"{forward + backward:.0f}", "")
    return table


def _memory(answer: Answer) -> Table:
    """Memory of a rank."""
    table = _table("Memory of a rank", "model", "GB")
    for name, size in answer.memory.items():
        table.add_row(name, f"{size / 1e9:.2f}")
    return table


def _events(answer: Answer) -> Table | str:
    """What following each chunk gives, against the formula."""
    found = answer.events()
    if not found:
        return f"Chunks are followed for at most {EVENT_RANKS} ranks.\n"
    tokens = min(answer.scenario.layer.max_tokens, EVENT_TOKENS)
    columns = "formula", "chunks", "ratio", "busiest link", "waits at a NIC"
    table = _table(f"A dispatch of {tokens} tokens, chunk by chunk, us", "model", *columns)
    for (way, order), (us, outcome) in found.items():
        ratio = f"{outcome.us / us:.2f}" if us else ""
        waited = outcome.waited.get("far receive", 0.0)
        times = f"{us:.0f}", f"{outcome.us:.0f}", ratio, f"{outcome.busiest_us:.0f}"
        table.add_row(f"{way}, {order}", *times, f"{waited:.0f}")
    table.caption = "without the fixed latencies; staggered: no two ranks send to one at a time"
    return table


def _sweep(answers: Iterable[Answer]) -> Table:
    """Times over the number of ranks."""
    times = [f"{verb}\n{way}" for verb in VERBS for way in Way]
    columns = "ranks", "experts", "token's\nnodes", *times, "layer", "limit"
    table = _table("Over the number of ranks, us (model)", *columns)
    table.padding = 0  # so that it fits into 80 columns
    for answer in answers:
        layer = answer.scenario.layer
        nodes = f"{sum(answer.shares.nodes):.2f}"
        cells = [
            f"{answer.exchange_of(verb, way).us:.0f}" + "*" * (way is answer.way)
            for verb in VERBS
            for way in Way
        ]
        times = [*cells, f"{answer.layer_us:.0f}"]
        table.add_row(str(layer.num_ranks), str(layer.num_experts), nodes, *times, answer.limit)
    table.caption = "* the way that the formula takes"
    return table


# --- The error of the constants ------------------------------------------------------------------


def _published() -> Iterator[Table]:
    """Every published figure with what the model says in its place, and the mean errors."""
    figures, constants = published_figures(), Constants()
    for is_normal, unit in ((True, "GB/s"), (False, "us of 128 tokens")):
        table = _table(f"Published in {unit}", "system", "verb", "ranks: published, model, error")
        table.columns[-1].justify = "left"
        rows: dict[tuple[int, str], list[Figure]] = {}
        for one in figures:
            if one.line.is_normal is is_normal:
                rows.setdefault((id(one.line), one.verb), []).append(one)
        for (_, verb), found in rows.items():
            name = found[0].line.system + "*" * (not found[0].line.fits)
            cells = [_cell(one, constants) for one in found]
            per_line = 3 if is_normal else 2
            lines = ["  ".join(cells[at : at + per_line]) for at in range(0, len(cells), per_line)]
            table.add_row(name, verb, "\n".join(lines))
        yield table
    table = _table("Mean error of the model", "figures", "number", "error")
    for name, some in error_groups(figures).items():
        table.add_row(name, str(len(some)), f"{mean_error(some, constants):.1%}")
    table.caption = "* by a CPU proxy, or other GPUs"
    yield table


def _cell(one: Figure, constants: Constants) -> str:
    """A published figure, the model's, and its error."""
    predicted, error = one.predicted(constants), one.error(constants)
    return f"{one.num_ranks}:{one.published:g} {predicted:.0f} {error:+.0%}"


def error_groups(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """Figures whose mean errors are told apart: those that constants are fitted to, and others."""
    fitted = [one for one in figures if one.line.fits]
    return {
        "fitted, GB/s": [one for one in fitted if one.line.is_normal],
        "fitted, us": [one for one in fitted if not one.line.is_normal],
        "fitted, all": fitted,
        "predicted alone*": [one for one in figures if not one.line.fits],
    }


# --- The picture ---------------------------------------------------------------------------------


def draw(answers: Sequence[Answer], path: Path) -> None:
    """Save a picture of times, and of bytes on the busiest NIC, over the number of ranks, both
    ways."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    ranks = [answer.scenario.layer.num_ranks for answer in answers]
    for verb, colour in (("dispatch", "#4477aa"), ("combine", "#ee6677")):
        for way, style in ((Way.DIRECT, "--"), (Way.TWO_LEVEL, "-")):
            found = [answer.exchange_of(verb, way) for answer in answers]
            look: dict[str, Any] = {"linestyle": style, "color": colour, "marker": "."}
            look["label"] = f"{verb}, {way}"
            left.plot(ranks, [one.us for one in found], **look)
            far = [max(one.bytes_on["far send"], one.bytes_on["far receive"]) for one in found]
            right.plot(ranks, [size / 1e6 for size in far], **look)
    left.plot(ranks, [answer.layer_us for answer in answers], color="black", label="layer")
    scenario = answers[0].scenario
    for axes, name in ((left, "us (model)"), (right, "MB on the busiest NIC (model)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(one) for one in ranks])
        axes.set(xlabel="ranks", ylabel=name, ylim=(0, None))
        axes.legend()
    figure.suptitle(
        f"a model, not measured: {scenario.layer.max_tokens} tokens of a rank, hidden "
        f"{scenario.layer.hidden}, {scenario.routing}, {scenario.cluster.nic_gbs:g} GB/s of a NIC"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
