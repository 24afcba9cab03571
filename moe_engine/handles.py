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
from .dispatch.low_latency import LowLatencyHandle
from .engines.base import Handle
from .engines.internode import InternodeHandle
from .engines.internode_low_latency import InternodeLowLatencyHandle
from .errors import DtypeError, ShapeError

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


def check_low_latency_handle(
    handle: Any, num_ranks: int, device: torch.device, num_nodes: int = 1
) -> AnyLowLatencyHandle:
    """`handle` must be what low_latency_dispatch of `num_ranks` ranks on `num_nodes` nodes
    returned, with sizes that fit one another."""
    kind = LowLatencyHandle if num_nodes == 1 else InternodeLowLatencyHandle
    if not isinstance(handle, tuple) or len(handle) != len(kind._fields):
        raise DtypeError(
            f"handle is a {type(handle).__name__}; it must be what low_latency_dispatch returned."
        )
    src_info, layout_range, max_tokens, hidden, num_experts, *rest = handle
    most = check_max_dispatch_tokens(max_tokens)
    num_experts = check_experts(num_experts, num_ranks)
    hidden = check_int("handle.hidden", hidden, 1, MAX_HIDDEN)
    num_local, int32, int64 = num_experts // num_ranks, torch.int32, torch.int64
    _check_part("handle.src_info", src_info, (num_local, num_ranks * most), int32, device)
    _check_part("handle.layout_range", layout_range, (num_local, num_ranks), int64, device)
    if kind is InternodeLowLatencyHandle:
        num_rows, near = num_ranks * most, num_ranks // num_nodes
        shapes = (
            *((num_rows, _length(rest[0], 1)), (num_rows,), (num_ranks, num_ranks)),
            *((SIGNATURE_WORDS.value,), (2, num_nodes), (_length(rest[5]), num_nodes)),
            (num_nodes, most, near),
        )
        for name, tensor, shape in zip(kind._fields[5:], rest, shapes, strict=True):
            _check_part(f"handle.{name}", tensor, shape, int32, device)
        return kind(src_info, layout_range, most, hidden, num_experts, *rest)
    returns, call = rest
    _check_part("handle.call", call, (1 + num_ranks,), int64, device)
    check_tensor("handle.returns", returns, (num_ranks, most, "1 + 3 * K"), [int32], device)
    check_contiguous("handle.returns", returns)
    if returns.shape[2] % 3 != 1 or returns.shape[2] < 4:
        raise ShapeError(
            f"handle.returns has shape {list(returns.shape)}; its last size must be 1 + 3 * K. "
            "Pass what low_latency_dispatch returned."
        )
    return LowLatencyHandle(src_info, layout_range, most, hidden, num_experts, returns, call)


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
