"""Calls that are one CUDA graph: what the driver is told, and what else a GPU's owner does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cuda.bindings import driver as bindings

from moe_engine import cuda_driver, launch_graph, prepared
from moe_engine.emulation import RankPool
from moe_engine.grouped_gemm import grouped_mlp
from moe_engine.launch import MOST_STREAMS
from moe_engine.launch_graph import LaunchGraph

LONG = 1_000_000_000
"""Cycles, about half a second."""


# --- What the driver is told ---------------------------------------------------------------------


class Driver:
    """Stands for the CUDA driver: notes what it is asked for, and returns `codes` for some."""

    def __init__(self, **codes: int) -> None:
        self.asked: list[str] = []
        self.edges: list[tuple[int, int]] = []
        self.codes = codes

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            return getattr(bindings, name)  # structures and enumerations need no GPU

        def function(*args: Any) -> tuple[Any, ...]:
            self.asked.append(name)
            if name == "cuGraphAddDependencies":
                [edge] = args[3]
                self.edges.append((edge.from_port, edge.type))
            text = {"cuGetErrorString": b"out of memory"}
            made = ("cuGraphCreate", "cuGraphAddKernelNode", "cuGraphInstantiate", *text)
            values = [text.get(name, object())] if name in made else []
            return bindings.CUresult(self.codes.get(name, 0)), *values

        return function

    def installed(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for module in (launch_graph, cuda_driver):
            stack.enter_context(mock.patch.object(module, "driver", self))
        stack.enter_context(mock.patch.object(launch_graph, "relaxed_capture", nullcontext))
        return stack


def three_launches() -> list[Any]:
    """The second one is a programmatic dependent launch."""
    return [SimpleNamespace(name=name, is_dependent=name == "b", node=object) for name in "abc"]


def test_what_the_driver_is_told() -> None:
    driver, changed = Driver(), {0, 2}
    with driver.installed():
        graph = LaunchGraph(three_launches())
        assert graph(0, changed)
        assert (changed, driver.edges) == (set(), [(1, 1), (0, 0)])
        ends = ["cuGraphInstantiate", "cuGraphLaunch"]
        added = ["cuGraphAddKernelNode", "cuGraphAddDependencies"]
        assert driver.asked == ["cuGraphCreate", added[0], *added, *added, *ends]
        driver.asked.clear()
        assert graph(0, changed)
        assert driver.asked == ["cuGraphLaunch"]
        driver.asked.clear()
        assert graph(0, changed := {1, 2})
        assert driver.asked == [*["cuGraphExecKernelNodeSetParams"] * 2, "cuGraphLaunch"]
        assert not changed
        driver.asked.clear()
        del graph
        gc.collect()
        assert driver.asked == ["cuGraphExecDestroy", "cuGraphDestroy"]


@pytest.mark.parametrize("name", ["cuGraphInstantiate", "cuGraphLaunch"])
def test_memory_that_runs_out(name: str) -> None:
    with Driver(**{name: 2}).installed():
        assert not LaunchGraph(three_launches())(0, set())


def test_another_error_is_told() -> None:
    other = 1  # CUDA_ERROR_INVALID_VALUE
    with (
        Driver(cuGraphLaunch=other).installed(),
        pytest.raises(RuntimeError, match=r"could not launch a\+b\+c"),
    ):
        LaunchGraph(three_launches())(0, set())


# --- On a GPU ------------------------------------------------------------------------------------


class Products:
    """Two GEMMs with an activation, of one kind, and what they give for rows of such numbers."""

    def __init__(self) -> None:
        self.calls = prepared.PreparedCalls()
        self._up, self._down = torch.ones(1, 64, 32).cuda(), torch.ones(1, 32, 32).cuda()
        self._ends = torch.tensor([0, 4], dtype=torch.int32).cuda()
        self.rows = [torch.full((4, 32), value / 32).cuda() for value in range(6)]
        self.want = [self._product(rows) for rows in self.rows]

    def patched(self) -> AbstractContextManager[Any]:
        return mock.patch.object(prepared, "_without_memory", self.calls)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(prepared, "_without_memory", prepared.PreparedCalls()):
            return self(rows)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return grouped_mlp(rows, self._up, self._down, self._ends)

    def are_right(self, *found: torch.Tensor) -> bool:
        """Whether these are what the rows give, in their order."""
        torch.cuda.synchronize()
        return all(map(torch.equal, found, self.want))

    @property
    def graphs(self) -> list[Any]:
        """Those of all calls."""
        kinds = self.calls._kinds.values()
        calls = [call for kind in kinds for call in kind.prepared.values()]
        return [graph for call in calls for graph, _ in call._graphs._of_streams.values()]


def capture_between(group: dist.ProcessGroup) -> bool:
    """Calls, one that is captured, and further calls."""
    products, graph = Products(), torch.cuda.CUDAGraph()
    with products.patched():
        found = [products(rows) for rows in products.rows[:3]]
        with torch.cuda.graph(graph):
            found.append(products(products.rows[3]))
        found += [products(rows) for rows in products.rows[4:]]
        graph.replay()
        assert [type(one) for one in products.graphs] == [LaunchGraph]
        return products.are_right(*found)


@pytest.mark.gpu
def test_a_capture_between_calls(pool: RankPool) -> None:
    assert pool.run(capture_between, num_ranks=1) == [True]


def drop_in_capture(group: dist.ProcessGroup) -> bool:
    """A graph that goes while the caller captures ends no capture."""
    products, graph = Products(), torch.cuda.CUDAGraph()
    with products.patched():
        found = [products(rows) for rows in products.rows[:2]]
        with torch.cuda.graph(graph):
            doubled = products.rows[5] * 2
            products.calls.clear()
            gc.collect()
        graph.replay()
        assert products.graphs == []
        return products.are_right(*found) and torch.equal(doubled, products.rows[5] * 2)


@pytest.mark.gpu
def test_a_graph_that_goes_within_a_capture(pool: RankPool) -> None:
    assert pool.run(drop_in_capture, num_ranks=1) == [True]


def make_in_capture(group: dist.ProcessGroup) -> bool:
    """A graph is made on one stream while this thread captures another one."""
    products, graph, other = Products(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with products.patched():
        with torch.cuda.stream(other):
            found = [products(products.rows[0])]
            products._product(products.rows[0])  # whose memory the next call takes
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            doubled = products.rows[5] * 2
            with torch.cuda.stream(other):
                found.append(products(products.rows[1]))
        graph.replay()
        assert all(one._updates for one in products.graphs)
        return products.are_right(*found) and torch.equal(doubled, products.rows[5] * 2)


@pytest.mark.gpu
def test_a_graph_that_is_made_within_a_capture(pool: RankPool) -> None:
    assert pool.run(make_in_capture, num_ranks=1) == [True]


def on_two_streams(group: dist.ProcessGroup) -> bool:
    """Calls of one kind on several streams do not wait for one another; two have a graph each."""
    products, (busy, free, third) = Products(), (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    with products.patched():
        with torch.cuda.stream(busy):
            found = [products(rows) for rows in products.rows[:2]]
            torch.cuda._sleep(LONG)
            found.append(products(products.rows[2]))
            end = busy.record_event()
        for stream, row in ((free, 3), (third, 4), (free, 5)):
            with torch.cuda.stream(stream):
                found.append(products(products.rows[row]))
            stream.synchronize()
        assert not end.query()
        assert len(products.graphs) == MOST_STREAMS
        return products.are_right(*found)


@pytest.mark.gpu
def test_two_streams(pool: RankPool) -> None:
    assert pool.run(on_two_streams, num_ranks=1) == [True]


def cannot_be_made(group: dist.ProcessGroup) -> bool:
    """Where the GPU has no memory for a graph, launches go on one by one."""
    products = Products()
    fails = mock.patch.object(LaunchGraph, "_make", side_effect=torch.OutOfMemoryError)
    with products.patched(), fails as made:
        found = [products(rows) for rows in products.rows]
        assert (made.call_count, products.graphs) == (1, [])
        return products.are_right(*found)


@pytest.mark.gpu
def test_a_graph_that_cannot_be_made(pool: RankPool) -> None:
    assert pool.run(cannot_be_made, num_ranks=1) == [True]


def call_in_new_threads(group: dist.ProcessGroup) -> bool:
    """The first thing that a thread does with CUDA is a launch, one alone or several as a graph."""
    products = Products()
    found: list[torch.Tensor] = []
    with products.patched():
        for rows in products.rows:
            thread = threading.Thread(target=lambda rows=rows: found.append(products(rows)))
            thread.start()
            thread.join()
        return products.graphs != [] and products.are_right(*found)


@pytest.mark.gpu
def test_new_threads(pool: RankPool) -> None:
    assert pool.run(call_in_new_threads, num_ranks=1) == [True]
