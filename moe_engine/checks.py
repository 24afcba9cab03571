"""Argument checks that run before any kernel does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import BackendError, CapacityError, DtypeError, ShapeError, TooManyTokens
from .lang import INTERPRETED

MAX_LOW_LATENCY_TOKENS = 4096
"""Tokens of a rank in a low-latency call: there are flags for so many."""
PAYLOAD_DTYPES = (torch.bfloat16, torch.float32)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """`tensor` must have this shape (a string stands for any size), dtype and device."""
    if not isinstance(tensor, torch.Tensor):
        raise DtypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor.")
    wanted = "[" + ", ".join(str(size) for size in shape) + "]"
    fits = tensor.dim() == len(shape) and all(
        isinstance(size, str) or size == have
        for size, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ShapeError(f"{name} has shape {list(tensor.shape)}; it must be {wanted}.")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DtypeError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}; it must be {allowed}. "
            f"Convert it with {name}.to(...)."
        )
    if device is not None and tensor.device != device:
        raise ShapeError(
            f"{name} is on {tensor.device}; this Buffer lives on {device}. "
            f"Move it with {name}.to('{device}')."
        )


def check_rows(
    name: str, rows: torch.Tensor, num_rows: int | str = "T", device: torch.device | None = None
) -> None:
    """`rows` must be [num_rows, H] in a payload type, H positive, without a gradient to lose."""
    check_tensor(name, rows, [num_rows, "H"], PAYLOAD_DTYPES, device)
    if rows.shape[1] == 0:
        raise ShapeError(f"{name} has shape {list(rows.shape)}; H must be positive.")
    check_no_grad(**{name: rows})


def check_payload(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    num_tokens: int | str = "T",
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What dispatch sends: rows as `check_rows` wants them, or a pair of e4m3 rows [T, H] and their
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


def check_experts(num_experts: int, num_ranks: int) -> None:
    """Every rank holds equally many experts, and at least one."""
    if num_experts <= 0 or num_experts % num_ranks:
        raise ShapeError(
            f"num_experts is {num_experts}; it must be a positive multiple of the {num_ranks} "
            "ranks. Pad with experts that no token is routed to."
        )


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
    """Ids int64 [T, K] and weights float32 [T, K] of x [T, H], or neither."""
    if topk_idx is None and topk_weights is None:
        return
    if topk_idx is None or topk_weights is None:
        given, missing = ("topk_idx", "topk_weights")[:: 1 if topk_weights is None else -1]
        raise ShapeError(f"{given} came without {missing}; pass both or neither.")
    check_topk(topk_idx, x.shape[0], x.device)
    check_tensor("topk_weights", topk_weights, list(topk_idx.shape), [torch.float32], x.device)
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


def check_biases(
    bias: torch.Tensor | Sequence[torch.Tensor] | None, num_tokens: int, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """None, one or two tensors [T, H] of x's type and device, as a tuple."""
    biases = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
    if len(biases) > 2:
        raise ShapeError(f"bias has {len(biases)} tensors; at most 2 are taken.")
    for part in biases:
        check_tensor("bias", part, [num_tokens, x.shape[1]], [x.dtype], x.device)
        check_no_grad(bias=part)
    return biases


def check_expert_weights(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> None:
    """w_gate_up [L, 2I, H] and w_down [L, H, I] in the type and on the device of x [T, H]."""
    hidden = x.shape[1]
    check_tensor("w_gate_up", w_gate_up, ["L", "2I", hidden], [x.dtype], x.device)
    if w_gate_up.shape[1] % 2:
        raise ShapeError(
            f"w_gate_up has shape {list(w_gate_up.shape)}; its second size must be even: gate "
            "rows, then up rows."
        )
    down_shape = [w_gate_up.shape[0], hidden, w_gate_up.shape[1] // 2]
    check_tensor("w_down", w_down, down_shape, [x.dtype], x.device)
    check_no_grad(w_gate_up=w_gate_up, w_down=w_down)


def check_max_tokens(num_tokens: int, max_tokens: int | None) -> None:
    """The hint of a layer, if there is one, must not be below the tokens that came."""
    if max_tokens is not None and num_tokens > max_tokens:
        raise TooManyTokens(
            f"{num_tokens} tokens came with max_tokens = {max_tokens}; it must be the most that "
            "any rank brings to this call, the same on all ranks, or None."
        )


def check_max_dispatch_tokens(max_tokens: int, num_tokens: int = 0) -> None:
    """num_max_dispatch_tokens_per_rank must be 1 to 4096, and hold the tokens that came."""
    is_possible = 1 <= max_tokens <= MAX_LOW_LATENCY_TOKENS
    if not is_possible or num_tokens > max_tokens:
        raise (TooManyTokens if is_possible else CapacityError)(
            f"num_max_dispatch_tokens_per_rank is {max_tokens} and {num_tokens} tokens came; it "
            "must be the most that any rank brings, the same on all ranks, 1 to "
            f"{MAX_LOW_LATENCY_TOKENS}. Send larger batches with dispatch."
        )


def check_handle(handle: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """The six tensors of a dispatch, all int32 but the fifth, which is bool."""
    if len(handle) != len(names):
        raise ShapeError(
            f"handle has {len(handle)} items; it must be the {len(names)} tensors that dispatch "
            "returned."
        )
    for name, tensor in zip(names, handle, strict=True):
        dtype = torch.bool if name == "is_token_in_rank" else torch.int32
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise DtypeError(f"handle holds {found} as {name}; pass what dispatch returned.")


def check_at_least(minimum: int, **values: int) -> None:
    """Each named int must be `minimum` or more."""
    for name, value in values.items():
        if value < minimum:
            raise ShapeError(f"{name} is {value}; it must be {minimum} or more.")


def check_runnable(device: torch.device) -> None:
    """Triton kernels need a GPU, or the interpreter for CPU tensors."""
    if device.type == "cpu" and not INTERPRETED:
        raise BackendError(
            "CPU tensors run through Triton's interpreter, which is off in this process. Set "
            "TRITON_INTERPRET=1 before triton is imported, start ranks with "
            "moe_engine.emulation, or use backend='collective'."
        )


def check_shrink(enable_shrink: bool, num_ranks: int) -> None:
    """Ranks that may be masked are bits of a word."""
    if enable_shrink and num_ranks > 63:
        raise ShapeError(
            f"enable_shrink is set with {num_ranks} ranks; it serves up to 63. Leave it out."
        )


def check_fp8(device: torch.device) -> None:
    """GPUs cast to e4m3 from compute capability 8.9 on."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise BackendError(
            f"{torch.cuda.get_device_name(device)} has no e4m3; pass use_fp8=False, or use a GPU "
            "of compute capability 8.9 or later."
        )


def check_no_grad(**tensors: torch.Tensor | None) -> None:
    """Of a call without a backward: losing a gradient in silence would be worse than an error."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
            raise BackendError(
                f"{name} requires grad, and this call has no backward. Wrap it in "
                "torch.no_grad() or torch.inference_mode(), or detach the input."
            )


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it, contiguous and at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    if tensor.data_ptr() % 16:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(-1).view(tensor.shape)  # where a size is 1, strides may have been any


def memory_view(
    memory: torch.Tensor, dtype: torch.dtype, size: Sequence[int] | None = None, offset: int = 0
) -> torch.Tensor:
    """uint8 [B] `memory` from byte `offset` on, as `dtype`: `size`, or all of it in one row."""
    if offset < 0 or offset % dtype.itemsize:
        raise ShapeError(
            f"offset is {offset}; it must be a multiple of the {dtype.itemsize} bytes of {dtype}."
        )
    room = max(0, memory.numel() - offset) // dtype.itemsize
    size = torch.Size([room] if size is None else size)
    if size.numel() > room:
        raise CapacityError(
            f"size is {list(size)}, {size.numel()} items of {dtype}; from byte {offset} on there "
            f"is room for {room}."
        )
    return memory[offset : offset + size.numel() * dtype.itemsize].view(dtype).view(size)
