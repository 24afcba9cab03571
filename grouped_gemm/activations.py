"""The activations that a GEMM applies to its sums before it stores them."""

from __future__ import annotations

import functools
from math import isfinite
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..checks import shown
from ..errors import ShapeError

GATED = ("swiglu", "geglu", "geglu_tanh")
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu2", *GATED)


class Activation(NamedTuple):
    """An activation by its name, or one of gate and up with more to it.

    "silu", "gelu" (the exact one), "gelu_tanh" and "relu2" (the square of ReLU, as in Nemotron-H)
    are non-gated: they take one value. Gated ones take two:

        swiglu      g * sigmoid(alpha * g) * (u + shift)
        geglu       gelu(g) * (u + shift)
        geglu_tanh  gelu_tanh(g) * (u + shift)

    where g is the gate, at most `limit`, and u is up, between -limit and limit. SwiGLU with the
    limit 7, alpha 1.702 and shift 1 is that of gpt-oss; DeepSeek-V4's has a limit alone.
    """

    name: str
    limit: float | None = None
    alpha: float = 1.0
    shift: float = 0.0

    @classmethod
    def of(cls, activation: AnyActivation) -> Activation:
        """By its name, or as it is. Raises ShapeError for what is no activation."""
        try:
            return _checked(activation)
        except TypeError:  # it cannot be hashed
            raise _no_activation(activation) from None

    @property
    def parts(self) -> int:
        """The number of columns of the product that make one of the result."""
        return 2 if self.name in GATED else 1

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        """What it makes of [..., N], or gate and up [..., 2 N]: [..., N], by torch."""
        gate, up = product.chunk(2, -1) if self.parts == 2 else (product, None)
        if up is not None and self.limit is not None:
            # Unlike clamp of torch 2.14, with a gradient of 1 at the limit itself, as kernels have.
            gate, up = (torch.where(one > self.limit, self.limit, one) for one in (gate, up))
            up = torch.where(up < -self.limit, -self.limit, up)
        if self.name in ("swiglu", "silu"):
            gate = gate * torch.sigmoid(self.alpha * gate)
        elif self.name == "relu2":
            gate = F.relu(gate).square()
        elif self.name != "none":
            gate = F.gelu(gate, approximate="tanh" if self.name.endswith("tanh") else "none")
        return gate if up is None else gate * (up + self.shift)


AnyActivation = str | Activation
SWIGLU = Activation("swiglu")


def num_parts(activation: AnyActivation) -> int:
    """See `Activation.parts`. Raises ShapeError for what is no activation."""
    return Activation.of(activation).parts


def check_layer_activation(activation: AnyActivation) -> None:
    """Raise ShapeError for what is no activation, or none between the products of a layer."""
    if Activation.of(activation).name == "none":
        raise ShapeError(
            f'activation is "none"; that of a layer must be one of {ACTIVATIONS[1:]}, or an '
            "Activation of such a name."
        )


@functools.lru_cache(maxsize=256)
def _checked(activation: AnyActivation) -> Activation:
    found = Activation(activation) if isinstance(activation, str) else activation
    if not isinstance(found, Activation) or found.name not in ACTIVATIONS:
        raise _no_activation(activation)
    name, limit, alpha, shift = found
    if name not in GATED and found != Activation(name):
        raise ShapeError(f"activation is {found}; limit, alpha and shift are for {GATED}.")
    if alpha != 1.0 and name != "swiglu":
        raise ShapeError(f"activation is {found}; alpha is for swiglu.")
    numbers = (alpha, shift) if limit is None else (alpha, shift, limit)
    are_numbers = all(type(one) in (int, float) and isfinite(one) for one in numbers)
    if not are_numbers or (limit is not None and limit <= 0):
        raise ShapeError(f"activation is {found}; its numbers must be finite, and limit above 0.")
    return Activation(name, None if limit is None else float(limit), float(alpha), float(shift))


def _no_activation(activation: object) -> ShapeError:
    return ShapeError(
        f"activation is {shown(activation)}; it must be one of {ACTIVATIONS}, or an Activation of "
        "such a name."
    )
