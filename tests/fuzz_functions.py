"""What `test_fuzz` calls and no other rank takes part in: products, sizes, events."""

from __future__ import annotations

from typing import Any

import torch
from fuzz_world import EXPERTS, HIDDEN, TOKENS, TOPK, Target, World

import moe_engine as api
from moe_engine import grouped_gemm as gemm


def products() -> dict[str, Target]:
    """The grouped GEMMs."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, w, up, down = randn(6, 16), randn(2, 16, 16), randn(2, 16, 16), randn(2, 16, 8)
    grad, offsets = randn(6, 16), torch.tensor([0, 2, 6])
    index, weight = torch.tensor([5, 4, 3, 2, 1, 0]), torch.rand(6, generator=generator)
    schedule = gemm.tile_schedule(offsets, 6, 64)
    tensor, maybe = "tensor", "optional tensor"
    return {
        "grouped_gemm": Target(
            gemm.grouped_gemm,
            {"x": x, "w": w, "offsets": offsets, "row_index": index, "activation": "none",
             "bias": randn(2, 16), "row_weight": weight, "out": randn(6, 16),
             "schedule": schedule},
            {"x": tensor, "w": tensor, "offsets": tensor, "row_index": maybe,
             "activation": "word", "bias": maybe, "row_weight": maybe, "out": maybe,
             "schedule": "optional object"},
        ),
        "grouped_gemm of fp8": Target(
            gemm.grouped_gemm,
            {"x": (x.to(torch.float8_e4m3fn), torch.ones(6, 1)),
             "w": (w.to(torch.float8_e4m3fn), torch.ones(2, 1, 1)), "offsets": offsets},
            {"x": "tuple", "w": "tuple"},
        ),
        "grouped_mlp": Target(
            gemm.grouped_mlp,
            {"x": x, "w_up": up, "w_down": down, "offsets": offsets, "row_index": index,
             "row_weight": weight, "activation": "swiglu", "b_up": randn(2, 16),
             "b_down": randn(2, 16)},
            {"x": tensor, "w_up": tensor, "w_down": tensor, "offsets": tensor,
             "row_index": maybe, "row_weight": maybe, "activation": "word", "b_up": maybe,
             "b_down": maybe},
        ),
        "dgrad": Target(
            gemm.dgrad,
            {"grad": grad, "w": w, "offsets": offsets, "schedule": schedule, "out": randn(6, 16)},
            {"grad": tensor, "w": tensor, "offsets": tensor, "schedule": "optional object",
             "out": maybe},
        ),
        "wgrad": Target(
            gemm.wgrad,
            {"grad": grad, "x": x, "offsets": offsets, "row_offset": index * 16,
             "out": randn(2, 16, 16), "accumulate": False},
            {"grad": tensor, "x": tensor, "offsets": tensor, "row_offset": maybe, "out": maybe,
             "accumulate": "flag"},
        ),
        "grouped_gemm by row_offset": Target(
            gemm.grouped_gemm,
            {"x": x, "w": w, "offsets": offsets, "row_offset": index * 16, "out": randn(6, 16)},
            {"x": tensor, "w": tensor, "offsets": tensor, "row_offset": maybe, "out": maybe},
        ),
        "tile_schedule": Target(
            gemm.tile_schedule,
            {"offsets": offsets, "max_rows": 6, "block_m": 64},
            {"offsets": tensor, "max_rows": "int", "block_m": "any int"},
            lambda schedule: schedule.tolist(),
        ),
        "gemm_config": Target(
            gemm.gemm_config,
            {"w": w, "num_rows": 6, "activation": "none", "gathered": False, "transposed": False,
             "block_m": 64},
            {"w": tensor, "num_rows": "any int", "activation": "word", "block_m": "optional int"},
            str,
        ),
        "tune_gemm": Target(
            gemm.tune_gemm,
            {"num_rows": 8, "num_experts": 2, "num_columns": 16, "depth": 16},
            {"num_rows": "any int", "depth": "any int"},
        ),
    }  # fmt: skip


def plain(world: World) -> dict[str, Target]:
    """What takes numbers alone, and events."""
    hint = {"max_tokens": TOKENS, "hidden_bytes": 32, "num_ranks": 2, "num_experts": EXPERTS,
            "num_topk": TOPK, "num_slots": 2}  # fmt: skip
    low_latency = {"num_max_dispatch_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_ranks": 2,
                   "num_experts": EXPERTS, "num_slots": 2}  # fmt: skip
    chunks = {"num_sms": 4, "num_max_nvl_chunked_send_tokens": 6}
    sizes = {"hidden_bytes": 32, "num_ranks": 2}

    def set_num_sms(new_num_sms: Any) -> None:
        before = api.Buffer.num_sms
        api.Buffer.set_num_sms(new_num_sms)
        api.Buffer.num_sms = before

    def wait(event: Any, extra_tensors: Any, release_handle: Any) -> None:
        overlap = api.EventOverlap(event, extra_tensors)
        overlap.current_stream_wait(release_handle)
        with overlap(release_handle):
            pass

    return {
        "size_hint": Target(api.Buffer.size_hint, hint, dict.fromkeys(hint, "any int")),
        "low-latency hint": Target(
            api.Buffer.get_low_latency_rdma_size_hint,
            low_latency,
            dict.fromkeys(low_latency, "any int"),
        ),
        "nvl hint": Target(
            api.Config(4).get_nvl_buffer_size_hint, sizes, dict.fromkeys(sizes, "any int")
        ),
        "rdma hint": Target(
            api.Config(4).get_rdma_buffer_size_hint, sizes, dict.fromkeys(sizes, "any int")
        ),
        "Config": Target(api.Config, chunks, {"num_sms": "any int"}, lambda config: config.num_sms),
        "LayerConfig": Target(
            lambda num_stages, **flags: api.LayerConfig(num_stages, **flags).check(),
            {"num_stages": 2, "num_own_stages": 1, "claims_tiles": False},
            {"num_stages": "any int", "num_own_stages": "any int", "claims_tiles": "flag"},
        ),
        "set_num_sms": Target(set_num_sms, {"new_num_sms": 4}, {"new_num_sms": "any int"}),
        "dispatch config": Target(
            api.Buffer.get_dispatch_config, {"num_ranks": 2}, {"num_ranks": "any int"}
        ),
        "capture": Target(api.Buffer.capture, {}, {}),
        "is_sm90_compiled": Target(api.Buffer.is_sm90_compiled, {}, {}),
        "EventOverlap": Target(
            wait,
            {"event": None, "extra_tensors": None, "release_handle": False},
            {"event": "event", "extra_tensors": "unused", "release_handle": "flag"},
        ),
        "hook": Target(
            api.EventOverlap().register_hook_after_wait,
            {"hook_after_wait": print},
            {"hook_after_wait": "callable"},
        ),
        "destroyed Buffer": Target(
            _destroyed(world).get_dispatch_layout,
            {"topk_idx": world.idx, "num_experts": EXPERTS},
            {"topk_idx": "tensor", "num_experts": "int"},
        ),
    }


def _destroyed(world: World) -> api.Buffer:
    buffer = api.Buffer(world.group, 1 << 20, backend="collective")
    buffer.destroy()
    return buffer
