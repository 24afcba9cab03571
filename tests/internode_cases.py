"""What the tests of several nodes share: ranks on emulated nodes, the calls they make, the oracle
of a combine over nodes."""

from __future__ import annotations

import operator
import time
from itertools import pairwise
from typing import Any, NamedTuple

import cases
import torch
import torch.distributed as dist
from dispatch_cases import check_round_trip, make_buffer, make_inputs, poison, round_trip

from moe_engine import Buffer, MoeEngineError, Options, RoutingError
from moe_engine.emulation import PerRank, RankPool
from moe_engine.errors import TooManyTokens
from moe_engine.symm.base import environment
from moe_engine.symm.nic import Nic

NIC = {
    "SEED": "MOE_ENGINE_NIC_SEED",
    "HOLD_S": "MOE_ENGINE_NIC_HOLD_S",
    "STALL_S": "MOE_ENGINE_NIC_STALL_S",
}
"""The variables of the emulated network."""
HOLD_S = 0.02
"""How long the network holds messages at most, where their order is what is tested."""


class Nodes(NamedTuple):
    """N nodes of L ranks; the first ranks of a pool."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    def run(self, pool: RankPool, function: Any, *args: Any, nic: Any = (), **more: Any) -> Any:
        """`pool.run` on these nodes. nic: SEED, HOLD_S and STALL_S of the network, or a list of
        those of each rank."""
        each = nic if isinstance(nic, list) else [nic] * self.num_ranks
        variables = [
            {NIC[name]: str(value) for name, value in dict(one).items()}
            | {"MOE_ENGINE_NODE_SIZE": str(self.ranks_per_node)}
            for one in each
        ]
        args = PerRank(variables), function, *args
        return pool.run(on_nodes, *args, num_ranks=self.num_ranks, **more)


def on_nodes(group, variables, function, *args):
    """`function`, with the nodes and the network that the variables describe."""
    with environment(variables):
        return function(group, *args)


def small_buffer(group, x, num_experts, num_topk, max_tokens=40, **options):
    """A Buffer for rows like x, whose layers are fused ones."""
    sizes = max_tokens, x.shape[1], num_experts, num_topk
    return Buffer.for_tokens(group, *sizes, x.dtype, options=Options(decode_tokens=0, **options))


def dispatch(buffer, x, topk_idx, topk_weights, num_experts, **more):
    """A dispatch with the layout of topk_idx."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights, **more
    )


def round_trips(group, num_trips, num_experts, max_tokens, x, topk_idx, topk_weights, bias):
    """Round trips on one Buffer, each of four calls and on memory that holds NaN, and another
    rank late in each: what they gave, the same bits each time."""
    buffer = make_buffer(group, x, num_experts, topk_idx.shape[1], max_tokens)
    first = None
    for trip in range(num_trips):
        dist.barrier(group)  # all that was sent has arrived, as each rank has waited for it
        poison(buffer)
        dist.barrier(group)
        if group.rank() == trip % group.size():
            time.sleep(0.03)
        result = round_trip(buffer, x, topk_idx, topk_weights, num_experts, bias)
        first = first or result
        for name, value in result.items():
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(value, first[name]), f"{name} of trip {trip} differs from that of trip 0"
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return first


def check_case(
    pool, nodes, num_tokens, hidden, num_experts, num_topk, kind, dtype, seed=0, trips=2, nic=()
):
    """Round trips of inputs that `make_inputs` draws, bit for bit against the oracle."""
    inputs = make_inputs(
        nodes.num_ranks, num_tokens, hidden, num_experts, num_topk, kind, dtype, seed
    )
    check_inputs(pool, nodes, inputs, num_experts, trips, nic)


def check_inputs(pool, nodes, inputs, num_experts, trips=2, nic=()):
    """`check_case` for (x, topk_idx, topk_weights) of all ranks."""
    bias = [[part * 0.5, part * 0.25] for part in inputs[0]]
    most = max(map(len, inputs[0]))
    of_ranks = (PerRank(part) for part in (*inputs, bias))
    results = nodes.run(pool, round_trips, trips, num_experts, most, *of_ranks, nic=nic)
    check_round_trip(results, *inputs, num_experts, bias, nodes.ranks_per_node)


# --- A rank that tells the others --------------------------------------------------------------


def bring_too_many(group, num_experts, *tokens):
    """(type, text) of what each rank raises in a second call, for which rank 2 brings one token
    more than the Buffer takes."""
    most = len(tokens[0]) - 1
    tokens = [part.to(cases.device()) for part in tokens]
    x, idx, _ = fewer = [part[:most] for part in tokens]
    buffer, error = small_buffer(group, x, num_experts, idx.shape[1], most), None
    try:
        for brought in (fewer, tokens if group.rank() == 2 else fewer):
            room = most * group.size()
            rows, *_, handle, _ = dispatch(buffer, *brought, num_experts, num_worst_tokens=room)
            buffer.combine(rows, handle)
            buffer.check()
    except MoeEngineError as raised:
        error = raised
    dist.barrier(group)
    buffer.destroy()
    return type(error), str(error)


def check_too_many(found):
    """All ranks raise the error of rank 2 that brought 13 tokens, and know from whom it is."""
    assert [kind for kind, _ in found] == [TooManyTokens] * 4
    for rank, (_, text) in enumerate(found):
        assert "rank 2: 13 tokens" in text
        assert text.startswith("rank 2 abandoned call 3") == (rank != 2)


def return_wider_rows(group, num_experts, x, topk_idx, topk_weights):
    """The type of what a rank raises where it returns fp32 rows of all tokens, for which a Buffer
    that grew for a dispatch in bf16 has no room."""
    sizes = 4 * x.shape[1], group.size(), num_experts, topk_idx.shape[1]
    options = Options(timeout_s=20.0, decode_tokens=0)
    buffer = Buffer(group, Buffer.size_hint(1, *sizes), options=options)
    rows, *_, handle, _ = dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    error = None
    try:
        buffer.combine(rows.float(), handle)
        buffer.check()
    except MoeEngineError as raised:
        error = raised
    dist.barrier(group)
    buffer.destroy()
    return type(error)


# --- Other calls than round trips, as ranks make them ----------------------------------------


def send_fp8(group, num_experts, x, topk_idx, topk_weights, scales):
    """(rows, scales) of e4m3 with a layout and with the handle, as bytes; bf16 with that handle,
    and its sum."""
    buffer = small_buffer(group, x.bfloat16(), num_experts, topk_idx.shape[1])
    poison(buffer)
    dist.barrier(group)
    pair = x.to(torch.float8_e4m3fn), scales
    first, *_, handle, _ = dispatch(buffer, pair, topk_idx, topk_weights, num_experts)
    again, *_ = buffer.dispatch(pair, handle)
    wide, *_ = buffer.dispatch(x.bfloat16(), handle)
    out, *_ = buffer.combine(wide, handle)
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return *[(rows.view(torch.uint8), found) for rows, found in (first, again)], wide, out


def without_ids(group, num_experts, x, topk_idx):
    """A dispatch without ids and weights, and its sum: (rows, ids, weights, sum)."""
    buffer = small_buffer(group, x, num_experts, topk_idx.shape[1])
    poison(buffer)
    dist.barrier(group)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    got, ids, weights, _, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)
    out, *_ = buffer.combine(got, handle)
    dist.barrier(group)
    buffer.destroy()
    return got, ids, weights, out


def worst_case(group, num_worst_tokens, num_experts, x, topk_idx, topk_weights):
    """A dispatch and a combine without waiting for counts: (rows, ids, weights, counts, sum)."""
    buffer = small_buffer(group, x, num_experts, topk_idx.shape[1])
    poison(buffer)
    dist.barrier(group)
    got, ids, weights, counts, handle, _ = dispatch(
        buffer, x, topk_idx, topk_weights, num_experts, num_worst_tokens=num_worst_tokens
    )
    out, *_ = buffer.combine(got, handle)
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return got, ids, weights, counts, out


def outgrow(group, num_experts, x, topk_idx, topk_weights):
    """Dispatches and combines in a Buffer that begins with room for one row: what they gave, and
    how large it was after each."""
    num_topk = topk_idx.shape[1]
    hint = Buffer.size_hint(1, 4 * x.shape[1], group.size(), num_experts, num_topk)
    buffer = Buffer(group, hint, 0, options=Options(decode_tokens=0))
    results, sizes = [], []
    for end in (1, None, 5):
        args = x[:end], topk_idx[:end], topk_weights[:end]
        got, *_, handle, _ = dispatch(buffer, *args, num_experts)
        results.append((got, buffer.combine(got, handle)[0]))
        sizes.append(buffer._engine.slots.layout.num_bytes)
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return results, sizes


def one_way(group, num_slots, num_calls):
    """What the last rank gets from the first, which never waits for an answer."""
    rank, last = group.rank(), group.size() - 1
    x = torch.arange(0.0 if rank else 96.0).view(-1, 16)
    buffer = small_buffer(group, x, last + 1, 1, num_slots=num_slots, timeout_s=30.0)
    idx = torch.full((len(x), 1), last)
    *_, handle, _ = dispatch(buffer, x, idx, torch.ones(len(x), 1), last + 1)
    received = []
    for call in range(num_calls):
        received.append(buffer.dispatch(x + call, handle)[0])
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return received


def tokens_for(topk_idx, node, num_experts):
    """How many tokens have an expert on a node, of num_experts each."""
    return int(((topk_idx >= 0) & (topk_idx // num_experts == node)).any(1).sum())


def count_bytes(group, num_experts, x, topk_idx, topk_weights):
    """(messages, bytes) to each rank, of a dispatch and of its combine."""
    buffer = small_buffer(group, x, num_experts, topk_idx.shape[1])
    nic = Nic.of_process()

    def sent():
        return nic.num_messages.copy(), nic.num_bytes.copy()

    at = [sent()]
    got, _, weights, _, handle, _ = dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    at.append(sent())
    buffer.combine(got, handle, weights)
    at.append(sent())
    dist.barrier(group)
    buffer.destroy()
    return [
        [dict(now - before) for now, before in zip(after, earlier, strict=True)]
        for earlier, after in pairwise(at)
    ]


def with_bad_ids(group, num_experts, x, topk_idx, topk_weights):
    """A dispatch whose layout told of bad ids, and its sum: (rows, ids, sum, the error's text)."""
    buffer, text = small_buffer(group, x, num_experts, topk_idx.shape[1]), None
    try:
        got, ids, _, _, handle, _ = dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    except RoutingError as error:
        text = str(error)
        got, ids, _, _, handle, _ = error.result
    out, *_ = buffer.combine(got, handle)
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return got, ids, out, text


def with_options(group, options, more, num_experts, x, topk_idx, topk_weights):
    """Three round trips in a Buffer with these options, `more` being arguments of all calls: the
    last rows and sum."""
    buffer = small_buffer(group, x, num_experts, topk_idx.shape[1], **options)
    for _ in range(3):
        poison(buffer)
        dist.barrier(group)
        got, *_, handle, event = dispatch(buffer, x, topk_idx, topk_weights, num_experts, **more)
        again, *_, later = buffer.dispatch(x, handle, **more)
        out, _, last = buffer.combine(again, handle, **more)
        for one in (event, later, last):
            one.current_stream_wait()
        assert torch.equal(got, again)
        dist.barrier(group)
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return got, out
