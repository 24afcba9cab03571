"""The public callables with good arguments, and of what kind each is: what `test_fuzz` calls."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_functions import plain, products
from fuzz_world import COLUMNS, EXPERTS, HIDDEN, OPTIONS, TOKENS, TOPK, Target, World

import moe_engine as api
from moe_engine import symm

FLAGS = {"async_finish": "flag", "allocate_on_comm_stream": "flag"}
EVENT = {"previous_event": "event"}
SIZES = {"max_tokens": TOKENS, "hidden": HIDDEN, "num_experts": EXPERTS, "num_topk": TOPK}


def targets(world: World) -> dict[str, Target]:
    """Everything public, by name; on several ranks what these do together."""
    found = {}
    for name in ("normal", "collective"):
        found |= {f"{name} {verb}": target for verb, target in verbs(world, name).items()}
    found |= low_latency_verbs(world) | layers(world) | makers(world)
    return found if world.num_ranks > 1 else found | products() | plain(world)


def verbs(world: World, name: str) -> dict[str, Target]:
    buffer, handle, recv = world.buffers[name], world.handle[name], world.recv[name]
    per_rank, _, in_rank, per_expert = world.layout[name]
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    routing = {"topk_idx": world.idx, "topk_weights": world.w}
    config = {"config": "optional object"}
    num_sms = {"config": api.Config(4)}

    def dispatched(result: Any) -> Any:
        if isinstance(result[0], torch.Tensor) and result[0].dtype == torch.int64:
            buffer.release()
        return result[:4]

    plain_dispatch = Target(
        buffer.dispatch,
        {"x": world.x, **layout, **routing, "expert_alignment": 1, "num_worst_tokens": 0,
         **num_sms, "previous_event": None, "async_finish": False,
         "allocate_on_comm_stream": False, "in_place": False, "num_tokens_per_rdma_rank": None},
        {"x": "tensor", "expert_alignment": "any int", "num_worst_tokens": "any int",
         "in_place": "flag", "num_tokens_per_rdma_rank": "unused",
         **dict.fromkeys(layout, "tensor"), **dict.fromkeys(routing, "optional tensor"),
         **config, **EVENT, **FLAGS},
        dispatched,
        name,
    )  # fmt: skip
    scales = torch.ones(TOKENS, 1)
    return {
        "layout": Target(
            buffer.get_dispatch_layout,
            {"topk_idx": world.idx, "num_experts": EXPERTS, "previous_event": None,
             "async_finish": False, "allocate_on_comm_stream": False},
            {"topk_idx": "tensor", "num_experts": "any int", **EVENT, **FLAGS},
            lambda result: result[:4],
            name,
        ),
        "dispatch": plain_dispatch,
        "dispatch of fp8": Target(
            buffer.dispatch,
            {"x": (world.x.to(torch.float8_e4m3fn), scales), **layout, **routing},
            {"x": "tuple"},
            lambda result: result[1:4],
            name,
        ),
        "cached dispatch": Target(
            buffer.dispatch,
            {"x": world.x, "handle": tuple(handle), **num_sms},
            {"x": "tensor", "handle": "optional tuple", **config},
            lambda result: result[0],
            name,
        ),
        "combine": Target(
            buffer.combine,
            {"x": recv, "handle": tuple(handle), "topk_weights": torch.ones(len(recv), TOPK),
             "bias": world.x, **num_sms, "previous_event": None, "async_finish": False,
             "allocate_on_comm_stream": False},
            {"x": "tensor", "handle": "tuple", "topk_weights": "optional tensor",
             "bias": "optional tensor", **config, **EVENT, **FLAGS},
            lambda result: result[:2],
            name,
        ),
        "combine with biases": Target(
            buffer.combine,
            {"x": recv, "handle": tuple(handle), "bias": (world.x, world.x)},
            {"bias": "optional tuple"},
            lambda result: result[0],
            name,
        ),
        "local tensor": Target(
            buffer.get_local_buffer_tensor,
            {"dtype": torch.int32, "size": (2, 2), "offset": 8, "use_rdma_buffer": False},
            {"dtype": "any dtype", "size": "sizes", "offset": "any int",
             "use_rdma_buffer": "unused"},
            lambda result: (result.shape, result.dtype),
            name,
        ),
        "layer config": Target(
            buffer.layer_config,
            {"w_gate_up": world.up, "num_topk": TOPK},
            {"w_gate_up": "tensor", "num_topk": "int"},
            str,
            name,
        ),
        "warm up": Target(
            buffer.warmup,
            {"hidden": HIDDEN, "num_experts": EXPERTS, "num_topk": TOPK, "dtype": torch.bfloat16},
            {"hidden": "int", "num_experts": "any int", "num_topk": "int",
             "dtype": "optional dtype"},
            uses=name,
        ),
        "release": Target(buffer.release, {}, {}, uses=name),
        "check": Target(buffer.check, {}, {}, uses=name),
        "stream": Target(buffer.get_comm_stream, {}, {}, uses=name),
    }  # fmt: skip


def low_latency_verbs(world: World) -> dict[str, Target]:
    name = "low latency"
    buffer, handle = world.buffers[name], world.low_latency_handle
    sizes = {"num_max_dispatch_tokens_per_rank": TOKENS, "num_experts": EXPERTS}
    waits = torch.zeros(world.num_ranks, dtype=torch.int64)

    def finish(result: Any) -> Any:
        if result[-1] is not None:
            result[-1]()
        return result

    def dispatched(result: Any) -> Any:
        _, counts, handle, *_ = finish(result)
        return counts, handle[1]

    return {
        "low-latency dispatch": Target(
            buffer.low_latency_dispatch,
            {"x": world.x, "topk_idx": world.idx, **sizes,
             "cumulative_local_expert_recv_stats": torch.zeros(world.num_local, dtype=torch.int32),
             "dispatch_wait_recv_cost_stats": waits, "use_fp8": False, "round_scale": False,
             "use_ue8m0": False, "async_finish": False, "return_recv_hook": False},
            {"x": "tensor", "topk_idx": "tensor", **dict.fromkeys(sizes, "any int"),
             "cumulative_local_expert_recv_stats": "optional tensor",
             "dispatch_wait_recv_cost_stats": "optional tensor", "use_fp8": "flag",
             "round_scale": "flag", "use_ue8m0": "flag", "async_finish": "flag",
             "return_recv_hook": "flag"},
            dispatched,
            name,
        ),
        "low-latency combine": Target(
            buffer.low_latency_combine,
            {"x": world.y, "topk_idx": world.idx, "topk_weights": world.w, "handle": handle,
             "use_logfmt": False, "zero_copy": False, "async_finish": False,
             "return_recv_hook": False, "out": torch.zeros_like(world.x),
             "combine_wait_recv_cost_stats": waits},
            {"x": "tensor", "topk_idx": "tensor", "topk_weights": "tensor",
             "handle": "low-latency handle",
             "use_logfmt": "flag", "zero_copy": "unused", "async_finish": "flag",
             "return_recv_hook": "flag", "out": "optional tensor",
             "combine_wait_recv_cost_stats": "optional tensor"},
            lambda result: finish(result)[0],
            name,
        ),
        "next combine buffer": Target(
            buffer.get_next_low_latency_combine_buffer,
            {"handle": handle},
            {"handle": "low-latency handle"},
            lambda result: (result.shape, result.dtype),
            name,
        ),
        "clean": Target(
            buffer.clean_low_latency_buffer,
            {"num_max_dispatch_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_experts": EXPERTS},
            {"num_max_dispatch_tokens_per_rank": "any int", "hidden": "any int",
             "num_experts": "any int"},
            uses=name,
        ),
        "mask": Target(
            buffer.low_latency_update_mask_buffer,
            {"rank_to_mask": 0, "mask": False},
            {"rank_to_mask": "any int", "mask": "flag"},
            lambda result: buffer.low_latency_clean_mask_buffer(),
            name,
        ),
        "masks": Target(
            buffer.low_latency_query_mask_buffer,
            {"mask_status": torch.zeros(world.num_ranks, dtype=torch.int32)},
            {"mask_status": "tensor"},
            uses=name,
        ),
        "masks of a Buffer without": Target(
            world.buffers["normal"].low_latency_query_mask_buffer,
            {"mask_status": torch.zeros(world.num_ranks, dtype=torch.int32)},
            {"mask_status": "tensor"},
            uses="normal",
        ),
        "low-latency dispatch of a Buffer without": Target(
            world.buffers["collective"].low_latency_dispatch,
            {"x": world.x, "topk_idx": world.idx, **sizes},
            {"x": "tensor"},
            uses="collective",
        ),
    }  # fmt: skip


def layers(world: World) -> dict[str, Target]:
    args = {"x": world.x, "topk_idx": world.idx, "topk_weights": world.w}
    weights = {"w_gate_up": world.up, "w_down": world.down}
    tensors = dict.fromkeys((*args, *weights), "tensor")
    found = {}
    for name in ("normal", "collective", "decode"):
        good = {**args, **weights, "buffer": world.buffers[name], "max_tokens": TOKENS}
        kinds = {**tensors, "buffer": "object", "max_tokens": "optional int"}
        found[f"{name} layer"] = Target(api.moe_ffn, good, kinds, uses=name)
    good = {**args, **weights, "buffer": world.buffers["normal"], "max_tokens": TOKENS}
    found["started layer"] = Target(
        api.start_moe_ffn, good, kinds, lambda layer: layer.finish(), "normal"
    )
    found["layer with gradients"] = Target(
        with_gradients,
        {**{name: _leaf(part) for name, part in good.items()}, "save": "auto", "wgrad": None,
         "layout": "concatenated", "return_counts": False},
        {**kinds, "save": "word", "wgrad": "optional object", "layout": "word",
         "return_counts": "flag"},
        uses="normal",
    )  # fmt: skip
    module = api.MoEFeedForward(world.num_local, HIDDEN, COLUMNS, world.buffers["normal"])
    with torch.no_grad():
        module.gate_up_proj.copy_(world.up)
        module.down_proj.copy_(world.down)
    found["module"] = Target(module, dict(args), dict.fromkeys(args, "tensor"), uses="normal")
    found["new module"] = Target(
        api.MoEFeedForward,
        {"num_local_experts": 2, "hidden": HIDDEN, "intermediate": COLUMNS,
         "buffer": world.buffers["normal"], "dtype": torch.bfloat16},
        {"num_local_experts": "int", "hidden": "int", "intermediate": "int", "buffer": "object",
         "dtype": "dtype"},
        lambda module: [(part.shape, part.dtype) for part in module.parameters()],
    )  # fmt: skip
    return found


def with_gradients(**given: Any) -> tuple[Any, ...]:
    """A layer and its backward."""
    result = api.moe_ffn(**given)
    out = result[0] if isinstance(result, tuple) else result
    leaves = [part for part in given.values() if getattr(part, "requires_grad", False)]
    return result, *torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


def _leaf(part: Any) -> Any:
    """A floating-point tensor that wants a gradient; anything else as it is."""
    is_leaf = isinstance(part, torch.Tensor) and part.is_floating_point()
    return part.clone().requires_grad_() if is_leaf else part


def makers(world: World) -> dict[str, Target]:
    """What makes Buffers and memory. Sizes that only a machine's memory can refuse are left out."""

    def made(buffer: Any) -> Any:
        kept = buffer.rank, buffer.group_size, buffer.backend
        buffer.destroy()
        return kept

    options = api.Options(**OPTIONS)
    numbers = {"num_slots": 2, "max_tokens": TOKENS, "decode_tokens": 4}
    return {
        "Buffer": Target(
            api.Buffer,
            {"group": world.group, "num_nvl_bytes": 1 << 20, "num_rdma_bytes": 1 << 20,
             "low_latency_mode": True, "num_qps_per_rank": 24,
             "allow_nvlink_for_low_latency_mode": True, "allow_mnnvl": False,
             "explicitly_destroy": False, "enable_shrink": False, "comm": None,
             "backend": "auto", "options": options, "use_fabric": False},
            {"group": "optional object", "num_nvl_bytes": "int", "num_rdma_bytes": "int",
             "low_latency_mode": "flag", "num_qps_per_rank": "unused",
             "allow_nvlink_for_low_latency_mode": "unused", "allow_mnnvl": "unused",
             "explicitly_destroy": "unused", "enable_shrink": "flag", "comm": "optional object",
             "backend": "word", "options": "object", "use_fabric": "unused"},
            made,
        ),
        "for_tokens": Target(
            api.Buffer.for_tokens,
            {"group": world.group, **SIZES, "dtype": torch.bfloat16, "backend": "auto",
             "options": options},
            {"group": "optional object", **dict.fromkeys(SIZES, "int"), "dtype": "dtype",
             "backend": "word", "options": "object"},
            made,
        ),
        "Buffer of Options": Target(
            lambda **given: api.Buffer(world.group, 1 << 20, options=api.Options(**given)),
            {**numbers, "timeout_s": 5.0, "debug": False, "layer": api.LayerConfig()},
            {**dict.fromkeys(numbers, "any int"), "max_tokens": "optional int",
             "timeout_s": "number", "debug": "flag", "layer": "optional object"},
            made,
        ),
        "Buffer of LayerConfig": Target(
            lambda **given: api.Buffer(
                world.group, 1 << 20, options=api.Options(layer=api.LayerConfig(**given))
            ),
            {"num_stages": 2, "num_return_stages": 2, "num_push_programs": 2,
             "num_copy_programs": 2, "num_return_programs": 2, "num_own_stages": 1, "group_m": 8,
             "claims_tiles": False},
            {"num_stages": "any int", "num_return_stages": "any int",
             "num_push_programs": "any int", "num_copy_programs": "any int",
             "num_return_programs": "any int", "num_own_stages": "any int", "group_m": "any int",
             "claims_tiles": "flag"},
            made,
        ),
        "allocate": Target(
            symm.allocate,
            {"group": world.group, "num_bytes": 64, "backend": "auto", "device": "cpu"},
            {"num_bytes": "int", "backend": "word", "device": "word"},
            lambda block: block.local,
        ),
    }  # fmt: skip
