"""Run the experts of a transformers model (5.17 and later) on the ranks of a group.

    shard_experts(model, group)
    with torch.no_grad():
        logits = model(input_ids).logits

Each rank keeps E / R experts of every layer and calls the model with a batch of its own. All ranks
take part in every pass: one without tokens calls `join_empty(model)` instead. Ranks that `generate`
need not make equally many steps: those that are done take part in the steps of the others, and so
do all that leave a block `with join(model):`.
Once per pass the hosts agree on the most tokens that any rank has, so that decode makes low-latency
calls. They ask when the model is called, and its first layer of experts waits for the answer. With
`shard_experts(..., cuda_graphs=True)` they ask before each replay of a decode step. In a capture of
the caller's they cannot ask, and `fix_max_tokens` gives the number. Without `torch.no_grad()`
layers keep what their backward needs. `unshard_experts(model)` undoes it all, for saving.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrize

from ..buffer import Buffer
from ..checks import check_at_least, shown
from ..errors import BackendError, DtypeError, ShapeError
from ..grouped_gemm import Activation
from ..layer import moe_ffn
from ..sharded_weights import group_of
from ..symm import default_group
from ..utils import is_in_backward, untraced
from .decode_graphs import DecodeGraphs, check_graphs, generating, with_static_cache
from .expert_parts import (
    callers,
    check_adapters,
    check_not_of_fsdp,
    expert_parts,
    is_peft,
    lora_wrappers,
    note_num_experts,
    restore_parts,
)
from .forward_passes import ForwardPasses
from .quantized_experts import dequantize_experts
from .transformers_distributed import ExpertParallelism
from .transformers_experts import (
    activation_of,
    biases_of,
    check_experts,
    check_form,
    experts_layers,
    operands_of,
    shape_of,
    weights_of,
)

NAME = "moe_engine"
Sizes = tuple[int, int, int, torch.dtype]
"""hidden, num_experts, top-k, dtype, as `Buffer.for_tokens` takes them."""


def register(*, max_tokens: int = 4096, backend: str = "auto") -> None:
    """Add "moe_engine" to the experts implementations that transformers offers, and, where it has
    these (5.22 and later), to the `ep_implementation`s of a `DistributedConfig`.

    `max_tokens` bounds the tokens that a rank dispatches in one pass of a model that is then loaded
    with such a DistributedConfig, and sizes its Buffer; both arguments are equal on all ranks.
    """
    check_at_least(1, max_tokens=max_tokens)
    _register_experts()
    with suppress(ImportError):
        from transformers.distributed.expert_parallel import EPImplementationInterface

        make = partial(ExpertParallelism, max_tokens, backend)
        EPImplementationInterface.register(NAME, make)


def _register_experts() -> None:
    """Add "moe_engine" to the experts implementations."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise BackendError(
            "transformers 5.17 or later is needed: pip install 'moe_engine[hf]'"
        ) from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


@untraced
def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts of all ranks, for this rank's tokens: [T, H], [T, K], [T, K] -> [T, H]."""
    share: Share | None = vars(self).get("moe_share")
    if share is None:
        raise BackendError(
            f"{type(self).__name__} has no Buffer: call shard_experts(model, group) on every rank "
            'before a model runs with experts_implementation="moe_engine".'
        )
    if parametrize.is_parametrized(self) and not share.has_adapters:
        raise BackendError(
            f"{type(self).__name__} got adapters of its weights after shard_experts, for this "
            "rank's experts alone. Call get_peft_model first, then shard_experts(model, group)."
        )
    counts, weights = share.passes.counts, operands_of(self)
    result: Any = moe_ffn(
        hidden_states,
        top_k_index,
        top_k_weights.float(),
        *weights,
        share.buffer,
        share.passes.max_tokens(share.layer, hidden_states),
        biases=biases_of(self),
        activation=share.activation,
        return_counts=counts is not None,
        tag=share.tag,
    )
    if counts is None:
        return result
    y, count = result
    if not is_in_backward():
        counts.append(count)
    return y


@dataclass(frozen=True)
class Share:
    """How a rank runs its share of the experts of layer number `layer`; tag: see `moe_ffn`."""

    buffer: Buffer
    passes: ForwardPasses
    layer: int
    tag: str
    implementation_before: str | None
    has_adapters: bool
    activation: Activation
    graphs: DecodeGraphs | None = None
    trained: frozenset[str] = frozenset()  # weights that are e4m3 now, and were trained before

    def __deepcopy__(self, memo: dict[int, Any]) -> Share:
        passes, graphs = copy.deepcopy((self.passes, self.graphs), memo)
        return replace(self, passes=passes, graphs=graphs)

    def join(self, most: int, call: Callable[[], None]) -> None:
        """`call()`, a pass without tokens to which another rank brings `most`."""
        if self.graphs is not None:
            return self.graphs.join(most, call)
        with self.passes.fixing(most):
            call()


@torch.inference_mode(False)  # parameters stay ordinary ones
def shard_experts(
    model: Any,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    max_tokens: int = 4096,
    backend: str = "auto",
    cuda_graphs: bool = False,
) -> Buffer:
    """Keep this rank's experts of every layer, in place, and run them through one new Buffer, which
    has room for the largest layer.

    Collective over `group` (None: all ranks), with the same model on each. `max_tokens`, equal on
    all ranks, bounds the tokens (batch x length) of one rank in one pass and sizes the Buffer; more
    raise CapacityError, on all ranks. A model on the meta device may be sharded, too.
    gate_up_proj [E, 2I, H] -> [E / R, 2I, H] and down_proj [E, H, I] -> [E / R, H, I]; where they
    are transposed, or gate and up are interleaved, as in gpt-oss, they are brought into this form.
    With a `mesh` of one dimension, whose ranks are then the group, they are DTensors [E, ...] of
    these parts, Shard(0) on it, as torch's distributed checkpoint and `data_parallel` take them.
    They are new parameters, so an optimizer is made afterwards.
    cuda_graphs: `generate` decodes by CUDA graphs, see `DecodeGraphs`, with a static cache unless
    its arguments choose another; `model.forward.num_replays` counts these steps. Ranks may differ.
    From here on `state_dict` is this rank's share, and `save_pretrained` raises BackendError until
    `unshard_experts(model)`, except with a `state_dict` of the whole model.
    Raises BackendError for experts that have or do anything else, ShapeError if R does not divide E
    or the experts are sharded already, DtypeError for weights other than bf16 and fp32.
    """
    group, rank, num_ranks = ranks_of(group, mesh)
    sizes = check_model(model, num_ranks, mesh)
    check_graphs(model, cuda_graphs, backend)
    with selected(model) as before:
        buffer = Buffer.for_tokens(group, max_tokens, *sizes, backend=backend)
        passes = ForwardPasses(group, max_tokens)
        keep_share(model, rank, num_ranks, mesh)
        connect(model, buffer, passes, before, cuda_graphs)
    return buffer


def ranks_of(
    group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[dist.ProcessGroup | None, int, int]:
    """The group that is meant, this rank in it, and its number of ranks."""
    if mesh is not None:
        group = group_of(mesh, group)
    group = group or default_group()
    return (group, dist.get_rank(group), dist.get_world_size(group)) if group else (None, 0, 1)


def check_model(model: Any, num_ranks: int, mesh: DeviceMesh | None) -> Sizes:
    """(hidden, num_experts, top-k, dtype) of the Buffer of a whole model, each the most that a
    layer has; raise for a model that cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise DtypeError(f"model is {shown(model)}; it must be a torch.nn.Module.")
    check_adapters(model, mesh)
    layers = experts_layers(model)
    for experts in layers:
        if hasattr(experts, "moe_share"):
            raise ShapeError(
                f"{type(experts).__name__} is sharded already. Call unshard_experts(model) on "
                "every rank first."
            )
        check_experts(experts, num_ranks)
        if mesh is not None:
            check_form(experts, "a mesh")
        if lora_wrappers(model):
            check_form(experts, "a LoRA adapter of experts")
    num_experts, hidden, topk, dtype = zip(*map(shape_of, layers), strict=True)
    widest = max(dtype, key=lambda one: one.itemsize)
    return max(hidden), max(num_experts), max(topk), widest


def keep_share(model: Any, rank: int, num_ranks: int, mesh: DeviceMesh | None) -> None:
    """Replace the experts' parameters by this rank's parts of them."""
    for part in expert_parts(model):
        part.keep(rank, num_ranks, mesh)
    note_num_experts(model)


@contextmanager
def selected(model: Any) -> Iterator[str | None]:
    """Select this engine for the model's experts, from here on unless the block raises. Gives the
    implementation that was selected before."""
    _register_experts()
    layers = experts_layers(model)
    before = layers[0].config._experts_implementation
    model.set_experts_implementation(NAME)
    try:
        if others := _run_by_others(layers):
            raise BackendError(
                f"set_experts_implementation did not reach {others}, which has a config of its "
                f"own. Call register(), then load the model with experts_implementation={NAME!r}."
            )
        yield before
    except BaseException:
        model.set_experts_implementation(before)
        raise


def connect(
    model: Any, buffer: Buffer, passes: ForwardPasses, before: str | None, cuda_graphs: bool = False
) -> None:
    """Let layers that have this rank's share run through the Buffer. `before` is the implementation
    that `unshard_experts` selects."""
    graphs = DecodeGraphs(generating(model), buffer, passes) if cuda_graphs else None
    layers, has_adapters = experts_layers(model), bool(lora_wrappers(model))
    for part in expert_parts(model):
        part.to_engine_form()
    names = {module: name for name, module in model.named_modules()}
    for number, experts in enumerate(layers):
        tag, activation = buffer.new_tag(names[experts]), activation_of(experts)
        of_layer = number, tag, before, has_adapters, activation
        experts.moe_share = Share(buffer, passes, *of_layer, graphs)
    for part in _parts(model):
        part.save_pretrained = MethodType(_save, part)
        part.set_experts_implementation = MethodType(_set_implementation, part)
        if hasattr(type(part), "generate"):
            part.generate = MethodType(_generate, part)
    if is_peft(model) and has_adapters:
        model.save_pretrained = MethodType(_save, model)
    if graphs is not None:
        generating(model).forward = graphs
    passes.begin_with(_whole(model, len(layers)))


@torch.inference_mode(False)  # parameters stay ordinary ones
@torch.no_grad()
def unshard_experts(model: Any) -> None:
    """Give every rank all experts again, so that the model can be saved, or sharded again.

    Collective over the group of `shard_experts`, whose Buffer stays the caller's to destroy.
    Experts that `quantize_experts` has made e4m3 come back in bf16. A model for which it raised, as
    where all experts do not fit into memory, stays sharded: it cannot be saved, and another call
    brings back what is missing, or raises BackendError where that differs between ranks.
    """
    layers = experts_layers(model)
    share = share_of(layers[0])
    check_not_of_fsdp(model)
    dequantize_experts(model)
    restore_parts(model, share.passes.group)
    share.passes.hook.remove()
    for part in (model, *_parts(model)):
        for name in ("save_pretrained", "set_experts_implementation", "generate"):
            vars(part).pop(name, None)
        if share.graphs is not None and vars(part).get("forward") is share.graphs:
            share.graphs.clear()
            del part.forward
    note_num_experts(model)
    restored = {name for name, one in model.named_parameters() if hasattr(one, "is_restored")}
    if ignored := getattr(model, "_ddp_params_and_buffers_to_ignore", None):
        model._ddp_params_and_buffers_to_ignore = [*set(ignored) - restored]
    for experts in layers:
        del experts.moe_share
    model.set_experts_implementation(share.implementation_before)


def share_of(experts: Any) -> Share:
    """The `Share` that `shard_experts` left on a layer; BackendError if it was not called."""
    if not hasattr(experts, "moe_share"):
        raise BackendError("the model has no Buffer: call shard_experts(model, group) first.")
    return experts.moe_share


def _parts(model: Any) -> list[Any]:
    """The model and the models inside it that have sharded experts."""
    models = (m for m in model.modules() if hasattr(type(m), "set_experts_implementation"))
    return [part for part in models if any(hasattr(m, "moe_share") for m in part.modules())]


def _whole(model: Any, num_layers: int) -> Any:
    """The innermost of the model's parts that has all layers of experts: the decoder."""
    parts = [part for part in _parts(model) if len(experts_layers(part)) == num_layers]
    return parts[-1]


def _save(model: Any, *args: Any, state_dict: Any = None, **more: Any) -> None:
    """`save_pretrained` of a model of which each rank holds a part."""
    if state_dict is None:
        raise BackendError(
            "save_pretrained would write this rank's experts under the names of all. Call "
            "unshard_experts(model) on every rank, then save on one; or pass the whole model's "
            "state_dict=, which whole_state_dict(model) gathers on every rank, and under FSDP2 "
            "torch's get_model_state_dict."
        )
    type(model).save_pretrained(model, *args, state_dict=state_dict, **more)


def _set_implementation(model: Any, implementation: Any) -> None:
    """`set_experts_implementation` of a model whose experts no other implementation can run."""
    type(model).set_experts_implementation(model, implementation)
    if _run_by_others(experts_layers(model)):
        type(model).set_experts_implementation(model, NAME)
        raise BackendError(
            f"experts_implementation is {implementation!r}, and sharded experts run with {NAME!r} "
            "alone. Call unshard_experts(model) on every rank first."
        )


def _run_by_others(layers: list[Any]) -> str | None:
    """The name of the first module that another implementation runs."""
    names = (type(e).__name__ for e in layers if e.config._experts_implementation != NAME)
    return next(names, None)


def join_empty(model: Any, calls: int = 1) -> None:
    """Take part without tokens in `calls` forward passes that the other ranks make.

    transformers itself cannot run an empty batch. Where the number of passes is not known, as that
    of a `generate`, use `join`.
    """
    passes = share_of(experts_layers(model)[0]).passes
    for _ in range(calls):
        passes.begin()
        _pass_without_tokens(model)


@contextmanager
def join(model: Any) -> Iterator[None]:
    """Let each rank make as many passes of the model within the block as it likes.

        with join(model):
            for batch in batches:                       # of this rank; maybe none
                model.generate(**batch)

    All ranks enter the block. A rank that leaves it takes part, without tokens, in the passes of
    the others until all have left. A `generate` outside of such a block is one by itself. It is for
    inference: the ranks that have left take part in no backward.
    Raises BackendError within `fix_max_tokens`, where no rank tells the others that it continues.
    The idea is that of torch's `torch.distributed.algorithms.Join`.
    """
    share = share_of(experts_layers(model)[0])
    passes = share.passes
    if passes.fixed is not None:
        raise BackendError(
            "within fix_max_tokens ranks do not tell one another whether they continue: leave that "
            "block, or make the same number of passes on every rank, with join_empty(model)."
        )
    passes.num_joins += 1
    try:
        yield
    finally:
        passes.num_joins -= 1
    if passes.num_joins:
        return
    while most := passes.agree(0):
        share.join(most, partial(_pass_without_tokens, model))
    if share.graphs is not None:
        share.graphs.end_join()


def _generate(model: Any, *args: Any, **more: Any) -> Any:
    """`generate` of ranks that need not make equally many steps, if nobody fixed these."""
    _check_drafts(model, args, more)
    share = share_of(experts_layers(model)[0])
    if share.graphs is not None:
        more = with_static_cache(model, args, more)
    with join(model) if share.passes.fixed is None else nullcontext():
        return type(model).generate(model, *args, **more)


def _check_drafts(model: Any, args: tuple[Any, ...], more: dict[str, Any]) -> None:
    """Raise for a `generate` whose drafts come from experts that other ranks cannot take part in:
    these take part in whole passes of this model alone."""
    configs = (model.generation_config, more.get("generation_config"), *args[1:2])
    for name, reason in {
        "assistant_early_exit": "drafts by the first layers leave the other layers out",
        "use_mtp": "layers that predict several tokens have experts of their own, not sharded",
    }.items():
        if more.get(name) or any(getattr(config, name, None) for config in configs):
            raise BackendError(
                f"generate with {name} does not run on sharded experts: {reason}. Generate without "
                "it, or with prompt_lookup_num_tokens or an assistant_model that is not sharded."
            )
    assistant = more.get("assistant_model")
    if assistant is not None and any(hasattr(part, "moe_share") for part in assistant.modules()):
        raise BackendError(
            "the assistant_model is sharded, and ranks do not make equally many passes of it: load "
            "it whole on every rank."
        )


@torch.no_grad()
def _pass_without_tokens(model: Any) -> None:
    for experts, call in zip(experts_layers(model), callers(model), strict=True):
        device = weights_of(experts)[0].device
        _, hidden, topk, dtype = shape_of(experts)
        call(
            torch.empty(0, hidden, dtype=dtype, device=device),
            torch.empty(0, topk, dtype=torch.int64, device=device),
            torch.empty(0, topk, dtype=torch.float32, device=device),
        )


@contextmanager
def fix_max_tokens(model: Any, max_tokens: int) -> Iterator[None]:
    """Within the block no rank brings more than `max_tokens` to any pass, so none asks the others.

    All ranks must do this with the same number. Capture a CUDA graph in such a block; it can be
    replayed outside:

        with fix_max_tokens(model, 64), torch.cuda.graph(graph):
            logits = model(ids, past_key_values=cache).logits
    """
    check_at_least(1, max_tokens=max_tokens)
    passes = share_of(experts_layers(model)[0]).passes
    if passes.num_joins:
        raise BackendError(
            "within `join`, and within `generate`, ranks tell one another their tokens, which "
            "fix_max_tokens would end: enter it before `generate`, and without `join`."
        )
    with passes.fixing(max_tokens):
        yield
