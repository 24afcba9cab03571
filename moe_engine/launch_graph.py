"""Launches as one: an instantiated CUDA graph whose kernels take other arguments.

The driver takes about 5 us of the host's time for a launch, 3 for a graph of up to twelve, and 1.7
more for each of its kernels whose arguments have changed (bench/notes/host.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from cuda.bindings import driver

from .cuda_driver import LEGACY_STREAM, PackedLaunch, check, in_context, run
from .hardware import relaxed_capture


def _edge(is_programmatic: bool) -> driver.CUgraphEdgeData:
    """From which point of a kernel on the next one may begin: when it has ended, or when its
    programs have called `pdl_launch_dependents`."""
    made = driver.CUgraphEdgeData()
    if is_programmatic:
        made.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        made.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return made


class LaunchGraph:
    """Launches, each after the one before, as one. The first call makes the graph.

    Within it a programmatic dependent launch may begin before the launch before it has ended, and
    its `pdl_wait` waits for that end. The graph itself begins when all that its stream holds has
    ended, what is launched on the stream later begins when the graph has ended, and a graph does
    not run twice at once.
    """

    def __init__(self, launches: Sequence[PackedLaunch]):
        self.name = "+".join(one.name for one in launches)
        self._launches = launches
        self._graph: Any = None
        self._executable: Any = None
        self._updates: list[Callable[[], tuple[Any, ...]]] = []
        self._stream: int | None = None

    def __call__(self, stream: int, changed: set[int]) -> bool:
        """Launch all on a stream, given by its handle. changed: the numbers of the launches whose
        arguments were changed since they were told to the graph; it is emptied. False, and nothing
        is launched, where the GPU has no memory left for the graph."""
        try:
            if not self._updates:
                self._make()
                changed.clear()
            for number in changed:
                run("tell a graph of", self._launches[number].name, self._updates[number])
            changed.clear()
            if stream != self._stream:
                handle = driver.CUstream(stream or LEGACY_STREAM)  # made once, as it takes time
                self._launch = partial(driver.cuGraphLaunch, self._executable, handle)
                self._stream = stream
            run("launch", self.name, self._launch)
        except torch.OutOfMemoryError:
            return False
        return True

    def _make(self) -> None:
        """Add a node for each launch, and instantiate the graph. No stream is captured: another
        thread that waits for the device would break off a capture."""
        self._free()  # where it was broken off before
        self._graph = graph = check(driver.cuGraphCreate(0), "make a graph")
        nodes: list[tuple[Any, Any]] = []
        for one in self._launches:
            parameters = one.node()
            made = in_context(driver.cuGraphAddKernelNode, graph, None, 0, parameters)
            node = check(made, f"add {one.name} to a graph")
            if nodes:
                before, edge = nodes[-1][0], _edge(one.is_dependent)
                ordered = driver.cuGraphAddDependencies(graph, [before], [node], [edge], 1)
                check(ordered, f"order {one.name} in a graph")
            nodes.append((node, parameters))
        with relaxed_capture():
            made = in_context(driver.cuGraphInstantiate, graph, 0)
        self._executable = executable = check(made, f"instantiate {self.name}")
        self._updates = [
            partial(driver.cuGraphExecKernelNodeSetParams, executable, *one) for one in nodes
        ]

    def _free(self) -> None:
        """Give its memory back; one that runs goes on to its end. In relaxed mode, as it would
        otherwise break off a capture that is under way."""
        graph, executable = self._graph, self._executable
        self._graph = self._executable = self._stream = None
        if graph is None:
            return
        with relaxed_capture():
            if executable is not None:
                driver.cuGraphExecDestroy(executable)
            driver.cuGraphDestroy(graph)

    def __del__(self) -> None:
        with suppress(Exception):  # the process ends
            self._free()
