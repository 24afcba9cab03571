"""Each family on eight ranks, or on as many as there are GPUs, up to eight; bench/sweep.sh says how
many GPUs it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import cases
import pytest
import torch
from low_latency_cases import FORMS, HIDDEN
from test_decode_layer import check_layer as check_decode_layer
from test_dispatch_combine import check_case as check_dispatch_combine
from test_layer import check_layer
from test_low_latency import check_case as check_low_latency
from test_routing import check_plan

from moe_engine.emulation import RankPool

OF_KINDS = pytest.mark.parametrize(
    "kind", ["holes", pytest.param("empty_rank", marks=pytest.mark.slow)]
)
TOKENS = [21, 0, 9]


@pytest.fixture(scope="module")
def ranks(pool) -> Iterator[RankPool]:
    """`pool` says where there are ranks at all, and skips where there are none."""
    device, num_ranks = pool.device, 8
    if "MOE_ENGINE_TEST_RANKS" in os.environ:
        device, num_ranks = "cuda", int(os.environ["MOE_ENGINE_TEST_RANKS"])
    elif device == "cuda":
        num_ranks = 8 if torch.cuda.device_count() == 1 else min(8, torch.cuda.device_count())
    with RankPool(num_ranks, device, timeout_s=100) as eight:
        yield eight


@pytest.mark.parametrize("num_experts", [8, 64])
def test_routing(pool, num_experts):
    check_plan(pool, cases.route("holes", 300, num_experts, 4, 0), num_experts, 8)


@OF_KINDS
def test_dispatch_and_combine(ranks, kind):
    sizes = 40, 3 * ranks.num_ranks, 4
    check_dispatch_combine(ranks, ranks.num_ranks, TOKENS, *sizes, kind, "bf16")


def test_ranks_are_summed_in_order(ranks):
    """fp32 from all ranks in random lane order: from three ranks on, another gives other bits."""
    sizes = 16, ranks.num_ranks, ranks.num_ranks
    check_dispatch_combine(ranks, ranks.num_ranks, TOKENS, *sizes, "uniform", "fp32")


def test_fused_layer(ranks):
    check_layer(ranks, ranks.num_ranks, TOKENS, 32, 24, 2, 4, "holes", "bf16")


@OF_KINDS
def test_low_latency(ranks, kind):
    forms = list(FORMS) if ranks.device == "cuda" else ["bf16", "ue8m0"]
    sizes = HIDDEN, 2 * ranks.num_ranks, 4
    check_low_latency(ranks, ranks.num_ranks, [4, 0, 2], 4, *sizes, kind, forms)


def test_decode_layer(ranks):
    check_decode_layer(ranks, ranks.num_ranks, [5, 0, 8], 32, 24, 2, 4, "holes", "bf16")
