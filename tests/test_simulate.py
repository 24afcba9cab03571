"""The model of a layer on many nodes: its constants against what is published, what it answers, and
the command."""

from __future__ import annotations

from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from moe_engine.layer_config import MODELS, LayerProblem
from moe_engine.node_traffic import (
    COPY_GBS,
    LATENCY_US,
    NIC_GBS,
    Cluster,
    RowType,
    Shares,
    Way,
    exchange,
)
from moe_engine.tools.cli import app
from moe_engine.tools.drawn_routing import Routing
from moe_engine.tools.published import (
    H800_LINK_GBS,
    Constants,
    Figure,
    fit,
    mean_error,
    published_figures,
)
from moe_engine.tools.simulate import Scenario
from moe_engine.tools.simulate_report import error_groups

E, H, I, K = MODELS["deepseek-v3"]


# --- Constants -----------------------------------------------------------------------------------


def page() -> str:
    """The text of the page on the command, in one line."""
    return " ".join((Path(__file__).parents[1] / "docs" / "tools.md").read_text().split())


def test_constants_are_those_of_the_fit() -> None:
    found = fit(one for one in published_figures() if one.line.fits)
    wanted = NIC_GBS, LATENCY_US, COPY_GBS, H800_LINK_GBS
    given = found.nic_gbs, found.latency_us, found.copy_gbs, found.h800_link_gbs
    assert given == pytest.approx(wanted, rel=5e-3)


def test_a_fit_finds_the_constants_of_figures_that_the_model_made() -> None:
    truth = Constants(40.0, 35.0, 30.0, 110.0)
    made = [replace(one, published=one.predicted(truth)) for one in published_figures()]
    assert mean_error(made, fit(made)) < 2e-3


@pytest.mark.slow
def test_the_page_has_the_error_of_systems_that_are_left_out() -> None:
    fitted = [one for one in published_figures() if one.line.fits]

    def system(one: Figure) -> tuple[str, bool]:
        return one.line.system.split(", ")[0], one.line.is_normal

    found = []
    for left_out in {system(one) for one in fitted}:
        constants = fit(one for one in fitted if system(one) != left_out)
        found += [abs(one.error(constants)) for one in fitted if system(one) == left_out]
    assert f"its figures are off by {sum(found) / len(found):.1%} in the mean" in page()


def test_the_page_has_the_mean_errors() -> None:
    for name, some in error_groups(published_figures()).items():
        error = f"{mean_error(some, Constants()):.1%}"
        assert f"| {name.strip('*')} | {len(some)} | {error} |" in page()


def test_the_page_says_what_two_levels_save() -> None:
    saved = []
    for num_ranks in (64, 256):
        answer = scenario(num_ranks).answer()
        direct, two_level = (answer.exchange_of("dispatch", way).us for way in Way)
        saved.append(f"{1 - two_level / direct:.0%}")
    text = f"two levels save {saved[0]} of the time of dispatch on 64 ranks and {saved[1]} on 256"
    assert text in page()
    constants = f"carries {NIC_GBS} GB/s, each transfer takes {LATENCY_US} us more, an SM copies"
    assert (
        f"{constants} {COPY_GBS} GB/s, and an H800's NVLink carries {H800_LINK_GBS} GB/s" in page()
    )


@pytest.mark.parametrize(
    ("tokens", "measured", "error"), [(8192, (1086, 1038), 0.06), (128, (66, 54), 0.4)]
)
def test_within_a_node_the_model_is_near_what_was_measured(
    tokens: int, measured: tuple[int, int], error: float
) -> None:
    """us of dispatch with owned rows and of combine on 4 x H200 in bf16, by 24 SMs for 8192 tokens
    and by 16 for 128 (bench/notes/dispatch_combine.md)."""
    cluster = Cluster(4, 4)
    shares = Shares.uniform(cluster, E, K)
    us = exchange(Way.DIRECT, cluster, shares, tokens * RowType.BF16.num_bytes(H)).us
    assert f"{us:.0f} us for {tokens} tokens, where" in page()
    assert us == pytest.approx(measured[0], rel=error)
    assert us == pytest.approx(measured[1], rel=error)


# --- Layers --------------------------------------------------------------------------------------


def scenario(num_ranks: int, tokens: int = 4096, **how: object) -> Scenario:
    return Scenario(Cluster(num_ranks, 8), LayerProblem(num_ranks, tokens, E, K, H, I), **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("routing", Routing)
def test_a_layer_hides_some_of_its_rows_and_no_more(routing: Routing) -> None:
    for one in scenario(8, routing=routing).sweep():
        answer = one.answer()
        rows_us = sum(each.us for each in answer.both)
        fixed_us = sum(each.fixed_us for each in answer.both)
        least = max(rows_us, fixed_us + answer.gemms_us)
        assert least * (1 - 1e-9) <= answer.layer_us <= answer.serial_us + 100
        assert answer.backward_us > 2 * answer.gemms_us * (1 - 1e-9)
        assert all(size >= 0 for size in answer.memory.values())


def test_nothing_hides_latencies() -> None:
    one = scenario(64)
    slower = replace(one, cluster=replace(one.cluster, latency_us=LATENCY_US + 100))
    before, after = one.answer(), slower.answer()
    assert after.layer_us == pytest.approx(before.layer_us + 200)
    assert after.backward_us == pytest.approx(before.backward_us + 200)
    assert after.serial_us == pytest.approx(before.serial_us + 200)


def test_what_limits_is_named() -> None:
    assert scenario(8).answer().limit == "GEMMs"
    assert scenario(8, tokens=64).answer().limit == "weights"
    assert scenario(256).answer().limit == "far send"
    tiny = replace(scenario(256), layer=LayerProblem(256, 1, E, 1, H, 8))
    assert tiny.answer().limit == "latency"


def test_skew_costs_the_busiest_rank() -> None:
    uniform, zipf = (scenario(64, routing=routing).answer() for routing in Routing)
    assert uniform.shares.imbalance == pytest.approx(1)
    assert isclose(zipf.gemms_us, zipf.shares.imbalance * uniform.gemms_us)
    assert zipf.shares.imbalance > 3
    # The NICs of its node share the rows of a busy rank by two levels alone.
    ways = [zipf.exchange_of("dispatch", way).us for way in Way]
    assert ways[0] > 4 * ways[1]


def test_a_sweep_has_an_expert_for_each_rank() -> None:
    layers = [one.layer for one in scenario(64).sweep()]
    assert [layer.num_ranks for layer in layers] == [8 << step for step in range(9)]
    assert [layer.num_experts for layer in layers] == [256] * 6 + [512, 1024, 2048]
    few = replace(scenario(16), cluster=Cluster(16, 4), node_limit=1)  # 8 experts for top-8
    assert [one.layer.num_ranks for one in few.sweep()] == [4 << step for step in range(6)]
    assert [one.layer.num_ranks for one in replace(few, cluster=Cluster(4096, 4096)).sweep()] == [
        4096
    ]
    odd = replace(scenario(8), layer=LayerProblem(8, 4096, 24, K, H, I))
    assert [one.layer.num_ranks for one in odd.sweep()] == [8] + [32 << step for step in range(7)]


def test_memory_of_a_rank() -> None:
    memory = scenario(64).answer().memory
    assert memory["regions of two levels"] == 8 * 4096 * (7392 + 14336)
    assert memory["expert weights, bf16"] == 4 * 3 * H * I * 2
    assert memory["expert rows, all tokens to one rank"] == 64 * 4096 * 4 * H * 2
    assert memory["expert rows, busiest rank"] == pytest.approx(4096 * K * H * 2)
    assert scenario(8).answer().memory["regions of two levels"] == 0


# --- The command ---------------------------------------------------------------------------------


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "nodes.png"
    done = call("--ranks=16", "--tokens=64", f"--plot={picture}")
    assert done.exit_code == 0, done.output
    for text in (
        "All of this is a model",
        "dispatch, two-level*",
        "two-level, incast",
        " 2048 ",
        "16:43 43",
        "fitted, all",
        picture.name,
    ):
        assert text in done.output
    assert "…" not in done.output
    [row] = (line for line in done.output.splitlines() if line.startswith("dispatch, two-level*"))
    us, *sizes, gbs = (float(number) for number in row.split()[2:8])
    assert sizes[:2] < sizes[2:]
    assert gbs == pytest.approx(1e3 * max(sizes[:2]) / us, rel=0.02)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_with_skew_and_few_nodes() -> None:
    done = call("--ranks=256", "--routing=zipf", "--node-limit=4", "--rows=bf16", "--nic-gbs=45")
    assert done.exit_code == 0, done.output
    assert "Chunks are followed for at most 128 ranks." in done.output
    assert "on 4 nodes at most, zipf" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--model=gpt", "the model is 'gpt'; there are mixtral-8x7b"),
        ("--ranks=12", "12 ranks do not fill nodes of 8 ranks each"),
        ("--ranks=24", "256 experts do not divide among 24 ranks"),
        ("--model=mixtral-8x7b", "8 experts do not divide among 64 ranks"),
        (
            "--ranks=256 --node-limit=1 --ranks-per-node=4",
            "top-8 of the 4 experts on 1 of 64 nodes",
        ),
        ("--nic-gbs=0", "nic_gbs is 0.0; it must be larger than 0"),
        ("--link-gbs=-3", "link_gbs is -3.0; it must be larger than 0"),
        ("--latency-us=-1", "latency_us is -1.0; it must be 0 or larger"),
        ("--routing=hot", "'uniform', 'zipf'"),
        ("--rows=fp4", "'fp8', 'bf16'"),
        ("--ranks=0", "--ranks"),
        ("--plot=/no/such/x.png", "--plot: there is no folder /no/such"),
    ],
)
def test_what_the_command_refuses(arguments: str, text: str) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, ["simulate", *arguments.split()], env={"COLUMNS": "300"})
    assert done.exit_code == 2, done.output
    assert text in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output
