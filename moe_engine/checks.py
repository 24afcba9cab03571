"""Argument checks that run before any kernel does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import BackendError, DtypeError, ShapeError
from .lang import INTERPRETED

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


def check_runnable(device: torch.device) -> None:
    """Triton kernels need a GPU, or the interpreter for CPU tensors."""
    if device.type == "cpu" and not INTERPRETED:
        raise BackendError(
            "CPU tensors run through Triton's interpreter, which is off in this process. Set "
            "TRITON_INTERPRET=1 before triton is imported, start ranks with "
            "moe_engine.emulation, or use backend='collective'."
        )


def check_no_grad(**tensors: torch.Tensor) -> None:
    """There is no backward yet: losing a gradient in silence would be worse than an error."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
            raise BackendError(
                f"{name} requires grad, and this call has no backward. Wrap it in "
                "torch.no_grad() or torch.inference_mode(), or detach the input."
            )
