"""What of a model decides which kernels it needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..engines.base import LayerInputs
from ..errors import ShapeError
from ..grouped_gemm.activations import SWIGLU, Activation
from ..layer_config import MODELS, LayerProblem
from ..symm.slots import ReturnRowLayout, header_bytes

FP8 = torch.float8_e4m3fn
SHAPES = MODELS | {"tiny": (8, 64, 32, 2)}
"""By name of a model: experts, hidden, expert intermediate, top-k."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides its kernels: a layer of it on `num_ranks` ranks of `num_nodes` nodes,
    each of which brings up to `max_tokens` tokens."""

    num_experts: int
    hidden: int
    num_columns: int
    num_topk: int
    num_ranks: int
    max_tokens: int = 8192
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = SWIGLU
    has_bias: bool = False
    is_quantized: bool = False
    num_nodes: int = 1

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of x."""
        return self.hidden * self.dtype.itemsize

    def region_bytes(self, max_tokens: int) -> int:
        """Returns the bytes of a region of the Buffer that `Buffer.for_tokens` makes."""
        row = ReturnRowLayout(self.row_bytes, self.num_topk)
        return header_bytes(self.num_experts, self.num_ranks) + max_tokens * row.num_bytes

    def layer(self, max_tokens: int) -> LayerProblem:
        """A layer of up to so many tokens of each rank."""
        sizes = self.num_experts, self.num_topk, self.hidden, self.num_columns
        itemsize = FP8.itemsize if self.is_quantized else self.dtype.itemsize
        return LayerProblem(self.num_ranks, max_tokens, *sizes, itemsize)

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H], topk_idx [T, K], topk_weights [T, K]; no kernel reads them."""
        topk_idx = torch.zeros(count, self.num_topk, dtype=torch.int64)
        x = torch.empty(count, self.hidden, dtype=self.dtype)
        return x, topk_idx, torch.empty(count, self.num_topk)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w_gate_up [L, 2I, H], or [L, I, H], and w_down [L, H, I]."""
        new = partial(torch.empty, dtype=FP8 if self.is_quantized else self.dtype)
        up = new(self.num_local, self.activation.parts * self.num_columns, self.hidden)
        return up, new(self.num_local, self.hidden, self.num_columns)

    def inputs(self, count: int, up: torch.Tensor, down: torch.Tensor) -> LayerInputs:
        """A layer of `count` tokens, whose biases require grad if it has any and trains."""
        inputs = LayerInputs(*self.tokens(count), up, down)._replace(activation=self.activation)
        if self.is_quantized:
            scales = (torch.empty(len(w), *(-(-n // 128) for n in w.shape[1:])) for w in (up, down))
            inputs = inputs._replace(s_gate_up=next(scales), s_down=next(scales))
        if not self.has_bias:
            return inputs
        grad = not self.is_quantized
        new = partial(torch.empty, self.num_local, dtype=self.dtype, requires_grad=grad)
        columns = self.activation.parts * self.num_columns
        return inputs._replace(b_gate_up=new(columns), b_down=new(self.hidden))


def shape_of_checkpoint(
    checkpoint: str, num_ranks: int, max_tokens: int, is_quantized: bool = False
) -> ModelShape:
    """That of a checkpoint of transformers, from its config.json alone; the errors of
    `shard_experts` for experts that the engine does not run."""
    from ..integrations.transformers import check_model
    from ..integrations.transformers_checkpoints import empty_model
    from ..integrations.transformers_experts import activation_of, experts_layers, shape_of

    model = empty_model(checkpoint)
    check_model(model, num_ranks, None)
    found = set()
    for experts in experts_layers(model):
        num_experts, hidden, num_topk, dtype = shape_of(experts)
        num_columns = experts.down_proj[0].numel() // hidden
        sizes = num_experts, hidden, num_columns, num_topk, num_ranks, max_tokens
        how = activation_of(experts), experts.has_bias, is_quantized
        found.add(ModelShape(*sizes, dtype, *how))
    if len(found) > 1:
        raise ShapeError(
            f"the layers of {checkpoint} differ: {sorted(found, key=str)}. Give the sizes of one; "
            "`compile` adds those of another to the same folder."
        )
    return found.pop()


def sizes_of_model(model: str) -> tuple[int, int, int, int]:
    """(experts, hidden, columns, top-k) of a model of SHAPES, or of the checkpoint of transformers
    in this folder. ShapeError for other names, and for experts without a gate."""
    if model in SHAPES:
        return SHAPES[model]
    if not Path(model).is_dir():
        raise ShapeError(
            f"the model is {model!r}; there are {', '.join(SHAPES)}, or give the folder of a "
            "checkpoint, which has a config.json"
        )
    one = shape_of_checkpoint(model, 1, 1)
    if one.activation.parts != 2:
        raise ShapeError(f"the experts of {model} have no gate, which these layers have")
    return one.num_experts, one.hidden, one.num_columns, one.num_topk
