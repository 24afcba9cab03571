"""The model of many nodes: its formulas against routings that are drawn and counted, its chunks
against its formulas, its constants against what is published, and the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path

import pytest
import torch
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moe_engine.errors import ShapeError
from moe_engine.layer_config import MODELS, LayerProblem
from moe_engine.node_traffic import (
    COPY_GBS,
    LATENCY_US,
    NIC_GBS,
    Cluster,
    Load,
    RowType,
    Shares,
    Way,
    exchange,
    faster_way,
    load_of,
)
from moe_engine.tools.cli import app
from moe_engine.tools.drawn_routing import (
    Routing,
    draw_routing,
    drawn_shares,
    ranks_reached,
    shares_of,
)
from moe_engine.tools.published import (
    H800_LINK_GBS,
    Constants,
    Figure,
    fit,
    mean_error,
    published_figures,
)
from moe_engine.tools.simulate import Scenario
from moe_engine.tools.simulate_events import NETWORK_US, Order, chunks_of, play
from moe_engine.tools.simulate_report import error_groups

GBS = 45.0
"""Of a NIC, in the tables that the formulas were first written for."""
E, H, I, K = MODELS["deepseek-v3"]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    per_node = draw(st.integers(1, 4))
    return Cluster(per_node * draw(st.integers(1, 4)), per_node)


def reached_by(
    routing: Routing, cluster: Cluster, num_tokens: int, num_experts: int, num_topk: int
) -> list[torch.Tensor]:
    """For each source rank, which ranks each of its tokens reaches."""
    drawn = [
        draw_routing(routing, cluster, num_tokens, num_experts, num_topk, seed=1 + rank)
        for rank in range(cluster.num_ranks)
    ]
    return [ranks_reached(one, num_experts, cluster.num_ranks) for one in drawn]


# --- Formulas against counting -------------------------------------------------------------------


def counted(way: Way, cluster: Cluster, reached: Sequence[torch.Tensor]) -> dict[str, list[int]]:
    """Rows on each rank's link of each kind, counted token by token."""
    per_node = cluster.ranks_per_node
    kinds = "far_send", "far_receive", "near_send", "near_receive"
    found = {kind: [0] * cluster.num_ranks for kind in kinds}

    def send(kind: str, source: int, rank: int) -> None:
        if source != rank:
            found[f"{kind}_send"][source] += 1
            found[f"{kind}_receive"][rank] += 1

    for source, tokens in enumerate(reached):
        node, index = divmod(source, per_node)
        for token in tokens:
            ranks = token.nonzero()[:, 0].tolist()
            for to in {rank // per_node for rank in ranks}:
                inside = [rank for rank in ranks if rank // per_node == to]
                if way is Way.DIRECT:
                    for rank in inside:
                        send("near" if to == node else "far", source, rank)
                    continue
                peer = to * per_node + index
                if to != node:
                    send("far", source, peer)
                for rank in inside:
                    send("near", peer, rank)
    return found


@given(cluster=clusters(), num_local=st.integers(1, 4), way=st.sampled_from(Way), data=st.data())
def test_uniform_loads_are_the_means_of_those_counted(
    cluster: Cluster, num_local: int, way: Way, data: st.DataObject
) -> None:
    num_experts = num_local * cluster.num_ranks
    num_topk = data.draw(st.integers(1, min(8, num_experts)))
    tokens = 6000 // cluster.num_ranks
    reached = reached_by(Routing.UNIFORM, cluster, tokens, num_experts, num_topk)
    load = load_of(way, cluster, Shares.uniform(cluster, num_experts, num_topk))
    for kind, rows in counted(way, cluster, reached).items():
        mean = sum(rows) / len(rows) / tokens
        assert getattr(load, kind) == pytest.approx(mean, rel=0.05, abs=0.02), kind


@given(cluster=clusters(), way=st.sampled_from(Way))
def test_skewed_loads_are_those_of_the_busiest_rank(cluster: Cluster, way: Way) -> None:
    num_experts, tokens = 4 * cluster.num_ranks, 6000 // cluster.num_ranks
    reached = reached_by(Routing.ZIPF, cluster, tokens, num_experts, 3)
    load = load_of(way, cluster, shares_of(Routing.ZIPF, cluster, num_experts, 3))
    for kind, rows in counted(way, cluster, reached).items():
        assert getattr(load, kind) == pytest.approx(max(rows) / tokens, rel=0.1, abs=0.05), kind


def test_a_node_limit_is_the_mean_of_tokens_drawn() -> None:
    """Nodes are drawn evenly here, where a router takes the best ones, so that more of them get an
    expert."""
    cluster, limit = Cluster(64, 8), 3
    drawn = draw_routing(Routing.UNIFORM, cluster, 20_000, E, K, node_limit=limit)
    found = drawn_shares(drawn, cluster, E)
    assert max(ranks_reached(drawn, E, 64).view(-1, 8, 8).any(2).sum(1)) == limit
    assert torch.equal(drawn[:, 0], draw_routing(Routing.UNIFORM, cluster, 20_000, E, K)[:, 0])
    wanted = Shares.uniform(cluster, E, K, limit)
    assert sum(wanted.nodes) < sum(found.nodes) < 1.12 * sum(wanted.nodes)
    assert sum(found.rows) == pytest.approx(sum(wanted.rows)) == K


@pytest.mark.parametrize("routing", Routing)
def test_drawn_experts_are_distinct_and_the_same_again(routing: Routing) -> None:
    first, again = (draw_routing(routing, Cluster(8, 4), 50, 16, 5) for _ in range(2))
    assert torch.equal(first, again)
    assert all(len(set(token)) == 5 for token in first.tolist())
    assert not torch.equal(first, draw_routing(routing, Cluster(8, 4), 50, 16, 5, seed=1))


def test_the_bytes_that_leave_arrive() -> None:
    """Uniform loads are those of every link, so that sent and received agree, far and near."""
    for num_ranks in (8, 16, 64, 256):
        cluster = Cluster(num_ranks, 8)
        shares = Shares.uniform(cluster, E, K)
        for way in Way:
            load = load_of(way, cluster, shares)
            assert load.far_send == pytest.approx(load.far_receive)
            assert load.near_send == pytest.approx(load.near_receive)
            assert load.reversed().reversed() == load
            rows = load.far_send + load.near_send
            if way is Way.DIRECT:  # all but a token's own rank
                assert rows == pytest.approx(sum(shares.ranks) * (1 - 1 / num_ranks))
        hops = load_of(Way.TWO_LEVEL, cluster, shares).near_send
        assert hops == pytest.approx(sum(shares.ranks) * (1 - 1 / 8))


# --- What must hold of times ---------------------------------------------------------------------


@given(cluster=clusters(), routing=st.sampled_from(Routing), way=st.sampled_from(Way))
def test_faster_links_never_take_longer(cluster: Cluster, routing: Routing, way: Way) -> None:
    num_experts = 2 * cluster.num_ranks
    shares = shares_of(routing, cluster, num_experts, min(4, num_experts))
    slow = exchange(way, cluster, shares, 1e8)
    for name in ("nic_gbs", "link_gbs", "copy_gbs", "num_sms"):
        faster = replace(cluster, **{name: 2 * getattr(cluster, name)})
        assert exchange(way, faster, shares, 1e8).us <= slow.us
    assert exchange(way, cluster, shares, 2e8).us >= slow.us
    limit = slow.limit
    if limit != "latency":
        name = {"far": "nic_gbs", "near": "link_gbs", "copied": "num_sms"}[limit.split()[0]]
        halved = replace(cluster, **{name: getattr(cluster, name) / 2})
        assert exchange(way, halved, shares, 1e8).us > slow.us


@given(per_node=st.integers(1, 16), routing=st.sampled_from(Routing))
def test_one_node_sends_nothing_over_nics(per_node: int, routing: Routing) -> None:
    cluster = Cluster(per_node, per_node)
    shares = shares_of(routing, cluster, 16 * per_node, 8)
    ways = [exchange(way, cluster, shares, 1e6) for way in Way]
    for one in ways:
        assert one.load.far_send == one.load.far_receive == 0
        assert one.us == pytest.approx(ways[0].us)
    assert faster_way(cluster, shares, 1e6, 1e6) is Way.DIRECT


@given(num_ranks=st.integers(1, 16), routing=st.sampled_from(Routing))
def test_nodes_of_one_rank_have_one_way(num_ranks: int, routing: Routing) -> None:
    cluster = Cluster(num_ranks, 1)
    shares = shares_of(routing, cluster, 4 * num_ranks, 3)
    direct, two_level = (exchange(way, cluster, shares, 1e6) for way in Way)
    assert direct.us == pytest.approx(two_level.us)
    for kind in Load._fields:
        assert getattr(direct.load, kind) == pytest.approx(getattr(two_level.load, kind))
    assert faster_way(cluster, shares, 1e6, 1e6) is Way.DIRECT


@pytest.mark.parametrize("way", Way)
def test_sums_return_by_the_links_by_which_rows_came(way: Way) -> None:
    cluster = Cluster(32, 8)
    shares = shares_of(Routing.ZIPF, cluster, E, K)
    there, back = (exchange(way, cluster, shares, 1.0, one).bytes_on for one in (False, True))
    for near_or_far in ("near", "far"):
        send, receive = f"{near_or_far} send", f"{near_or_far} receive"
        assert (back[send], back[receive]) == (there[receive], there[send])
        assert back[send] > back[receive]


def test_two_levels_are_taken_where_they_save_more_than_the_hop() -> None:
    cluster = Cluster(16, 8)
    shares = Shares.uniform(cluster, E, K)
    assert faster_way(cluster, shares, 1e7, 1e7) is Way.TWO_LEVEL
    assert faster_way(replace(cluster, hop_us=1e6), shares, 1e7, 1e7) is Way.DIRECT
    assert faster_way(cluster, shares, 10, 10) is Way.DIRECT


# Ranks: nodes and ranks of a token, us of dispatch (fp8) and combine (bf16) by two levels, the same
# of tokens that reach 4 nodes at most: 4096 tokens, 45 GB/s, without any latency.
ANSWERS = {
    16: (1.99, 6.52, 670, 1300, 670, 1300),
    32: (3.61, 7.27, 1824, 3537, 1824, 3537),
    64: (5.29, 7.68, 3117, 6045, 2137, 4144),
    128: (6.52, 7.89, 4115, 7980, 2308, 4476),
    256: (7.27, 8.00, 4737, 9186, 2425, 4703),
    2048: (7.90, 8.00, 5298, 10275, 2493, 4836),
}


@pytest.mark.parametrize("num_ranks", ANSWERS)
def test_the_formulas_give_the_known_answers(num_ranks: int) -> None:
    nodes, ranks, *wanted = ANSWERS[num_ranks]
    cluster = Cluster(num_ranks, 8, nic_gbs=GBS, latency_us=0, hop_us=0)
    found = []
    for limit in (None, 4):
        shares = Shares.uniform(cluster, max(E, num_ranks), K, limit)
        if limit is None:
            assert (sum(shares.nodes), sum(shares.ranks)) == pytest.approx((nodes, ranks), abs=6e-3)
        for row_type in (RowType.FP8, RowType.BF16):
            num_bytes = 4096 * row_type.num_bytes(H)
            found.append(exchange(Way.TWO_LEVEL, cluster, shares, num_bytes).us)
    assert found == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (Cluster(12, 8), "12 ranks do not fill nodes of 8 ranks each"),
        (Cluster(0, 8), "0 ranks do not fill"),
        (Cluster(8, 8, nic_gbs=0), "nic_gbs is 0; it must be larger than 0"),
        (Cluster(8, 8, link_gbs=float("nan")), "link_gbs is nan; it must be larger than 0"),
        (Cluster(8, 8, latency_us=-1), "latency_us is -1; it must be 0 or larger"),
    ],
)
def test_clusters_that_cannot_be(cluster: Cluster, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        cluster.check()


# --- Chunk by chunk ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [8, 16, 32])
@pytest.mark.parametrize("routing", Routing)
@pytest.mark.parametrize("way", Way)
def test_chunks_take_the_time_of_the_formula(num_ranks: int, routing: Routing, way: Way) -> None:
    """Within 10%: chunks wait for one another, and a draw is not its mean. With enough tokens the
    first and the last chunk's way, during which the busiest link is idle, is short."""
    cluster, tokens, row = Cluster(num_ranks, 8), 768, RowType.FP8.num_bytes(H)
    reached = reached_by(routing, cluster, tokens, E, K)
    outcome = play(cluster, chunks_of(way, cluster, reached), row)
    one = exchange(way, cluster, shares_of(routing, cluster, E, K), tokens * row)
    assert outcome.us == pytest.approx(one.us - one.fixed_us, rel=0.1)
    assert outcome.us >= outcome.busiest_us


@given(cluster=clusters(), way=st.sampled_from(Way), order=st.sampled_from(Order))
def test_every_row_passes_the_links_of_its_way(cluster: Cluster, way: Way, order: Order) -> None:
    reached = reached_by(Routing.ZIPF, cluster, 40, 2 * cluster.num_ranks, 2)
    found = {kind: [0] * cluster.num_ranks for kind in counted(way, cluster, [])}
    chunks = list(chunks_of(way, cluster, reached, order))
    pieces = [piece for chunk in chunks for piece in chunk.forward]
    for one in chunks + pieces:
        for kind, rank, rows in one.path:
            found[kind.replace(" ", "_")][rank] += rows
    assert found == counted(way, cluster, reached)
    outcome = play(cluster, iter(chunks), 1000)
    us = [rows / cluster.nic_gbs for kind in found if "far" in kind for rows in found[kind]]
    us += [rows / cluster.link_gbs for kind in found if "near" in kind for rows in found[kind]]
    assert outcome.busiest_us == pytest.approx(max(us))


@pytest.mark.parametrize("num_ranks", [32, 64])
def test_incast_takes_longer(num_ranks: int) -> None:
    """Where all begin with the same NIC, the last one is idle until all others are served."""
    cluster, row = Cluster(num_ranks, 8), RowType.FP8.num_bytes(H)
    reached = reached_by(Routing.UNIFORM, cluster, 128, E, K)
    staggered, incast = (
        play(cluster, chunks_of(Way.DIRECT, cluster, reached, order), row) for order in Order
    )
    assert incast.us > 1.5 * staggered.us
    assert incast.waited["far receive"] > 3 * staggered.waited["far receive"]


def test_one_chunk_passes_one_link_after_another() -> None:
    """A token of rank 0 for rank 3 goes over rank 2, to which it is one row of 1000 bytes."""
    cluster = Cluster(4, 2, nic_gbs=1, link_gbs=2)
    reached = [torch.tensor([[False, False, False, True]])]
    outcome = play(cluster, chunks_of(Way.TWO_LEVEL, cluster, reached), 1000)
    assert outcome.us == pytest.approx(1 + NETWORK_US + 1 + 0.5 + 0.5)
    outcome = play(cluster, chunks_of(Way.DIRECT, cluster, reached), 1000)
    assert outcome.us == pytest.approx(1 + NETWORK_US + 1)


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
    and by 16 for 128 (bench/NOTES.md)."""
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
