"""Megatron-Core as far as tests need it, of the source of 22 August 2026 (d98e8a6): its own classes
where megatron.core can be imported, else stand-ins that make the same calls in the same order with
the same arguments. Its router needs a GPU, so a stub gives its result in both."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ops_cases import experts as grouped_experts
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_engine.integrations.megatron import use_moe_engine
from moe_engine.integrations.megatron_experts import Experts

SOURCES = "stand-ins", "Megatron-Core"


def skip_without(source: str) -> None:
    if source == "Megatron-Core":
        reason = "pip install 'megatron-core>=0.19', which needs Python 3.12"
        pytest.importorskip("megatron.core", minversion="0.19", reason=reason)


class Router(nn.Module):
    """What a TopKRouter returns: probs [T, E], 0 where a token is not routed, and that map. Both
    come of `routing`, a pair (topk_idx, topk_weights)."""

    def __init__(self, config, **_):
        super().__init__()
        self.num_experts, self.routing = config.num_moe_experts, None

    def forward(self, hidden_states, padding_mask=None):
        idx, weights = self.routing
        is_routed = idx >= 0
        at = torch.where(is_routed, idx, self.num_experts)
        zeros = weights.new_zeros(len(idx), self.num_experts + 1)
        probs = zeros.scatter(1, at, weights * is_routed)[:, :-1]
        return probs, zeros.bool().scatter(1, at, True)[:, :-1]

    def set_layer_number(self, layer_number):
        """Of the interface."""


class GroupedMLP(nn.Module):
    """`TEGroupedMLP` and `SequentialMLP`: rows of the experts in their order, host counts, and
    probabilities that are applied to the activations."""

    def __init__(self, num_local_experts, config, pg_collection=None, name=None):
        super().__init__()
        hidden, columns = config.hidden_size, config.moe_ffn_hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_local_experts, 2 * columns, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_local_experts, hidden, columns))

    def forward(self, rows, tokens_per_expert, permuted_probs):
        assert tokens_per_expert.dtype == torch.int64
        assert permuted_probs.dtype == torch.float32
        ends = F.pad(tokens_per_expert.cumsum(0), (1, 0))
        assert ends[-1] == len(rows) == len(permuted_probs)
        out = grouped_experts(rows, ends, self.gate_up_proj, self.down_proj)
        return out * permuted_probs.unsqueeze(-1), None


# --- Shared experts ------------------------------------------------------------------------------


class Linear(nn.Module):
    """A linear layer as Megatron's `MLP` builds and calls it."""

    def __init__(self, inputs, outputs, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x):
        return F.linear(x, self.weight), None


class SharedExpertMLP(nn.Module):
    """`SharedExpertMLP`: its forward, and the parts of it that overlap, in the only order that its
    states allow. Its stream waits for the current one, and does nothing else."""

    PARTS = "pre_forward_comm", "fc1", "fc2", "post_forward_comm", "get_output"

    def __init__(self, config, pg_collection, gate, name=None):
        super().__init__()
        hidden, columns = config.hidden_size, config.moe_shared_expert_intermediate_size
        self.linear_fc1, self.linear_fc2 = Linear(hidden, 2 * columns), Linear(columns, hidden)
        self.gate_weight = nn.Parameter(torch.empty(1, hidden)) if gate else None
        self.overlaps, self.done = config.moe_shared_expert_overlap, 0
        self.stream = mock.MagicMock()

    def activation(self, rows):
        gate, up = rows.chunk(2, -1)
        return F.silu(gate) * up

    def score(self, x):
        return 1 if self.gate_weight is None else torch.sigmoid(F.linear(x, self.gate_weight))

    def forward(self, x):
        rows, _ = self.linear_fc1(x)
        return self.linear_fc2(self.activation(rows))[0] * self.score(x)

    def begins(self, part):
        assert self.overlaps and self.PARTS[self.done] == part
        self.done = (self.done + 1) % len(self.PARTS)

    def wait_current_stream(self):
        self.stream.wait_stream(None)

    def pre_forward_comm(self, x, wait_current_stream=True):
        self.begins("pre_forward_comm")
        if wait_current_stream:
            self.wait_current_stream()
        self.gate_score = self.score(x)
        self.cached = _Same.apply(x)  # `copy_to_tensor_model_parallel_region`
        launch_backward_at(self.cached, FIRST)

    def linear_fc1_forward_and_act(self, overlapped_comm_output=None):
        self.begins("fc1")
        self.cached = self.activation(self.linear_fc1(self.cached)[0])
        if overlapped_comm_output is not None and overlapped_comm_output.grad_fn is not None:
            launch_backward_at(self.cached, overlapped_comm_output.grad_fn._sequence_nr() - 1)
            self.cached = _BackwardStreamWait.apply(self.cached, self.stream)

    def linear_fc2_forward(self, overlapped_comm_output=None):
        self.begins("fc2")
        launch_backward_at(overlapped_comm_output, FIRST)
        self.cached = self.linear_fc2(self.cached)[0]

    def post_forward_comm(self):
        self.begins("post_forward_comm")
        self.cached = _Same.apply(self.cached)  # `reduce_from_tensor_model_parallel_region`
        launch_backward_at(self.cached, FIRST)

    def get_output(self):
        self.begins("get_output")
        out, self.cached = self.cached * self.gate_score, None
        return out


FIRST = torch.iinfo(torch.int).max


def launch_backward_at(tensor, number):
    """`set_tensor_grad_fn_sequence_sr`: of nodes that are ready, autograd takes the greatest."""
    if tensor is not None and tensor.grad_fn is not None:
        tensor.grad_fn._set_sequence_nr(number)


class _BackwardStreamWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stream):
        ctx.stream = stream
        return x

    @staticmethod
    def backward(ctx, grad):
        ctx.stream.wait_stream(None)
        return grad, None


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shared_experts(source, config, **how):
    """Megatron's own, or those above."""
    if source != "Megatron-Core":
        return SharedExpertMLP(config, **how)
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import shared_experts

    return shared_experts.SharedExpertMLP(config, MLPSubmodules(Linear, Linear), **how)


@contextmanager
def cuda_on_cpus():
    """On a CPU, what Megatron asks of a GPU in `SharedExpertMLP`, `tensor_parallel.checkpoint` and
    Megatron-FSDP: streams that do nothing, a random state, tensors where they are."""
    names = "Stream", "stream", "current_stream", "synchronize", "empty_cache"
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            patch = partial(mock.patch.object, new_callable=mock.MagicMock)
            for name in names:
                stack.enter_context(patch(torch.cuda, name))
            stack.enter_context(patch(torch.cuda.random, "get_rng_state"))
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: 0))
            stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *_: self))
        yield


class FlexTokenDispatcher:
    """`MoEFlexTokenDispatcher`."""

    def __init__(self, num_local_experts, config, groups):
        self.config, self.num_local_experts, self.shared_experts = config, num_local_experts, None
        self.ep_group, self.tp_group, self.tp_ep_group = groups.ep, groups.expt_tp, groups.tp_ep
        self.ep_size, self.tp_size = groups.ep.size(), groups.expt_tp.size()
        self._comm_manager = None

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        self.hidden_shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, self.hidden_shape[-1])
        shape = len(hidden_states), self.ep_size, 1, self.num_local_experts
        both = (one.reshape(shape).expand(-1, -1, self.tp_size, -1) for one in (routing_map, probs))
        self._comm_manager.setup_metadata(*(one.flatten(1, 2).contiguous() for one in both))
        return hidden_states, self._comm_manager.token_probs

    def token_dispatch(self, hidden_states, probs, async_finish=True, allocate_on_comm_stream=True):
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        rows = self._comm_manager.dispatch(hidden_states, async_finish, allocate_on_comm_stream)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states, wait_current_stream=False)
            self.shared_experts.linear_fc1_forward_and_act(rows)
        return rows, self._comm_manager.dispatched_probs

    def dispatch_postprocess(self, hidden_states, probs):
        manager = self._comm_manager
        rows, permuted_probs = manager.get_permuted_hidden_states_by_experts(hidden_states)
        return rows, manager.get_number_of_tokens_per_expert(), permuted_probs

    def combine_preprocess(self, hidden_states):
        return self._comm_manager.get_restored_hidden_states_by_experts(hidden_states)

    def token_combine(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        return self._comm_manager.combine(hidden_states, async_finish, allocate_on_comm_stream)

    def combine_postprocess(self, hidden_states):
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
            hidden_states += self.shared_experts.get_output()
        return hidden_states.view(self.hidden_shape)

    def set_shared_experts(self, shared_experts):
        assert self.config.moe_shared_expert_overlap
        self.shared_experts = shared_experts


class MoELayer(nn.Module):
    """`MoELayer`."""

    def __init__(self, config, router, experts, shared, groups):
        super().__init__()
        self.config, self.router, self.shared_experts = config, router(config), None
        self.shared_expert_overlap = config.moe_shared_expert_overlap
        self.moe_layer_recompute = False
        num_local_experts = config.num_moe_experts // groups.ep.size()
        self.token_dispatcher = FlexTokenDispatcher(num_local_experts, config, groups)
        self.experts = experts(num_local_experts, config, pg_collection=groups, name=None)
        if config.moe_shared_expert_intermediate_size is not None:
            gate = config.moe_shared_expert_gate
            self.shared_experts = shared(config=config, pg_collection=groups, gate=gate, name=None)
            if self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)

    def route(self, hidden_states):
        return self.router(hidden_states, None)

    def preprocess(self, hidden_states, probs, routing_map):
        return self.token_dispatcher.dispatch_preprocess(hidden_states, routing_map, probs)

    def dispatch(self, hidden_states, probs):
        if self.config.overlap_dispatch_backward_with_experts_wgrad:
            hidden_states = DelayedWgradForExperts.apply(self, hidden_states)
        return self.token_dispatcher.token_dispatch(hidden_states, probs)

    def routed_experts_compute(self, hidden_states, probs):
        args = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        out, bias = self.experts(*args)
        return self.token_dispatcher.combine_preprocess(out), bias

    def combine(self, output):
        return self.token_dispatcher.token_combine(output)

    def postprocess(self, output, shared_expert_output):
        output = self.token_dispatcher.combine_postprocess(output)
        return output if shared_expert_output is None else output + shared_expert_output

    def shared_experts_compute(self, hidden_states):
        if self.shared_experts is None or self.shared_expert_overlap:
            return None
        return self.shared_experts(hidden_states)

    def forward(self, hidden_states):
        if self.moe_layer_recompute:  # by `tensor_parallel.checkpoint`
            return checkpoint(self.custom_forward, hidden_states, use_reentrant=True)
        return self.custom_forward(hidden_states)

    def custom_forward(self, hidden_states):
        shared = self.shared_experts_compute(hidden_states)
        hidden, probs = self.preprocess(hidden_states, *self.route(hidden_states))
        out, bias = self.routed_experts_compute(*self.dispatch(hidden, probs))
        return self.postprocess(self.combine(out), shared), bias

    def backward_dw(self, routed_experts=True, shared_experts=False):
        self.experts.backward_dw()


class DelayedWgradForExperts(torch.autograd.Function):
    """`_RegisterDelayedWgradForExperts`, without its stream."""

    @staticmethod
    def forward(ctx, module, hidden_states):
        ctx.module = module
        return hidden_states

    @staticmethod
    def backward(ctx, grad):
        ctx.module.backward_dw(routed_experts=True, shared_experts=False)
        for param in ctx.module.parameters():
            if getattr(param, "post_wgrad_grad_acc_hook", None) is not None:
                param.post_wgrad_grad_acc_hook()
        return None, grad


def make_config(source, parts, num_experts, **more):
    _, idx, _, up, down, _ = parts
    sizes = dict(
        num_layers=1, hidden_size=up.shape[2], num_attention_heads=1, num_moe_experts=num_experts,
        moe_router_topk=idx.shape[1], moe_ffn_hidden_size=down.shape[2], add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, moe_token_dispatcher_type="allgather",
    )  # fmt: skip
    if source == "Megatron-Core":
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(**sizes)
    else:
        others = dict.fromkeys(("delay_wgrad_compute", "gradient_accumulation_fusion"), False)
        config = SimpleNamespace(
            **sizes, **others, params_dtype=torch.float32, moe_router_dtype=None,
            overlap_dispatch_backward_with_experts_wgrad=False, perform_initialization=True,
            init_method=nn.init.normal_, output_layer_init_method=nn.init.normal_,
            moe_pad_expert_input_to_capacity=False, moe_shared_expert_intermediate_size=None,
            moe_shared_expert_gate=False, moe_shared_expert_overlap=False,
        )  # fmt: skip
    vars(config).update(more)  # Megatron allows some of it with TransformerEngine alone
    return config


def make_layer(group, source, parts, buffer, fused, tensor_parallel=False, **more):
    """A MoELayer with the weights of `parts`, over `buffer`: its experts are on the ranks of the
    group, or with tensor_parallel parts of each."""
    up, down = parts[3:5]
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    ep, tp = (alone, group) if tensor_parallel else (group, alone)
    groups = SimpleNamespace(
        ep=ep, expt_tp=tp, tp_ep=group, tp=alone, expt_dp=alone, cp=alone, tp_cp=alone
    )
    config = make_config(source, parts, ep.size() * len(up), **more)
    experts = partial(Experts, buffer=buffer) if fused else GroupedMLP
    shared = partial(shared_experts, source)
    if source == "Megatron-Core":
        from megatron.core.transformer.moe import moe_layer

        torch.compiler.set_stance("force_eager")  # its jit_fuser
        modules = moe_layer.MoESubmodules(router=Router, experts=experts, shared_experts=shared)
        layer = moe_layer.MoELayer(config, modules, pg_collection=groups)
        alignment = None
    else:
        layer, alignment = MoELayer(config, Router, experts, shared, groups), 4
    assert use_moe_engine(layer, buffer, alignment=alignment) == 1
    with torch.no_grad():
        layer.experts.gate_up_proj.copy_(up)
        layer.experts.down_proj.copy_(down)
    return layer.to(up.device)


# --- Schedules -----------------------------------------------------------------------------------


class Node:
    """`ScheduleNode`: a part of a layer whose graph ends at its inputs."""

    def __init__(self, function, *inputs, frees=False):
        self.inputs = [one.detach().requires_grad_(one.requires_grad) for one in inputs]
        out = function(*self.inputs)
        self.outputs = out if isinstance(out, tuple) else (out,)
        if frees:  # `should_free_input`: the memory goes, while autograd may hold the tensor
            self.inputs[0].untyped_storage().resize_(0)

    def backward(self, grads):
        torch.autograd.backward(self.outputs, grads)
        return [one.grad for one in self.inputs]


class MicroBatch:
    """The nodes of one micro-batch in one layer, as `build_transformer_layer_callables` has them:
    `token_probs` and `dispatched_probs` of the manager are put in place detached."""

    def __init__(self, layer, x, idx, weights, dy):
        self.layer, self.manager = layer, layer.token_dispatcher._comm_manager
        self.idx, self.dy, self.leaves = idx, dy, (x, weights)
        self.out = None

    def attention(self):
        def function(x, weights):
            self.layer.router.routing = self.idx, weights
            return self.layer.preprocess(x, *self.layer.route(x))

        self.first = Node(function, *self.leaves)

    def dispatch(self):
        def function(tokens, probs):
            self.manager.token_probs = probs
            return self.layer.dispatch(tokens, probs)

        self.sent = Node(function, *self.first.outputs)

    def mlp(self):
        def function(rows, probs):
            self.manager.dispatched_probs = probs
            return self.layer.routed_experts_compute(rows, probs)[0]

        self.computed = Node(function, *self.sent.outputs)

    def combine(self):
        def function(rows):
            out = self.layer.postprocess(self.layer.combine(rows), None)
            return out + torch.zeros_like(out)  # the residual

        self.last = Node(function, *self.computed.outputs, frees=True)
        self.out = self.last.outputs[0].detach()

    def combine_backward(self):
        self.grads = self.last.backward([self.dy])

    def mlp_backward(self):
        self.grads = self.computed.backward(self.grads)

    def backward_dw(self):
        if self.layer.config.delay_wgrad_compute:
            self.layer.backward_dw()

    def dispatch_backward(self):
        self.grads = self.sent.backward(self.grads)

    def attention_backward(self):
        for leaf, grad in zip(self.leaves, self.first.backward(self.grads), strict=True):
            leaf.grad = grad


FORWARD = "attention", "dispatch", "mlp", "combine"
BACKWARD = "combine_backward", "mlp_backward", "backward_dw", "dispatch_backward"


def one_f_one_b(first, second):
    """Two micro-batches in the order of `TransformerLayerSchedulePlan.run`: the first forward, its
    backward and the forward of the second in turns, the backward of the second."""
    for name in FORWARD:
        getattr(first, name)()
    first.combine_backward()
    second.attention()
    first.mlp_backward()
    second.dispatch()
    first.backward_dw()
    first.dispatch_backward()
    second.mlp()
    second.combine()
    first.attention_backward()
    for name in (*BACKWARD, "attention_backward"):
        getattr(second, name)()
