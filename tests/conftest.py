"""Markers and fixtures of all tests. Functions that ranks run are found in the test modules."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import cases
import pytest
import torch
from hypothesis import settings
from node_cases import SHAPES, NodePool

from moe_engine.emulation import RankPool

os.environ["MOE_ENGINE_CACHE"] = os.devnull  # what was tuned on this machine is not tested

for profile, max_examples in {"quick": 6, "long": 30}.items():
    settings.register_profile(
        profile, max_examples=max_examples, deadline=None, derandomize="CI" in os.environ
    )
settings.load_profile("quick")
NOT_BY_DEFAULT = {
    "slow": "left to `make test-slow`",
    "soak": "takes up to hours; choose it with -m soak",
}


def pytest_xdist_auto_num_workers() -> int:
    """Processes that run tests with `-n auto`, each with a pool of up to 4 ranks: one for two
    cores, as ranks that wait take a part of a core, and another for what uses only one; those on a
    GPU share it already."""
    return 1 if torch.cuda.is_available() else min(8, 1 + (os.cpu_count() or 1) // 2)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker("property")
        for marker, reason in NOT_BY_DEFAULT.items():
            if item.get_closest_marker(marker) and marker not in config.option.markexpr:
                item.add_marker(pytest.mark.skip(reason=reason))
    num_gpus = torch.cuda.device_count()
    for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
        for item in items:
            if num_gpus < needed and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), has {num_gpus}"))


class GpuPool(RankPool):
    """A pool that skips what needs more GPUs than there are."""

    def run(self, *args: Any, num_ranks: int | None = None, **more: Any) -> list[Any]:
        if num_ranks is not None and num_ranks > self.num_ranks:
            pytest.skip(f"needs {num_ranks} GPUs, has {self.num_ranks}")
        return super().run(*args, num_ranks=num_ranks, **more)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks for the whole session: one on each of up to 4 GPUs, 4 on a single one, or 4 CPU
    processes."""
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        cases.skip_without_interpreter()
    num_ranks, device = min(num_gpus, 4) if num_gpus > 1 else 4, "cuda" if num_gpus else "cpu"
    with GpuPool(num_ranks, device, timeout_s=240) as ranks:  # less than a test's time limit
        yield ranks


@pytest.fixture(scope="module")
def ranks_of_nodes() -> Iterator[RankPool]:
    """Six emulated ranks on three nodes; the first four are on two."""
    cases.skip_without_interpreter()
    with RankPool(6, nodes=3, timeout_s=240) as ranks:
        yield ranks


@pytest.fixture
def nodes(ranks_of_nodes: RankPool) -> Callable[[str], NodePool]:
    """Gives the pool of a shape of nodes, such as "2x2"."""
    return lambda shape: NodePool(ranks_of_nodes, *SHAPES[shape])
