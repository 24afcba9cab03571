"""Checks of handles by the metadata of their tensors; they do not wait for the device."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .checks import (
    check_contiguous,
    check_experts,
    check_int,
    check_max_dispatch_tokens,
    check_tensor,
)
from .device.context import SIGNATURE_WORDS
from .engines.base import Handle
from .engines.internode import InternodeHandle
from .engines.internode_low_latency import InternodeLowLatencyHandle
from .errors import DtypeError, ShapeError
from .low_latency_handle import PART_BYTES, LowLatencyHandle, LowLatencySizes, num_items

SHAPES: dict[type[Handle | InternodeHandle], tuple[str, ...]] = {
    Handle: ("R R", "R T", "S", "N", "T R", "T R"),
    InternodeHandle: (
        *("T R", "nodes+near T", "R R", "nodes near M", "2 nodes"),
        *("S", "R", "N", "T nodes", "nodes M near"),
    ),
}
"""The shapes of the tensors of a handle, in order: their sizes are those of `_sizes`."""
AnyLowLatencyHandle = LowLatencyHandle | InternodeLowLatencyHandle
MAX_HIDDEN = 2**20
"""Most columns of a row in low-latency calls, whose programs each hold a whole row."""


def check_handle(
    handle: Any, num_ranks: int, device: torch.device, num_nodes: int = 1
) -> Handle | InternodeHandle:
    """`handle` must hold the tensors that a dispatch of `num_ranks` ranks on `num_nodes` nodes
    returned: contiguous, on this device, with sizes that fit one another. A plain tuple or a list
    of them serves as well."""
    kind = Handle if num_nodes == 1 else InternodeHandle
    if not isinstance(handle, tuple | list):
        raise DtypeError(
            f"handle is a {type(handle).__name__}; it must be the tuple of tensors that dispatch "
            "returned."
        )
    if len(handle) != len(SHAPES[kind]):
        raise ShapeError(
            f"handle has {len(handle)} items; it must be the {len(SHAPES[kind])} tensors that "
            "dispatch returned."
        )
    known = kind(*handle)
    near = num_ranks // num_nodes
    sizes: dict[str, int | str] = {
        "R": num_ranks,
        "T": _length(known.send_head),
        "N": _length(known.recv_src_idx),
        "S": SIGNATURE_WORDS.value,
        "M": _length(getattr(known, "rank_head", None), 1),
        "nodes": num_nodes,
        "near": near,
        "nodes+near": num_nodes + near,
        "2": 2,
    }
    for name, tensor, shape in zip(kind._fields, known, SHAPES[kind], strict=True):
        dtype = torch.bool if name == "is_token_in_rank" else torch.int32
        expected = tuple(sizes[size] for size in shape.split())
        _check_part(f"handle.{name}", tensor, expected, dtype, device)
    return known


def parts_of(handle: Any, kind: Any) -> tuple[tuple[Any, ...], Any]:
    """(the tensors of a handle whose sizes follow from the tokens that were sent, recv_src_idx,
    which has an entry for each row that came), as far as it is one of this kind."""
    is_handle = handle.__class__ is kind or isinstance(handle, tuple | list)
    if not is_handle or len(handle) != len(kind._fields):
        return (handle,), None
    at = _place_of_rows(kind)
    return (*handle[:at], *handle[at + 1 :]), handle[at]


@functools.cache
def _place_of_rows(kind: Any) -> int:
    return kind._fields.index("recv_src_idx")


def fields_of(handle: Any, num_nodes: int) -> tuple[Any, ...]:
    """What a low-latency handle is made of, as far as it is one of ranks on so many nodes."""
    if handle.__class__ is LowLatencyHandle and handle.sizes.__class__ is LowLatencySizes:
        return handle.memory, *handle.sizes
    return handle if num_nodes > 1 and isinstance(handle, tuple) else (handle,)


def as_low_latency_handle(handle: Any) -> AnyLowLatencyHandle:
    """A low-latency handle, which may be a plain tuple of what one of several nodes is made of."""
    return handle if isinstance(handle, LowLatencyHandle) else InternodeLowLatencyHandle(*handle)


def check_low_latency_handle(
    handle: Any, num_ranks: int, device: torch.device, num_nodes: int = 1
) -> AnyLowLatencyHandle:
    """`handle` must be what low_latency_dispatch of `num_ranks` ranks on `num_nodes` nodes
    returned, with sizes that fit one another."""
    if num_nodes == 1:
        is_handle = handle.__class__ is LowLatencyHandle
    else:  # a plain tuple of the same serves as well
        num_fields = len(InternodeLowLatencyHandle._fields)
        is_handle = isinstance(handle, tuple) and len(handle) == num_fields
    if not is_handle:
        raise DtypeError(
            f"handle is a {type(handle).__name__}; it must be what low_latency_dispatch returned."
        )
    if num_nodes > 1:
        return _check_internode_handle(handle, num_ranks, device, num_nodes)
    memory, sizes = handle.memory, handle.sizes
    if sizes.__class__ is not LowLatencySizes:
        raise DtypeError(
            f"handle.sizes is a {type(sizes).__name__}; it must be a LowLatencySizes, as that of "
            "what low_latency_dispatch returned."
        )
    of_ranks = check_int("handle.sizes.num_ranks", sizes.num_ranks, 1)
    if of_ranks != num_ranks:
        raise ShapeError(
            f"handle.sizes.num_ranks is {of_ranks}, and this Buffer has {num_ranks} ranks. Pass "
            "what low_latency_dispatch of the same Buffer returned."
        )
    num_topk = check_int("handle.sizes.num_topk", sizes.num_topk, 1)
    sizes = LowLatencySizes(*_checked_sizes(*sizes[:3], num_ranks), num_ranks, num_topk)
    _check_part("handle.memory", memory, (num_items(sizes),), torch.int32, device)
    if memory.data_ptr() % PART_BYTES:
        raise ShapeError(
            f"handle.memory begins at {memory.data_ptr():#x}, which must be a multiple of "
            f"{PART_BYTES}. Pass what low_latency_dispatch returned."
        )
    return LowLatencyHandle(memory, sizes)


def _check_internode_handle(
    handle: Any, num_ranks: int, device: torch.device, num_nodes: int
) -> InternodeLowLatencyHandle:
    src_info, layout_range, most, hidden, num_experts, *rest = handle
    names = InternodeLowLatencyHandle._fields[5:]
    most, hidden, num_experts = _checked_sizes(most, hidden, num_experts, num_ranks)
    num_local, num_rows, near = num_experts // num_ranks, num_ranks * most, num_ranks // num_nodes
    _check_part("handle.src_info", src_info, (num_local, num_rows), torch.int32, device)
    _check_part("handle.layout_range", layout_range, (num_local, num_ranks), torch.int64, device)
    shapes = (
        *((num_rows, _length(rest[0], 1)), (num_rows,), (num_ranks, num_ranks)),
        *((SIGNATURE_WORDS.value,), (2, num_nodes), (_length(rest[5]), num_nodes)),
        (num_nodes, most, near),
    )
    for name, tensor, shape in zip(names, rest, shapes, strict=True):
        _check_part(f"handle.{name}", tensor, shape, torch.int32, device)
    return InternodeLowLatencyHandle(src_info, layout_range, most, hidden, num_experts, *rest)


def _checked_sizes(
    max_tokens: Any, hidden: Any, num_experts: Any, num_ranks: int
) -> tuple[int, int, int]:
    """The sizes that DeepEP's handles have as well."""
    return (
        check_max_dispatch_tokens(max_tokens),
        check_int("handle.hidden", hidden, 1, MAX_HIDDEN),
        check_experts(num_experts, num_ranks),
    )


def _length(tensor: Any, dim: int = 0) -> int | str:
    """A size of a tensor, and "any" for anything else, which is refused later."""
    try:
        return tensor.shape[dim]
    except (AttributeError, IndexError, RuntimeError):
        return "any"


def _check_part(
    name: str,
    tensor: Any,
    shape: tuple[int | str, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """`check_tensor` and `check_contiguous`, in half of their time for a tensor that passes."""
    try:
        is_right = (
            type(tensor) is torch.Tensor
            and tensor.dtype is dtype
            and tensor.device == device
            and tensor.is_contiguous()
            and tensor.shape == shape
            and tensor.data_ptr()
        )
    except RuntimeError:  # a sparse or nested tensor
        is_right = False
    if not is_right:
        check_tensor(name, tensor, shape, [dtype], device)
        check_contiguous(name, tensor)
