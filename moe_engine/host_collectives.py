"""torch's collectives of GPU tensors through the host's memory, for ranks that share a GPU.

NCCL refuses two ranks on one GPU, and gloo's own collectives of GPU tensors crash in torch 2.11
where DTensors are gathered. Those of CPU tensors are sound.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.utils._pytree import tree_leaves, tree_map_only

from .torch_privates import work_of_future

COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "broadcast_",
    "gather_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
)
"""The operators of torch.ops.c10d that collectives of torch.distributed, FSDP2, DTensors and
DistributedDataParallel call in the end. Each writes to its first argument alone."""

_library: Any = None  # held for good: collected, it would give torch its own operators back


def stage_collectives() -> None:
    """From now on, in this process, collectives of GPU tensors are those of the CPU backend.

    They have ended when the call returns, also with async_op. Sends and receives stay as they are.
    """
    global _library
    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns that its own are overridden
        for name in COLLECTIVES:
            _library.impl(name, _on_host(getattr(torch.ops.c10d, name).default), "CUDA")


def _on_host(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The same, of copies in the host's memory."""

    @torch.no_grad()
    def run(written: Any, *others: Any) -> Any:
        copies, *other_copies = tree_map_only(Tensor, Tensor.cpu, [written, *others])
        result = collective(copies, *other_copies)
        returns_written = isinstance(result, tuple)
        Work.unbox(result[-1] if returns_written else result).wait()
        tensors = tree_leaves(written)
        for tensor, copy in zip(tensors, tree_leaves(copies), strict=True):
            tensor.copy_(copy)
        # That of `result` has the copies, which DistributedDataParallel would take as gradients.
        future: Any = torch.futures.Future(devices=[one.device for one in tensors if one.is_cuda])
        future.set_result(tensors)
        work = Work.boxed(work_of_future(future))
        return (written, work) if returns_written else work

    return run
