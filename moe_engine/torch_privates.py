"""All private names of torch that this package uses, as torch 2.11 to 2.14 have them.

torch may change them in any release. Each stands here because torch offers nothing public that
does the same, or nothing as fast; the sentence below it says which. Names that begin with a capital
letter are torch's classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._dynamo import eval_frame
from torch.utils import _python_dispatch

_guards = torch._C._dynamo.guards

FrameAction, FrameExecStrategy = eval_frame._FrameAction, eval_frame._FrameExecStrategy
set_code_exec_strategy = eval_frame.set_code_exec_strategy
"""What torch.compile does with the frame of a function, told once for its code: a decorator of
torch.compiler would cost each call."""
has_modes = torch._C._len_torch_dispatch_stack
"""How many modes see each operator of torch that is called here, such as that of selective
checkpointing."""
without_modes = _python_dispatch._disable_current_modes
"""Within this context no mode sees the operators that are called. So what the first call of a kind
does once is not missed by selective checkpointing, which compares the operators of a recomputation
with those of the forward."""
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
"""Returns the GPU that is current in this thread. `torch.cuda.current_device` also sees to it that
torch has begun to use GPUs."""
raw_stream: Callable[[int], int] = (
    torch._C._cuda_getCurrentRawStream if torch.backends.cuda.is_built() else lambda index: 0
)
"""Returns the handle of the stream that is current on the GPU of this number.
`torch.cuda.current_stream` makes an object, which takes 3 us."""
new_on_cpu = getattr(_guards, "_empty_strided_cpu", None)
new_on_gpu = getattr(_guards, "_empty_strided_cuda", None)
"""Allocate a tensor of (shape, strides, dtype) in half of the time of torch.empty; None where this
torch does not have them."""
new_view = getattr(_guards, "_reinterpret_tensor", torch.as_strided)
"""Makes a view of (a tensor, shape, strides, the first item)."""
TensorGuards: Any = getattr(_guards, "TensorGuards", None)
"""What torch asks before it runs compiled code: whether as many tensors are like those that it was
made of. None where this torch does not have it."""
is_deterministic = torch._C._get_deterministic_algorithms
"""Whether torch was told to use deterministic algorithms, which fill new memory."""
current_graph_task = torch._C._current_graph_task_id
"""Returns the number of the backward that this thread is in; -1 outside of backwards."""
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward that this thread is in was called with retain_graph=True."""
register_group: Callable[[Any, Any], None] = _distributed_c10d._register_process_group
unregister_group: Callable[[Any], None] = _distributed_c10d._unregister_process_group
"""Let torch find a group by its name, and no longer."""
work_of_future: Callable[[Any], Any] = getattr(_distributed_c10d, "_create_work_from_future")  # noqa: B009
"""The work of a collective that ends with a future."""


def returns_of(operator: Any) -> Any:
    """What the schema of one of torch's operators says of its results."""
    return operator._schema.returns


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that is equal for tensors that lie in the same allocation."""
    return tensor.untyped_storage()._cdata


def storage_at(address: int, num_bytes: int, device: torch.device) -> Any:
    """A storage of memory that torch does not own."""
    return torch._C._construct_storage_from_data_pointer(address, device, num_bytes)


def store_of(group: dist.ProcessGroup) -> Any:
    """The store at which the ranks of a group met. KeyError where torch knows none."""
    return dist.distributed_c10d._get_process_group_store(group)


def set_group_count(count: int) -> None:
    """Let the next group that this process makes have this number."""
    dist.distributed_c10d._world.group_count = count


def symmetric_memory() -> Any:
    """torch's class of symmetric memory. It is imported here, as it needs a CUDA build of torch."""
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem._SymmetricMemory


def sleep(cycles: int) -> None:
    """Keep the current stream of the GPU busy."""
    torch.cuda._sleep(cycles)
