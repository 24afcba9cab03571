"""A stand-in for CUDA graphs on CPU ranks, for the tests of `shard_experts(..., cuda_graphs=True)`.

A replay calls the captured function again, with the inputs that were kept. So a rank makes the
passes that it would make by graphs, with the numbers of tokens that these hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moe_engine.device.lang import INTERPRETED
from moe_engine.integrations import decode_graphs

Call = Callable[[], Any]


class RepeatedCalls:
    """What `CudaGraphs` does, by the function itself."""

    def __init__(self, device: torch.device):
        assert device.type == "cpu"

    def warm_up(self, call: Call) -> Any:
        return call()

    def capture(self, call: Call) -> Call:
        return call


@contextmanager
def graphs(stand_in: Any = RepeatedCalls) -> Iterator[None]:
    """Within the block `cuda_graphs=True` works on CPU ranks, by a stand-in; GPUs have graphs."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(decode_graphs, "CudaGraphs", stand_in)
            patch.setattr(decode_graphs, "resolve_device", lambda _: torch.device("cuda"))
        yield
