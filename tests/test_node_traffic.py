"""The model of the links of many nodes: its formulas against routings that are drawn and counted,
and its chunks against its formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.errors import ShapeError
from moe_engine.layer_config import MODELS
from moe_engine.node_traffic import (
    Cluster,
    Load,
    RowType,
    Shares,
    Way,
    exchange,
    faster_way,
    load_of,
)
from moe_engine.tools.drawn_routing import (
    Routing,
    draw_routing,
    drawn_shares,
    ranks_reached,
    shares_of,
)
from moe_engine.tools.simulate_events import NETWORK_US, Order, chunks_of, play

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
