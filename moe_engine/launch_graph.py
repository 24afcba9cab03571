"""Launches as one: an instantiated CUDA graph whose kernels take other arguments.

The driver takes about 5 us of the host's time for a launch, 3 for a graph of up to twelve, and 1.7
more for each of its kernels whose arguments have changed (bench/NOTES.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_size_t, c_ubyte, c_void_p
from functools import partial

import torch

from .cuda_driver import KernelNode, PackedLaunch, check, in_context, libcuda
from .hardware import relaxed_capture


def is_offered() -> bool:
    """Whether the driver can make such a graph: from CUDA 12.3 on."""
    return hasattr(libcuda(), "cuGraphAddDependencies_v2")


class _Edge(ctypes.Structure):
    """CUgraphEdgeData: from which point of a kernel on the next one may begin."""

    _fields_ = (
        ("from_port", c_ubyte),
        ("to_port", c_ubyte),
        ("type", c_ubyte),
        ("reserved", c_ubyte * 5),
    )


AT_ITS_END, PROGRAMMATIC = _Edge(), _Edge(from_port=1, type=1)
"""When the kernel has ended; when its programs have called `pdl_launch_dependents`."""


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
        self._graph, self._executable, self._stream = c_void_p(), c_void_p(), c_void_p()
        self._launch: Callable[[], int] = lambda: 0
        self._nodes: list[tuple[c_void_p, KernelNode]] = []

    def __call__(self, stream: int, changed: set[int]) -> bool:
        """Launch all on a stream, given by its handle. changed: the numbers of the launches whose
        arguments were changed since they were told to the graph; it is emptied. False, and nothing
        is launched, where the GPU has no memory left for the graph."""
        try:
            if not self._nodes:
                self._make()
                changed.clear()
            for number in changed:
                node, parameters = self._nodes[number]
                update = self._executable, node, byref(parameters)
                code = in_context(libcuda().cuGraphExecKernelNodeSetParams_v2, *update)
                check(code, f"change the arguments of {self._launches[number].name}")
            changed.clear()
            self._stream.value = stream
            if code := in_context(self._launch):
                check(code, f"launch {self.name}")
        except torch.OutOfMemoryError:
            return False
        return True

    def _make(self) -> None:
        """Add a node for each launch, and instantiate the graph. No stream is captured: another
        thread that waits for the device would break off a capture."""
        self._free()  # where it was broken off before
        check(libcuda().cuGraphCreate(byref(self._graph), 0), "make a graph")
        nodes: list[tuple[c_void_p, KernelNode]] = []
        for one in self._launches:
            node, parameters = c_void_p(), one.node()
            added = byref(node), self._graph, None, c_size_t(0), byref(parameters)
            code = in_context(libcuda().cuGraphAddKernelNode_v2, *added)
            check(code, f"add {one.name} to a graph")
            if nodes:
                edge = PROGRAMMATIC if one.is_dependent else AT_ITS_END
                ends = byref(nodes[-1][0]), byref(node), byref(edge), c_size_t(1)
                code = libcuda().cuGraphAddDependencies_v2(self._graph, *ends)
                check(code, f"order {one.name} in a graph")
            nodes.append((node, parameters))
        made = byref(self._executable), self._graph, ctypes.c_ulonglong(0)
        with relaxed_capture():
            code = in_context(libcuda().cuGraphInstantiateWithFlags, *made)
        check(code, f"instantiate {self.name}")
        self._launch = partial(libcuda().cuGraphLaunch, self._executable, self._stream)
        self._nodes = nodes

    def _free(self) -> None:
        """Give its memory back; one that runs goes on to its end. In relaxed mode, as it would
        otherwise break off a capture that is under way."""
        graph, executable = self._graph, self._executable
        self._graph, self._executable = c_void_p(), c_void_p()
        if not graph:
            return
        with relaxed_capture():
            if executable:
                libcuda().cuGraphExecDestroy(executable)
            libcuda().cuGraphDestroy(graph)

    def __del__(self) -> None:
        with suppress(Exception):  # the process ends
            self._free()
