"""How the caller stores the first weights of experts: gate and up rows one after the other, in
turn, or in two tensors. Kernels read all of them where they lie, by their strides."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import PAYLOAD_DTYPES, check_tensor, shown
from .errors import DtypeError, ShapeError
from .grouped_gemm.operands import canonical, check_row_bytes

LAYOUTS = "concatenated", "interleaved"

Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""w_gate_up [L, 2I, H], or (w_gate, w_up), [L, I, H] each."""


class GateUp(NamedTuple):
    """One tensor [L, 2I, H] of a layout, or gate and up [L, I, H]; `name` is that of errors.

    For an expert of I = 2 whose gate has the rows g0, g1 and whose up has u0, u1:

        concatenated    g0, g1, u0, u1    transformers, Megatron
        interleaved     g0, u0, g1, u1    torchtitan's w13 [L, I, 2, H]
        two tensors     g0, g1 and u0, u1    torchtitan's w1 and w3, DeepSpeed
    """

    tensors: tuple[torch.Tensor, ...]
    layout: str
    name: str = "w_gate_up"

    @classmethod
    def of(cls, w: Operand, layout: str, name: str = "w_gate_up") -> GateUp:
        """Raise for what is no layout; tensors are checked by `by_parts`, and later."""
        check_layout(layout)
        if not isinstance(w, tuple | list):
            return cls((w,), layout, name)
        if len(w) != 2:
            raise ShapeError(f"{name} has {len(w)} tensors; it must be one, or (w_gate, w_up).")
        if layout != "concatenated":
            raise ShapeError(f'layout is "{layout}" and {name} has two tensors; leave layout out.')
        return cls(tuple(w), layout, name)

    @property
    def requires_grad(self) -> bool:
        """Whether any of the tensors does."""
        return any(getattr(one, "requires_grad", False) for one in self.tensors)

    @property
    def is_one(self) -> bool:
        """Whether kernels take the tensor as it is."""
        return len(self.tensors) == 1 and self.layout == "concatenated"

    def empty_like(self) -> GateUp:
        """New memory of this layout."""
        if len(self.tensors) == 1:
            return GateUp((torch.empty_like(self.tensors[0]),), self.layout, self.name)
        gate = self.tensors[0]
        return self._replace(tensors=gate.new_empty(2, *gate.shape).unbind())

    def in_one_memory(self) -> GateUp:
        """These, or copies where what kept gate and up for a backward has moved them apart, as
        saved-tensor hooks do."""
        if len(self.tensors) == 1:
            return self
        if len({one.untyped_storage().data_ptr() for one in self.tensors}) == 1:
            return self
        return self._replace(tensors=torch.stack(self.tensors).unbind())

    def by_parts(self) -> torch.Tensor:
        """What kernels take, a view: [L, 2I, H] where gate and up are concatenated, else [L, 2, I,
        H] of other strides."""
        if len(self.tensors) == 2:
            return _spanned(*self.tensors, self.name)
        [w] = self.tensors
        if self.layout == "concatenated":
            return w
        check_tensor(self.name, w, ("L", "2I", "H"), PAYLOAD_DTYPES)
        if w.shape[1] % 2 or not w.is_contiguous():
            raise ShapeError(
                f"{self.name} has shape {list(w.shape)} and strides {tuple(w.stride())}; "
                "interleaved weights are contiguous [L, 2I, H], rows of gate and up in turn."
            )
        # Each call asks, prepared ones too: einops' rearrange would take twice as long.
        return canonical(w.detach()).unflatten(1, (-1, 2)).transpose(1, 2)


def check_layout(layout: object) -> None:
    """`layout` is one of `LAYOUTS`."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ShapeError(f"layout is {shown(layout)}; it must be one of {LAYOUTS}.")


def _spanned(gate: torch.Tensor, up: torch.Tensor, name: str) -> torch.Tensor:
    """[L, 2, I, H]: two tensors of the same memory as one."""
    for number, one in enumerate((gate, up)):
        check_tensor(f"{name}[{number}]", one, ("L", "I", "H"), PAYLOAD_DTYPES)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise (ShapeError if gate.dtype == up.dtype else DtypeError)(
            f"{name} has {list(gate.shape)} of {gate.dtype} and {list(up.shape)} of {up.dtype}; "
            "gate and up must be alike."
        )
    check_row_bytes(name, gate)
    num_experts, columns, hidden = gate.shape
    apart = (up.data_ptr() - gate.data_ptr()) // gate.itemsize
    of_expert, of_row, of_column = gate.stride()
    if num_experts == 1:
        of_expert = 2 * max(apart, columns * of_row)
    # From the outermost on, each step passes all that lies within.
    strides = sorted(((of_expert, num_experts), (apart, 2), (of_row, columns)), reverse=True)
    inner = hidden
    is_apart = of_column == 1 and apart > 0 and gate.data_ptr() % 16 == 0
    for stride, size in reversed(strides):
        is_apart &= stride >= inner and stride * gate.itemsize % 16 == 0
        inner = stride * (size - 1) + inner
    is_one = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    is_alike = gate.stride()[num_experts == 1 :] == up.stride()[num_experts == 1 :]
    if not (is_apart and is_one and is_alike):
        raise ShapeError(
            f"{name} has two tensors that do not lie in one memory, gate before up, with the same "
            "strides. Allocate them together, once: w_gate, w_up = torch.empty(2, L, I, H, ...)."
        )
    shape, steps = (num_experts, 2, columns, hidden), (of_expert, apart, of_row, 1)
    return gate.detach().as_strided(shape, steps)
