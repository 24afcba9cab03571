"""This engine as the expert parallelism of transformers' own distributed models (5.22 and later).

    register(max_tokens=8192)
    plan = DistributedConfig(tp_size=2, ep_size=2, ep_implementation="moe_engine")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=plan)

transformers shards and loads the model, and saves it. It makes one `ExpertParallelism` for each
layer of experts, and calls it with this rank's tokens. Ranks of one tensor-parallel group have the
same tokens; so each of them dispatches a slice, and gathers the others' results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..buffer import Buffer
from ..errors import BackendError, ShapeError
from ..layer import moe_ffn
from ..utils import untraced
from .forward_passes import ForwardPasses
from .transformers_experts import (
    SERVED,
    activation_of,
    biases_of,
    check_form,
    shape_of,
    unfit_parts,
    weights_of,
)


@dataclass
class Layers:
    """What the layers of one model share: a Buffer, made when the first of them is called."""

    config: Any
    ep_mesh: DeviceMesh
    sizes: tuple[int, int, int, torch.dtype]
    max_tokens: int
    backend: str
    num_layers: int = 0
    running: tuple[Buffer, ForwardPasses] | None = None

    def run(self) -> tuple[Buffer, ForwardPasses]:
        """The Buffer and the agreement of its ranks; collective when first called."""
        if self.running is None:
            group = self.ep_mesh.get_group()
            buffer = Buffer.for_tokens(group, self.max_tokens, *self.sizes, backend=self.backend)
            self.running = buffer, ForwardPasses(group, self.max_tokens)
        return self.running


class ExpertParallelism:
    """How one layer of experts gets its tokens: an `EPImplementation` of transformers, which it
    makes from the arguments of `register` and the layer.

    Raises BackendError for experts that `shard_experts` refuses, too; ShapeError for layers of
    other sizes than those of the first one.
    """

    _last: ReferenceType[Layers] | None = None
    """Those of the model that was distributed last: transformers makes its layers one by one."""

    def __init__(
        self,
        max_tokens: int,
        backend: str,
        experts: Any,
        ep_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
    ):
        from torch.distributed.tensor import DTensor  # takes a second to import

        if unfit := unfit_parts(experts, (DTensor,), ("_is_expert_parallel", "_is_hooked")):
            raise BackendError(f"{type(experts).__name__} has {', '.join(unfit)}. {SERVED}")
        check_form(experts, "a DistributedConfig")
        num_local, hidden, topk, dtype = shape_of(experts)
        sizes = hidden, num_local * ep_mesh.size(), topk, dtype
        kept = ExpertParallelism._last
        last = None if kept is None else kept()
        if last is None or last.config is not experts.config or last.ep_mesh is not ep_mesh:
            last = Layers(experts.config, ep_mesh, sizes, max_tokens, backend)
            ExpertParallelism._last = ref(last)
        if last.sizes != sizes:
            raise ShapeError(
                "the experts layers share one Buffer but differ in (hidden, num_experts, top-k, "
                f"dtype): {last.sizes} and {sizes}."
            )
        self.layers, self.number = last, last.num_layers
        last.num_layers += 1
        self.experts, self.tp_mesh = experts, tp_mesh
        self.activation = activation_of(experts)

    @untraced
    def __call__(self, hidden_states: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        """[T, H], [T, K], [T, K] -> [T, H]; T tokens of this tensor-parallel group."""
        x, topk_idx, topk_weights = map(self._slice, (hidden_states, idx, weights))
        buffer, passes = self.layers.run()
        # Within this call transformers shows the parts of this rank, as ordinary tensors.
        up, down = weights_of(self.experts)
        most = passes.max_tokens(self.number, x)
        tensors = x, topk_idx, topk_weights.float(), up, down
        more: dict[str, Any] = dict(biases=biases_of(self.experts), activation=self.activation)
        y: Any = moe_ffn(*tensors, buffer, most, tag=self.number, **more)
        return self._gather(y, hidden_states.shape)

    def _slice(self, whole: Tensor) -> Tensor:
        """This rank's tokens of those that its tensor-parallel group has: 5 tokens on 2 ranks are
        tokens 0, 1, 2 and tokens 3, 4."""
        if self.tp_mesh.size() == 1:
            return whole.contiguous()
        from torch.distributed.tensor import DTensor, Replicate, Shard

        same = DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
        return same.redistribute(placements=[Shard(0)]).to_local().contiguous()

    def _gather(self, mine: Tensor, shape: torch.Size) -> Tensor:
        """The results of all tokens of the group."""
        if self.tp_mesh.size() == 1:
            return mine
        from torch.distributed.tensor import DTensor, Shard

        stride = (shape[1], 1)
        parts = DTensor.from_local(
            mine, self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        return parts.full_tensor()
