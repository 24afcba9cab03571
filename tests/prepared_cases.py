"""A stand-in on CPU ranks for the CUDA graphs that prepared calls are on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from moe_engine import launch
from moe_engine.device.lang import INTERPRETED
from moe_engine.launch import InterpretedLaunch


class GraphOfCopies:
    """Launches as one, which keeps the arguments that it was told of, as `LaunchGraph` does."""

    def __init__(self, launches: Sequence[InterpretedLaunch]):
        self._launches = launches
        self._told: dict[int, dict[str, Any]] = {}

    def __call__(self, stream: int, changed: set[int]) -> bool:
        for number in changed if self._told else range(len(self._launches)):
            one = self._launches[number]
            self._told[number] = dict(_tensors=[*one._tensors], _arguments={**one._arguments})
        changed.clear()
        for number, one in enumerate(self._launches):
            with mock.patch.multiple(one, **self._told[number]):
                one(stream)
        return True


def prepared_as_graphs() -> AbstractContextManager[Any]:
    """Within the block calls are prepared as graphs where kernels are interpreted too."""
    if not INTERPRETED:
        return nullcontext()
    return mock.patch.object(
        launch, "as_graph", lambda launches: GraphOfCopies(launches) if launches else None
    )
