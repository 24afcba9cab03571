"""Layers of more tokens than one call takes: sub-batches, equally many on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import cases
import pytest
import test_layer_biases as with_biases
import test_passes as in_passes
import test_quantized_layer as quantized
import torch
import torch.distributed as dist
from training_cases import check_training, end, gradients, make_case, new_buffer, on_device

from moe_engine import (
    Buffer,
    CapacityError,
    MoeEngineError,
    MoEFeedForward,
    Options,
    ShapeError,
    moe_ffn,
    reference,
    start_moe_ffn,
)
from moe_engine import passes as layer_passes
from moe_engine.emulation import PerRank
from moe_engine.symm.slots import SlotLayout


@dataclass(frozen=True)
class SmallCalls:
    """A pool of ranks whose calls take up to most_rows tokens."""

    pool: Any
    most_rows: int = 8

    @property
    def num_ranks(self) -> int:
        return self.pool.num_ranks

    def run(self, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
        """See `RankPool.run`."""
        return self.pool.run(with_small_calls, self.most_rows, function, *args, **more)


def with_small_calls(group: Any, most_rows: int, function: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.object(SlotLayout, "most_rows", most_rows):
        return function(group, *args)


def counted() -> Any:
    """Counts the calls of layers that may take several."""
    spy = mock.Mock(wraps=layer_passes._forward_pass)
    return mock.patch.object(layer_passes, "_forward_pass", spy)
