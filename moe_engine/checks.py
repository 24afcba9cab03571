"""Checks of arguments, which run before any kernel does. Each error names the argument, what came
and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import torch

from .errors import BackendError, CapacityError, DtypeError, ShapeError, TooManyTokens
from .hardware import gpu, runs_on_cpu

MAX_LOW_LATENCY_TOKENS = 4096
"""Most tokens of a rank in a low-latency call, each of which has a flag."""
MAX_EXPERTS = 65_536
"""Most experts of all ranks: each program of the layout counts them all."""
MAX_INT = 2**63 - 1
"""The largest number that a kernel takes."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
BIAS_PAIR = "(b_gate_up, b_down), each a tensor or None"
PAYLOAD_DTYPES = (torch.bfloat16, torch.float32)

# --- Tensors -------------------------------------------------------------------------------------


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str] | None,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """`tensor` must be dense, have memory of its own that holds its values, and have this shape
    (None for any shape; a string in it stands for any size), dtype and device."""
    if type(tensor) not in PLAIN:
        _check_kind(name, tensor)
    try:
        found, address = tensor.shape, tensor.data_ptr()
    except RuntimeError:
        raise DtypeError(
            f"{name} is a sparse or nested tensor, or stands for others, as in vmap; it must be a "
            "dense one, with memory of its own. Convert it with to_dense() or to_padded_tensor()."
        ) from None
    if shape is not None:
        fits = len(found) == len(shape)
        for size, wanted in zip(found, shape, strict=False):
            if size != wanted and type(wanted) is not str:
                fits = False
        if not fits:
            sizes = ", ".join(map(str, shape))
            raise ShapeError(f"{name} has shape {list(found)}; it must be [{sizes}].")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}; it must be {allowed}. "
            f"Convert it with {name}.to(...)."
        )
    if tensor.is_neg():  # a conjugate bit is one of complex dtypes, which no call takes
        raise DtypeError(
            f"{name} has torch's negative bit, as the imaginary part of a conjugate has: its "
            f"memory holds the negated values. Pass {name}.resolve_neg()."
        )
    if device is not None and tensor.device != device:
        raise ShapeError(
            f"{name} is on {tensor.device}; this Buffer lives on {device}. "
            f"Move it with {name}.to('{device}')."
        )
    if address == 0 and tensor.numel():
        raise ShapeError(
            f"{name} is on {tensor.device} and has no memory: it is a meta tensor, or its storage "
            "was freed, as FSDP does with parameters. Pass one with memory."
        )


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """The tensor's elements must lie one after the other."""
    if not tensor.is_contiguous():
        raise ShapeError(
            f"{name} has strides {tuple(tensor.stride())}; it must be contiguous. "
            f"Pass {name}.contiguous()."
        )


def check_no_grad(**tensors: torch.Tensor | None) -> None:
    """Arguments of a call without a backward must not require grad: their gradients would be lost
    in silence."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if getattr(tensor, "requires_grad", False):
            raise BackendError(
                f"{name} requires grad, and this call has no backward. Wrap it in "
                "torch.no_grad() or torch.inference_mode(), or detach the input."
            )


def _check_kind(name: str, tensor: Any) -> None:
    """Tensors of a subclass are taken, unless they only stand for others, as a DTensor does."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise DtypeError(
            f"{name} is a {type(tensor).__name__}, which has no memory of its own; pass the plain "
            "tensor, for a DTensor its to_local()."
        )


# --- Numbers, flags, types -----------------------------------------------------------------------


def check_int(name: str, value: int, minimum: int, maximum: int = MAX_INT) -> int:
    """`value`, a Python or numpy integer from `minimum` to `maximum`, as an int."""
    if type(value) is not int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise DtypeError(
                f"{name} is {shown(value)}; it must be an int. Pass int({name}) where that is "
                "what you mean."
            )
        value = int(value)
    if not minimum <= value <= maximum:
        allowed = f"{minimum} or more" if value < minimum else f"{minimum} to {maximum}"
        raise ShapeError(f"{name} is {shown(value)}; it must be {allowed}.")
    return value


def check_at_least(minimum: int, **values: int) -> None:
    """Each named int must be `minimum` or more."""
    for name, value in values.items():
        check_int(name, value, minimum)


def check_flag(name: str, value: bool) -> None:
    """`value` must be True or False, or 1 or 0."""
    if value is not True and value is not False:
        if not isinstance(value, Integral) or value not in (0, 1):
            raise DtypeError(f"{name} is {shown(value)}; it must be True or False.")


def check_pair(name: str, value: object, parts: str) -> None:
    """`value` must have two parts, which are described."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ShapeError(f"{name} is {shown(value)}; it must be a pair {parts}.")


def check_dtype(name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    """`dtype` must be one of those."""
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        names = " or ".join(map(str, allowed))
        raise DtypeError(f"{name} is {shown(dtype)}; it must be {names}.")


def shown(value: object) -> str:
    """A short text for a value of any kind."""
    if isinstance(value, int) and value.bit_length() > 64:  # which str() may refuse
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, int | float | str | torch.dtype) and len(text := repr(value)) <= 80:
        return text
    return f"a {type(value).__name__}"


# --- Tokens and their routing --------------------------------------------------------------------


def check_rows(
    name: str, rows: torch.Tensor, num_rows: int | str = "T", device: torch.device | None = None
) -> None:
    """`rows` must be [num_rows, H], bf16 or fp32, with H positive, and not require grad."""
    check_tensor(name, rows, [num_rows, "H"], PAYLOAD_DTYPES, device)
    if rows.shape[1] == 0:
        raise ShapeError(f"{name} has shape {list(rows.shape)}; H must be positive.")
    check_no_grad(**{name: rows})


def pair_of(x: Any) -> tuple[Any, Any, bool]:
    """(rows, their scales, whether they came as a pair)."""
    return (*x, True) if isinstance(x, tuple) and len(x) == 2 else (x, None, False)


def have_rows(num_rows: int, *tensors: torch.Tensor | None) -> bool:
    """Whether tensors have so many rows."""
    return all(one is None or one.shape[0] == num_rows for one in tensors)


def check_payload(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    num_tokens: int | str = "T",
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What dispatch sends: rows that pass `check_rows`, or a pair of e4m3 rows [T, H] and their
    scales [T, S] in float32 or packed int32, of any strides. Returns (rows, scales or None)."""
    if isinstance(x, torch.Tensor):
        check_rows("x", x, num_tokens, device)
        return x, None
    if not isinstance(x, tuple) or len(x) != 2:
        raise DtypeError(
            f"x is a {type(x).__name__}; it must be a tensor, or a tuple of e4m3 rows and scales."
        )
    rows, scales = x
    check_tensor("x[0]", rows, [num_tokens, "H"], [torch.float8_e4m3fn], device)
    dtypes = [torch.float32, torch.int32]
    check_tensor("x[1]", scales, [rows.shape[0], "S"], dtypes, rows.device)
    if 0 in (rows.shape[1], scales.shape[1]):
        raise ShapeError(
            f"x has rows {list(rows.shape)} and scales {list(scales.shape)}; H and S "
            "must be positive."
        )
    return rows, scales


def check_topk(
    topk_idx: torch.Tensor, num_tokens: int | str = "T", device: torch.device | None = None
) -> None:
    """`topk_idx` must be int64 [num_tokens, K], K positive."""
    check_tensor("topk_idx", topk_idx, [num_tokens, "K"], [torch.int64], device)
    if topk_idx.shape[1] == 0:
        raise ShapeError("topk_idx has shape [T, 0]; K must be positive.")


def check_routing(
    x: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
) -> None:
    """Ids int64 [T, K] and weights float32 [T, K] of x [T, H]."""
    if topk_idx is None or topk_weights is None:
        missing = "topk_idx" if topk_idx is None else "topk_weights"
        raise ShapeError(
            f"{missing} is None; pass ids and weights, both (to dispatch: or neither)."
        )
    check_topk(topk_idx, x.shape[0], x.device)
    check_tensor("topk_weights", topk_weights, topk_idx.shape, [torch.float32], x.device)
    check_no_grad(topk_weights=topk_weights)


def check_layout(
    x: torch.Tensor,
    num_tokens_per_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    num_ranks: int,
) -> None:
    """int32 [R], int32 [E] and bool [T, R], as `Buffer.get_dispatch_layout` gives for x [T, H]."""
    check, device = check_tensor, x.device
    check("num_tokens_per_rank", num_tokens_per_rank, [num_ranks], [torch.int32], device)
    check("num_tokens_per_expert", num_tokens_per_expert, ["E"], [torch.int32], device)
    in_rank_shape = [x.shape[0], num_ranks]
    check("is_token_in_rank", is_token_in_rank, in_rank_shape, [torch.bool], device)
    check_experts(num_tokens_per_expert.numel(), num_ranks)


def check_tokens_per_node(
    num_tokens_per_rdma_rank: torch.Tensor | None, num_nodes: int, like: torch.Tensor | None
) -> None:
    """None or int32 [N], as `Buffer.get_dispatch_layout` gives for N nodes, where `like` is."""
    if num_tokens_per_rdma_rank is not None:
        device = None if like is None else like.device
        name = "num_tokens_per_rdma_rank"
        check_tensor(name, num_tokens_per_rdma_rank, [num_nodes], [torch.int32], device)


def check_biases(
    bias: torch.Tensor | Sequence[torch.Tensor] | None, num_tokens: int, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """None, one or two tensors [T, H] of x's type and device, as a tuple."""
    if bias is None:
        return ()
    biases = (bias,) if isinstance(bias, torch.Tensor) else bias
    if not isinstance(biases, tuple | list):
        raise DtypeError(
            f"bias is a {type(bias).__name__}; it must be a tensor, a tuple of one or two, or None."
        )
    if len(biases) not in (1, 2):
        raise ShapeError(f"bias has {len(biases)} tensors; at most 2 are taken, or None for none.")
    for part in biases:
        check_tensor("bias", part, [num_tokens, x.shape[1]], [x.dtype], x.device)
        check_no_grad(bias=part)
    return tuple(biases)


# --- Experts -------------------------------------------------------------------------------------


def check_experts(num_experts: int, num_ranks: int) -> int:
    """Every rank holds equally many experts, and at least one. Returns num_experts as an int."""
    num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    if num_experts % num_ranks:
        raise ShapeError(
            f"num_experts is {num_experts}; it must be a positive multiple of the {num_ranks} "
            "ranks. Pad with experts that no token is routed to."
        )
    return num_experts


def has_parts(w: Any) -> bool:
    """Whether weights, or their gradients, have gate and up apart: [L, 2, I, K] and not
    [L, 2I, K]."""
    return isinstance(w, torch.Tensor) and w.dim() == 4


def check_expert_weights(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    parts: int,
    dtype: torch.dtype,
) -> None:
    """w_gate_up [L, 2I, H], or gate and up apart, [L, 2, I, H], and w_down [L, H, I] in this type
    and on the device of x [T, H]; with one part w_gate_up [L, I, H]."""
    hidden = x.shape[1]
    shape: list[int | str] = ["L", "2I" if parts == 2 else "I", hidden]
    if has_parts(w_gate_up) and parts == 2:
        shape = ["L", 2, "I", hidden]
    check_tensor("w_gate_up", w_gate_up, shape, [dtype], x.device)
    num_columns = w_gate_up.shape[1:-1].numel()
    if num_columns % parts:
        raise ShapeError(
            f"w_gate_up has shape {list(w_gate_up.shape)}; its second size must be even: gate "
            "rows, then up rows."
        )
    down_shape = [w_gate_up.shape[0], hidden, num_columns // parts]
    check_tensor("w_down", w_down, down_shape, [dtype], x.device)
    check_no_grad(w_gate_up=w_gate_up, w_down=w_down)


def check_expert_biases(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
) -> None:
    """b_gate_up [L, 2I] and b_down [L, H], or None, in the type and on the device of x; it and the
    weights have been checked."""
    of_gate_up = [len(w_gate_up), w_gate_up.shape[1:-1].numel()]
    both = ("b_gate_up", b_gate_up, of_gate_up), ("b_down", b_down, list(w_down.shape[:2]))
    for name, bias, shape in both:
        if bias is not None:
            check_tensor(name, bias, shape, [x.dtype], x.device)
            check_contiguous(name, bias)
            check_no_grad(**{name: bias})


def check_apart(out: torch.Tensor, called: str = "out", /, **operands: torch.Tensor) -> None:
    """Raise where `out` shares memory with an operand, which is read while `out` is written."""
    begin, end = _memory(out)
    for name, operand in operands.items():
        other_begin, other_end = _memory(operand)
        if begin < other_end and other_begin < end:
            raise ShapeError(
                f"{called} overlaps {name} in memory; it must not, as {name} is used while "
                f"{called} is written. Pass another tensor."
            )


def check_out_apart(out: object, **operands: object) -> None:
    """`check_apart` at each call, as where tensors lie is no part of a prepared call's kind. What
    is no tensor with memory is refused later."""
    strided = {
        name: one
        for name, one in (("out", out), *operands.items())
        if isinstance(one, torch.Tensor) and one.layout == torch.strided
    }
    if "out" in strided:
        with suppress(RuntimeError):
            check_apart(strided.pop("out"), **strided)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which its elements lie."""
    begin = tensor.data_ptr()
    return begin, begin + extent(tensor)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


# --- The largest number of tokens ----------------------------------------------------------------


def check_max_tokens(num_tokens: int, max_tokens: int | None) -> int | None:
    """max_tokens, unless None, must not be below the number of tokens that came. Returns it."""
    if max_tokens is None:
        return None
    max_tokens = check_int("max_tokens", max_tokens, 0)
    if num_tokens > max_tokens:
        raise TooManyTokens(
            f"{num_tokens} tokens came with max_tokens = {max_tokens}; it must be the most that "
            "any rank brings to this call, the same on all ranks, or None. Other ranks may be in "
            "the call, so make a new Buffer."
        )
    return max_tokens


def check_max_dispatch_tokens(max_tokens: int, num_tokens: int = 0) -> int:
    """num_max_dispatch_tokens_per_rank must be 1 to 4096, and no less than the tokens that came.
    Returns it as an int."""
    max_tokens = check_int("num_max_dispatch_tokens_per_rank", max_tokens, -MAX_INT)
    is_possible = 1 <= max_tokens <= MAX_LOW_LATENCY_TOKENS
    if not is_possible or num_tokens > max_tokens:
        raise (TooManyTokens if is_possible else CapacityError)(
            f"num_max_dispatch_tokens_per_rank is {max_tokens} and {num_tokens} tokens came; it "
            "must be the most that any rank brings, the same on all ranks, 1 to "
            f"{MAX_LOW_LATENCY_TOKENS}. Send larger batches with dispatch."
            + is_possible
            * " Other ranks may be in the call, so make a new Buffer."
        )
    return max_tokens


# --- What ranks and devices support --------------------------------------------------------------


def check_shrink(enable_shrink: bool, num_ranks: int) -> None:
    """Masked ranks are the bits of an int64, so enable_shrink takes at most 63 ranks."""
    if enable_shrink and num_ranks > 63:
        raise ShapeError(
            f"enable_shrink is set with {num_ranks} ranks; it serves up to 63. Leave it out."
        )


def check_runnable(device: torch.device) -> None:
    """Triton kernels need a GPU, or the interpreter for CPU tensors."""
    if device.type == "cpu" and not runs_on_cpu():
        raise BackendError(
            "CPU tensors run through Triton's interpreter, which is off in this process. Set "
            "TRITON_INTERPRET=1 before triton is imported, start ranks with "
            "moe_engine.emulation, or use backend='collective'."
        )


def check_fp8(device: torch.device) -> None:
    """GPUs cast to e4m3 from compute capability 8.9 on."""
    chip = gpu(device)
    if chip.capability is not None and chip.capability < (8, 9):
        raise BackendError(
            f"{chip.name} has no e4m3; pass use_fp8=False, or use a GPU "
            "of compute capability 8.9 or later."
        )


# --- Packed tensors and views of memory ----------------------------------------------------------


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it, contiguous and at a multiple of 16 bytes, without a negative bit.
    An empty tensor lies nowhere, so it must begin its storage: a view of another dtype asks."""
    tensor = tensor.resolve_neg().contiguous()
    if tensor.data_ptr() % 16 or (tensor.storage_offset() and not tensor.numel()):
        return tensor.clone(memory_format=torch.contiguous_format)
    if 1 in (shape := tensor.shape) or 0 in shape:  # a dimension of size 1 or 0 may have any stride
        usual = tensor.view(-1).view(shape)
        return tensor if tensor.stride() == usual.stride() else usual
    return tensor


def memory_view(
    memory: torch.Tensor, dtype: torch.dtype, size: Sequence[int] | None = None, offset: int = 0
) -> torch.Tensor:
    """uint8 [B] `memory` from byte `offset` on, as `dtype`: `size`, or all of it in one row."""
    if not isinstance(dtype, torch.dtype):
        raise DtypeError(f"dtype is {shown(dtype)}; it must be a torch.dtype.")
    itemsize, offset = dtype.itemsize, check_int("offset", offset, 0)
    if offset % itemsize:
        raise ShapeError(
            f"offset is {offset}; it must be a multiple of the {itemsize} bytes of {dtype}."
        )
    room = max(0, memory.numel() - offset) // itemsize
    if size is None:
        size = [room]
    elif not isinstance(size, tuple | list):
        raise DtypeError(f"size is a {type(size).__name__}; it must be a tuple of ints, or None.")
    sizes = [check_int("size", one, 0) for one in size]
    num_items = math.prod(sizes)
    if num_items > room:
        raise CapacityError(
            f"size is {sizes}, {num_items} items of {dtype}; from byte {offset} on there is room "
            f"for {room}."
        )
    return memory[offset : offset + num_items * itemsize].view(dtype).view(sizes)
