"""Each family on eight ranks, or on as many as there are GPUs, up to eight; bench/sweep.sh says how
many GPUs it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from dispatch_cases import check_case as check_dispatch_combine
from layer_cases import check_layer
from low_latency_cases import FORMS, HIDDEN
from low_latency_cases import check_case as check_low_latency

from moe_engine.emulation import RankPool

OF_KINDS = pytest.mark.parametrize(
    "kind", ["holes", pytest.param("empty_rank", marks=pytest.mark.slow)]
)
TOKENS = [6, 0, 3]


@pytest.fixture(scope="module")
def ranks(pool) -> Iterator[RankPool]:
    """`pool` says where there are ranks at all, and skips where there are none."""
    device, num_ranks = pool.device, 8
    if "MOE_ENGINE_TEST_RANKS" in os.environ:
        device, num_ranks = "cuda", int(os.environ["MOE_ENGINE_TEST_RANKS"])
    elif device == "cuda":
        num_ranks = 8 if torch.cuda.device_count() == 1 else min(8, torch.cuda.device_count())
    with RankPool(num_ranks, device, timeout_s=240) as eight:
        yield eight


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["holes", "empty_rank"])
def test_dispatch_and_combine(ranks, kind):
    sizes = 40, 3 * ranks.num_ranks, 4
    check_dispatch_combine(ranks, ranks.num_ranks, TOKENS, *sizes, kind, "bf16")


def test_ranks_are_summed_in_order(ranks):
    """Each token names its experts in a random order; from three ranks on, another order of the
    fp32 sum gives other bits."""
    sizes = 16, ranks.num_ranks, ranks.num_ranks
    check_dispatch_combine(ranks, ranks.num_ranks, TOKENS, *sizes, "uniform", "fp32")


def test_fused_layer(ranks):
    check_layer(ranks, ranks.num_ranks, TOKENS, 32, 24, 2, 4, "holes", "bf16")


@OF_KINDS
def test_low_latency(ranks, kind):
    forms = list(FORMS) if ranks.device == "cuda" else ["ue8m0"]
    sizes = HIDDEN, 2 * ranks.num_ranks, 4
    check_low_latency(ranks, ranks.num_ranks, [3, 0, 2], 4, *sizes, kind, forms)


def test_decode_layer(ranks):
    check_layer(ranks, ranks.num_ranks, [3, 0, 5], 32, 24, 2, 4, "holes", "bf16", "decode")
