"""Launches as one: an instantiated CUDA graph whose kernels take other arguments.

The driver takes 5 to 6 us of the host's time for a launch, 3 for a graph of up to twelve, and 1.7
more for each of its kernels whose arguments have changed (bench/NOTES.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_void_p

from .cuda_driver import KernelNode, PackedLaunch, check, in_context, libcuda

NON_BLOCKING = 1  # of CUstream_flags
CAPTURE_MODE_RELAXED = 2  # of CUstreamCaptureMode
CALLS = ("cuStreamGetCaptureInfo_v3", "cuGraphExecKernelNodeSetParams_v2")
"""What drivers before CUDA 12.3 do not offer."""


def is_offered() -> bool:
    """Whether the driver can make such a graph."""
    return all(hasattr(libcuda(), name) for name in CALLS)


class LaunchGraph:
    """Launches, each after the one before, as one. The first call makes the graph.

    The edges between kernels are those of the launches: a programmatic dependent launch may begin
    before the launch before it has ended. The graph itself begins after all that its stream holds,
    and does not run twice at once.
    """

    def __init__(self, launches: Sequence[PackedLaunch]):
        self.name = "+".join(one.name for one in launches)
        self._launches = launches
        self._graph, self._executable = c_void_p(), c_void_p()
        self._nodes: list[tuple[c_void_p, KernelNode]] = []

    def __call__(self, stream: int, changed: set[int]) -> None:
        """Launch all on a stream, given by its handle. changed: the numbers of the launches whose
        arguments were changed since they were told to the graph; it is emptied."""
        if not self._nodes:
            changed.clear()
            self._make()
        for number in changed:
            node, parameters = self._nodes[number]
            code = libcuda().cuGraphExecKernelNodeSetParams_v2(
                self._executable, node, byref(parameters)
            )
            check(code, f"change the arguments of {self._launches[number].name}")
        changed.clear()
        code = in_context(libcuda().cuGraphLaunch, self._executable, c_void_p(stream))
        check(code, f"launch {self.name}")

    def _make(self) -> None:
        """Capture the launches on a stream of their own and instantiate the graph, in whatever this
        thread captures itself."""
        self._free()  # where it was broken off before
        stream, nodes = c_void_p(), []
        code = in_context(libcuda().cuStreamCreate, byref(stream), NON_BLOCKING)
        check(code, "make a stream")
        try:
            with _relaxed():
                code = libcuda().cuStreamBeginCapture_v2(stream, CAPTURE_MODE_RELAXED)
                check(code, "begin a capture")
                try:
                    for one in self._launches:
                        one(stream.value or 0)
                        nodes.append((_last_node(stream), one.node()))
                finally:
                    code = libcuda().cuStreamEndCapture(stream, byref(self._graph))
                check(code, f"capture {self.name}")
                flags = ctypes.c_ulonglong(0)
                made = byref(self._executable), self._graph, flags
                check(libcuda().cuGraphInstantiateWithFlags(*made), f"instantiate {self.name}")
        finally:
            libcuda().cuStreamDestroy_v2(stream)
        self._nodes = nodes

    def _free(self) -> None:
        """Give its memory back; one that runs goes on to its end."""
        if self._executable:
            libcuda().cuGraphExecDestroy(self._executable)
        if self._graph:
            libcuda().cuGraphDestroy(self._graph)
        self._graph, self._executable = c_void_p(), c_void_p()

    def __del__(self) -> None:
        with suppress(Exception):  # the process ends
            self._free()


@contextmanager
def _relaxed() -> Iterator[None]:
    """Within the block this thread may call what a capture of its own would forbid."""
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    check(libcuda().cuThreadExchangeStreamCaptureMode(byref(mode)), "change the capture mode")
    try:
        yield
    finally:
        libcuda().cuThreadExchangeStreamCaptureMode(byref(mode))


def _last_node(stream: c_void_p) -> c_void_p:
    """The node of the last launch on a stream that is being captured."""
    status, number, graph, edges = ctypes.c_int(), ctypes.c_ulonglong(), c_void_p(), c_void_p()
    nodes, count = ctypes.POINTER(c_void_p)(), ctypes.c_size_t()
    found = byref(status), byref(number), byref(graph), byref(nodes), byref(edges), byref(count)
    check(libcuda().cuStreamGetCaptureInfo_v3(stream, *found), "tell what was captured")
    if count.value != 1:
        raise RuntimeError(f"a launch was captured as {count.value} nodes in place of one.")
    return c_void_p(nodes[0])
