"""Experts of a Megatron-Core MoELayer that are one fused layer, and gradients into `main_grad`.

In the spec of the layer, and once the model is built:

    MoESubmodules(experts=partial(Experts, buffer=buffer), ...)
    use_moe_engine(model, buffer)           # moe_engine.integrations.megatron

Nothing here imports Megatron before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..buffer import Buffer
from ..engines.base import WeightGradients
from ..errors import BackendError
from ..layer import MoEFeedForward
from ..weight_gradients import DelayedWgrad, LayerWeights, WgradSink

ALLOWED = {
    "gated_linear_unit": (True,),
    "activation_func": (torch.nn.functional.silu,),
    "add_bias_linear": (False,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
    "moe_apply_probs_on_input": (False,),
    "moe_mlp_glu_interleave_size": (None,),
    "fp8": (None, False),
    "fp4": (None, False),
}
"""What `moe_ffn` computes, as values of Megatron's config."""


class MainGradSink(WgradSink):
    """A `WgradSink` into `main_grad` of the parameters of a `MoEFeedForward`, as Megatron has them.

    `main_grad` is looked up in each backward, by `get_main_grad()` where there is one, because
    Megatron-FSDP allocates it there. Gradients are added to it, or written over it where the
    parameters have `overwrite_main_grad`. `grad_added_to_main_grad` is set, and autograd gets
    zeros: hooks of Megatron's DistributedDataParallel ask for a gradient, and add it where a
    parameter has `zero_out_wgrad`. Raises BackendError in a backward without `main_grad`.
    """

    def __init__(self, experts: MoEFeedForward):
        super().__init__(None, None, dummy_grads=True)
        self.experts = experts

    def check(self, weights: LayerWeights, **others: Tensor) -> None:
        """Nothing in a forward, where there may be no `main_grad` yet."""

    def memory(
        self, weights: LayerWeights, wanted: tuple[bool, bool], **others: Tensor
    ) -> WeightGradients:
        """See `WgradSink.memory`."""
        parameters = self.experts.gate_up_proj, self.experts.down_proj
        overwrites = {bool(getattr(one, "overwrite_main_grad", False)) for one in parameters}
        if len(overwrites) > 1:
            raise BackendError(
                "one parameter of the experts has overwrite_main_grad, and the other has not. Set "
                "it for both: gradients are added for both, or written over what is there."
            )
        self.accumulate = not overwrites.pop()
        needs = zip(parameters, wanted, strict=True)
        self.gate_up, self.down = (_main_grad(one) if wants else None for one, wants in needs)
        return super().memory(weights, wanted, **others)


def _main_grad(parameter: Any) -> Tensor:
    if hasattr(parameter, "get_main_grad"):
        parameter.main_grad = parameter.get_main_grad()
    grad: Tensor | None = getattr(parameter, "main_grad", None)
    if grad is None:
        raise BackendError(
            f"a parameter of the experts, {list(parameter.shape)}, has no main_grad. Wrap the "
            "model in Megatron's DistributedDataParallel, or unset gradient_accumulation_fusion."
        )
    return grad


class Experts(MoEFeedForward):
    """The experts of a MoELayer, which send, compute and sum rows in one `moe_ffn`.

    It is called as Megatron builds experts, with the Buffer besides; `use_moe_engine` gives the
    layer the dispatcher that passes tokens through. The parameters are `gate_up_proj` [L, 2I, H]
    and `down_proj` [L, H, I], tagged `allreduce=False`, with other random values on each rank.
    Where the config says so, gradients go into `main_grad` (`gradient_accumulation_fusion`) or wait
    for `backward_dw()` (`delay_wgrad_compute`, `overlap_dispatch_backward_with_experts_wgrad`).

    Raises BackendError for a config that is not SwiGLU in bf16 or fp32, without bias, and with
    experts that are whole on each rank.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        pg_collection: Any = None,
        name: str | None = None,
        *,
        buffer: Buffer,
        save: str = "auto",
    ):
        _check_config(config, pg_collection)
        hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        sizes = num_local_experts, hidden, config.moe_ffn_hidden_size
        super().__init__(*sizes, buffer, config.params_dtype, requires_grad=True, save=save)
        self.config, self.num_local_experts = config, num_local_experts
        self._replica = 0 if pg_collection is None else pg_collection.expt_dp.rank()
        self._hooks: list[Callable[[], object]] = []
        self._shared: list[Any] = []  # a list, since the module is the layer's
        is_delayed = (
            config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
        )
        sink = MainGradSink(self) if config.gradient_accumulation_fusion else None
        self.wgrad = DelayedWgrad(sink) if is_delayed else sink
        for weight in self.parameters():
            weight.allreduce = False  # type: ignore[attr-defined]
            weight.skip_backward_post_hook = is_delayed  # type: ignore[attr-defined]
        if config.perform_initialization:
            with _seeded(buffer.rank):
                config.init_method(self.gate_up_proj)
                config.output_layer_init_method(self.down_proj)

    def forward(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        return_counts: bool = False,
    ) -> Any:
        """(The result of `moe_ffn`, None), as Megatron takes the output and the bias of experts.
        Where shared experts overlap, theirs is added to it."""
        if not self._shared:
            return super().forward(x, topk_idx, topk_weights, return_counts=return_counts), None
        shared = self._shared[0]
        layer = self.start(x, topk_idx, topk_weights, return_counts=return_counts)
        shared.pre_forward_comm(x)  # its stream waits for x here, and for the layer nowhere
        shared.linear_fc1_forward_and_act()  # without the layer, or its backward waits for that
        out = layer.finish()
        y = out[0] if return_counts else out
        shared.linear_fc2_forward(y)  # so that autograd launches the layer's backward first
        shared.post_forward_comm()
        y += shared.get_output()
        return out, None

    def overlap(self, shared_experts: Any | None) -> None:
        """From now on compute a `SharedExpertMLP`, which has a stream of its own, while the layer
        runs on the Buffer's, and its backward while that of the layer runs; None: nothing else."""
        self._shared = [] if shared_experts is None else [shared_experts]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """Megatron's DistributedDataParallel registers here what `backward_dw` calls."""
        self._hooks.append(hook)

    def backward_dw(self) -> None:
        """The delayed gradients of the oldest backward that waits, then the hooks."""
        super().backward_dw()
        for weight in self.parameters():
            if weight.requires_grad and weight.grad is None:  # it is in main_grad
                weight.grad = weight.new_zeros(()).expand_as(weight)
        for hook in self._hooks:
            hook()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The parameters as Megatron's distributed checkpoints take them: this rank's experts
        [L, ...] of [E, ...]."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        assert self.buffer is not None
        axis, mine = len(sharded_offsets), (self.buffer.rank, self.buffer.group_size)
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                weight,
                *sharded_offsets,
                (axis, *mine),
                replica_id=(0, 0, self._replica),
                prepend_axis_num=axis,
            )
            for name, weight in self.state_dict(keep_vars=True).items()
        }


def _check_config(config: Any, pg_collection: Any) -> None:
    for name, allowed in ALLOWED.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise BackendError(
                f"the config's {name} is {value}, and these experts need {allowed[0]}. Keep "
                "Megatron's own experts for it: use_moe_engine works with them."
            )
    if pg_collection is not None and pg_collection.expt_tp.size() > 1:
        raise BackendError(
            f"the experts are split over {pg_collection.expt_tp.size()} tensor-parallel ranks, and "
            "these are whole on each rank. Set expert_tensor_parallel_size=1, or keep Megatron's "
            "own experts."
        )


@contextmanager
def _seeded(rank: int) -> Iterator[None]:
    """Other random numbers on each rank of the Buffer, and afterwards the same again as without:
    Megatron's ranks have one seed, and each has other experts."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed + rank)
        yield
