"""A stand-in for CUDA graphs on CPU ranks, for the tests of `shard_experts(..., cuda_graphs=True)`.

As with a CUDA graph, a replay runs no Python of the model: the operators that were called in the
capture run again, each on the tensors that it had then, and write what they return to where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_engine.device.lang import INTERPRETED
from moe_engine.integrations import decode_graphs

Call = Callable[[], Any]


class Operators(TorchDispatchMode):
    """Collects the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


class RecordedCalls:
    """What `CudaGraphs` does, by operators. A capture runs them, too, so that what it returns first
    launches nothing: the other ranks see one pass."""

    def __init__(self, device: torch.device):
        assert device.type == "cpu"

    def warm_up(self, call: Call) -> Any:
        return call()

    def capture(self, call: Call) -> Call:
        with Operators() as operators:
            result = call()
        passes = 0

        def replay() -> Any:
            nonlocal passes
            passes += 1
            if passes > 1:
                run_again(operators.calls)
            return result

        return replay


def run_again(calls: list[tuple[Any, Any, Any, Any]]) -> None:
    for function, args, kwargs, result in calls:
        new = tree_leaves(function(*args, **kwargs))
        for old, one in zip(tree_leaves(result), new, strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != one.data_ptr():
                old.copy_(one)


@contextmanager
def graphs(stand_in: Any = RecordedCalls) -> Iterator[None]:
    """Within the block `cuda_graphs=True` works on CPU ranks, by a stand-in; GPUs have graphs."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(decode_graphs, "CudaGraphs", stand_in)
            patch.setattr(decode_graphs, "resolve_device", lambda _: torch.device("cuda"))
        yield
