"""What the tests of ranks of other nodes share: blocks, and kernels that send."""

import time

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from moe_engine import symm
from moe_engine.device import lang, network
from moe_engine.device.context import PHASE_ROWS, ContextField
from moe_engine.errors import BackendError
from moe_engine.launch import launch
from moe_engine.symm import base

LONG_S = 30.0
"""What takes longer hangs."""


class Place:
    """A rank's block with a device context and its report, on nodes of `per_node` ranks."""

    def __init__(self, group, num_bytes, per_node=2, timeout_s=60.0, **settings):
        variables = {f"MOE_ENGINE_{name}": str(value) for name, value in settings.items()}
        with base.environment(variables | {"MOE_ENGINE_NODE_SIZE": str(per_node)}):
            self.block = symm.allocate(group, num_bytes)
        self.report = torch.zeros(64, dtype=torch.int64)
        fields = [0] * ContextField.PEERS + self.block.peer_addresses.tolist()
        fields[ContextField.TIMEOUT_NS] = int(timeout_s * 1e9)
        fields[ContextField.REPORT] = self.report.data_ptr()
        fields[ContextField.RANK] = group.rank()
        fields[ContextField.NUM_RANKS] = group.size()
        fields[ContextField.NETWORK] = self.block.network
        self.context = torch.tensor(fields)


@triton.jit
def send_once(context, to, source, num_bytes, flag, rank):
    network.send(to, source, num_bytes, flag, 1, rank, context)


@triton.jit
def fence_once(context, rank):
    network.fence(rank, context)


@triton.jit
def wait_once(context, flag, rank):
    one = tl.arange(0, 1)
    lang.wait(flag + one, one == 0, 1, one + rank, context, PHASE_ROWS)


@triton.jit
def send_words(context, to, peer, count):
    for index in range(0, count):
        network.send_word(to + index * 8, index + 1, peer, context)
    network.quiet(context)


def send_many_words(group, count, stall_s, timeout_s):
    """The words that came from the other node, the error of this rank, and the seconds."""
    place = Place(group, 8 * count, 1, timeout_s, NIC_STALL_S=stall_s)
    error, start = "", time.monotonic()
    to, peer = place.block.local.data_ptr(), 1 - group.rank()
    try:
        launch(send_words, (1,), place.context, to, peer, count)
    except BackendError as failure:
        error = str(failure)
    seconds = time.monotonic() - start
    dist.barrier(group)
    came = place.block.local.view(torch.int64).tolist()
    dist.barrier(group)  # as the peer's `free` delivers what it has sent
    place.block.free()
    return came, error, seconds
