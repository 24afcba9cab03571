"""Ranks of other nodes are told why a call broke off, over a network that is late and out of order:
they raise the error of that call, and wait for no deadline."""

from __future__ import annotations

import time
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from internode_cases import Nodes, small_buffer
from network_cases import LONG_S, Place
from rounds import VERBS
from test_broken_calls import break_off, check_outcomes, texts

from moe_engine.device.context import TOLD_BIT, ContextField
from moe_engine.emulation import RankPool
from moe_engine.symm import notice_kernels, notices
from moe_engine.symm.device_context import DeviceContext
from moe_engine.symm.notices import NOTICE_BYTES, TOLD_BYTE
from moe_engine.symm.slots import SlotLayout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of emulated ranks")

FEW = Nodes(2, 2)
SEEDS = range(5)
WHY = "rank 1 has had enough of this. " * 40  # more than a notice holds


@pytest.fixture(scope="module")
def pool():
    """2 nodes of 2 ranks."""
    cases.skip_without_interpreter()
    with RankPool(4, nodes=2, timeout_s=240) as ranks:
        yield ranks


# --- One notice ------------------------------------------------------------------------------


def hear(group, has_fence):
    """For each seed of the network (BROKEN, text) as this rank finds them at once when rank 1 tells
    it that its calls have ended, by a kernel with its fence or without it."""
    fence = notice_kernels.fence if has_fence else lambda rank, context: None
    found = []
    for seed in SEEDS:
        layout = SlotLayout(group.size(), 1024)
        block = Place(group, layout.num_bytes, NIC_SEED=seed, NIC_HOLD_S=0.3).block
        context = DeviceContext(layout, group.rank(), block, 60.0)
        told, give_up = memoryview(block.local.numpy())[TOLD_BYTE:], time.monotonic() + LONG_S
        context.fields[ContextField.BROKEN] = 1 << group.rank()
        dist.barrier(group)
        if group.rank() == 1:
            with mock.patch.object(notice_kernels, "fence", fence):
                context.abandon("ValueError", WHY)
        while not told[0] and time.monotonic() < give_up:
            time.sleep(0.0001)
        text = str(context.notices.read())
        found.append((int(context.fields[ContextField.BROKEN]), text))
        dist.barrier(group)
        block.free()
    return found


def test_whoever_hears_of_a_notice_reads_it(pool):
    """Ranks of both nodes, also those that are no rail peers; bits of their own stay set."""
    sent = f"ValueError\0{WHY}"[: NOTICE_BYTES - 1].partition("\0")[2]
    for rank, found in enumerate(FEW.run(pool, hear, True)):
        bits = 1 << rank | 1 << TOLD_BIT
        assert found == [(bits, f"{sent} Make a new Buffer.")] * len(SEEDS)


def test_a_notice_without_its_fence_is_seen_to_come_too_late(pool):
    *near, two, three = FEW.run(pool, hear, False)
    assert all(text.startswith("rank 1 has had enough") for one in near for _, text in one)
    assert any(text.startswith("another rank") for _, text in two + three)


def kernels_loaded(group):
    """The names of the kernels that are loaded while a Buffer is made, before its first call."""
    with mock.patch.object(notices, "load") as load:
        small_buffer(group, torch.zeros(1, 16), 8, 2).destroy()
    return [one.args[0].__name__ for one in load.call_args_list]


TELLING = 2 * ["tell_far_ranks_kernel"]
"""It tells of an end, and of a refused call."""


@pytest.mark.parametrize(("nodes", "names"), [(FEW, TELLING), (Nodes(1, 4), [])])
def test_the_kernel_that_tells_is_loaded_before_it_is_needed(pool, nodes, names):
    assert nodes.run(pool, kernels_loaded) == [names] * 4


# --- Calls that break off --------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb", cases.slow_unless([("normal",), ("layer",), ("low_latency",)], VERBS)
)
def test_a_call_that_breaks_off_ends_those_of_all_nodes(pool, verb):
    """Before and within calls, of which no rank misses the deadline of 60 s."""
    rank = VERBS.index(verb) % 4
    check_outcomes(FEW.run(pool, break_off, verb, rank, 5, 25), rank)


def test_all_nodes_learn_who_where_and_why(pool):
    for _, text, second in FEW.run(pool, texts, "normal"):
        assert text.startswith("rank 1 abandoned call")
        assert "in phase 'final_sum' because of Injected: before internode_sum_kernel" in text
        assert text.endswith("Make a new Buffer.")
        assert second == "right"
