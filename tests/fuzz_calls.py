"""The public callables with good arguments, and of what kind each is: what `test_fuzz` calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import torch

import moe_engine as api
from moe_engine import grouped_gemm as gemm
from moe_engine import low_latency_reference, reference, symm

TOKENS, HIDDEN, EXPERTS, TOPK, COLUMNS = 4, 16, 4, 2, 8
TIMEOUT_S = 15.0
OPTIONS = {"timeout_s": TIMEOUT_S, "decode_tokens": 0}
FLAGS = {"async_finish": "flag", "allocate_on_comm_stream": "flag"}
EVENT = {"previous_event": "event"}
SIZES = {"max_tokens": TOKENS, "hidden": HIDDEN, "num_experts": EXPERTS, "num_topk": TOPK}


@dataclass(frozen=True)
class Target:
    """A callable, its good arguments, the kind of each (see `fuzz_values.KINDS`), and what of its
    result is compared. `uses`: the Buffer that a bad call may have spoiled."""

    call: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, str]
    keep: Callable[[Any], Any] = lambda result: result
    uses: str | None = None


def flat(result: Any) -> list[Any]:
    """The tensors and plain values of a result, in order."""
    if isinstance(result, tuple | list):
        return [item for part in result for item in flat(part)]
    if isinstance(result, torch.Tensor):
        return [result.detach().clone()]
    plain = result is None or isinstance(result, int | float | str | torch.dtype)
    return [result] if plain else [type(result).__name__]


def same(one: list[Any], other: list[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return len(one) == len(other) and all(map(equal, one, other))


class World:
    """Buffers of every kind on a group, and a dispatch's results on each."""

    def __init__(self, group: Any):
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.num_local = EXPERTS // self.num_ranks
        self._make_inputs()
        self.buffers: dict[str, api.Buffer] = {}
        self.make()

    def _make_inputs(self) -> None:
        kind = torch.bfloat16
        tokens = [cases.tokens(TOKENS, HIDDEN, TOPK, kind, r) for r in range(self.num_ranks)]
        self.all_x, self.all_w = map(list, zip(*tokens, strict=True))
        ranks = range(self.num_ranks)
        self.all_idx = [cases.route("uniform", TOKENS, EXPERTS, TOPK, rank) for rank in ranks]
        self.x, self.w, self.idx = (
            part[self.rank] for part in (self.all_x, self.all_w, self.all_idx)
        )
        generator = torch.Generator().manual_seed(7)
        up = torch.randn(EXPERTS, 2 * COLUMNS, HIDDEN, generator=generator).to(kind)
        down = torch.randn(EXPERTS, HIDDEN, COLUMNS, generator=generator).to(kind)
        self.all_up, self.all_down = up.chunk(self.num_ranks), down.chunk(self.num_ranks)
        self.up, self.down = self.all_up[self.rank].clone(), self.all_down[self.rank].clone()

    def make(self) -> None:
        """Make the Buffers, or replace those that were lost, and what handles need."""
        for name in ("normal", "collective", "decode", "low latency"):
            if name not in self.buffers:
                self.buffers[name] = self._new(name)
        self.layout, self.recv, self.handle = {}, {}, {}
        for name in ("normal", "collective"):
            buffer = self.buffers[name]
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(self.idx, EXPERTS)
            self.layout[name] = per_rank, None, in_rank, per_expert
            args = self.x, None, *self.layout[name], self.idx, self.w
            self.recv[name], _, _, _, self.handle[name], _ = buffer.dispatch(*args)
        rows, self.counts, handle, _, _ = self.buffers["low latency"].low_latency_dispatch(
            self.x, self.idx, TOKENS, EXPERTS, use_fp8=False
        )
        valid = torch.arange(rows.shape[1]) < self.counts[:, None]
        self.y = torch.where(valid[..., None], rows, 0)
        self.low_latency_handle = handle

    def _new(self, name: str) -> api.Buffer:
        if name == "low latency":
            hint = api.Buffer.get_low_latency_rdma_size_hint(
                TOKENS, HIDDEN, self.num_ranks, EXPERTS
            )
            options = api.Options(timeout_s=TIMEOUT_S)
            return api.Buffer(
                self.group, 0, hint, low_latency_mode=True, enable_shrink=True, options=options
            )
        sizes = TOKENS, HIDDEN, EXPERTS, TOPK
        options = {"decode": api.Options(timeout_s=TIMEOUT_S)}.get(name, api.Options(**OPTIONS))
        backend = "collective" if name == "collective" else "auto"
        return api.Buffer.for_tokens(self.group, *sizes, backend=backend, options=options)

    def lose(self, name: str) -> None:
        """Replace a Buffer."""
        self.buffers.pop(name).destroy()
        self.make()

    def quick(self, name: str) -> list[Any]:
        """A good call that takes little time."""
        buffer = self.buffers[name]
        return flat(buffer.get_dispatch_layout(self.idx, EXPERTS)[:4])

    def whole(self, name: str) -> list[Any]:
        """Good calls of every verb of a Buffer."""
        buffer = self.buffers[name]
        if name == "decode":
            return flat(api.moe_ffn(self.x, self.idx, self.w, self.up, self.down, buffer))
        if name == "low latency":
            args = self.x, self.idx, TOKENS, EXPERTS
            _, counts, handle, _, _ = buffer.low_latency_dispatch(*args, use_fp8=False)
            out, _, _ = buffer.low_latency_combine(self.y, self.idx, self.w, handle)
            return flat((counts, out))
        args = self.x, None, *self.layout[name], self.idx, self.w
        recv, idx, w, counts, handle, _ = buffer.dispatch(*args)
        out, back, _ = buffer.combine(recv, handle, w)
        return flat((recv, idx, w, counts, out, back))

    def check_oracle(self) -> None:
        """The good calls give what the reference does."""
        received = reference.dispatch(self.all_x, self.all_idx, self.all_w, EXPERTS)
        mine = received[self.rank]
        counts = mine.num_tokens_per_expert
        rows = [part.x for part in received]
        out = reference.combine(rows, received, self.all_idx, [TOKENS] * self.num_ranks, EXPERTS)[
            self.rank
        ]
        weights = torch.where(self.idx >= 0, self.w, 0.0)
        want = flat((mine.x, mine.topk_idx, mine.topk_weights, counts, out, weights))
        for name in ("normal", "collective"):
            assert same(self.whole(name), want), name
        layer = reference.moe_ffn(
            self.all_x, self.all_idx, self.all_w, list(self.all_up), list(self.all_down)
        )[self.rank]
        for name in ("normal", "decode"):
            args = self.x, self.idx, self.w, self.up, self.down, self.buffers[name]
            assert cases.relative_error(api.moe_ffn(*args), layer) < 0.02
        got = low_latency_reference.low_latency_dispatch(
            self.all_x, self.all_idx, TOKENS, EXPERTS, use_fp8=False
        )
        sums = low_latency_reference.low_latency_combine(
            [part.x for part in got], got, self.all_idx, self.all_w
        )
        counts, out = self.whole("low latency")
        assert torch.equal(counts, got[self.rank].counts)
        assert cases.relative_error(out, sums[self.rank]) < 0.02


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
            {"hidden": "int", "num_experts": "any int", "num_topk": "int", "dtype": "dtype"},
            uses=name,
        ),
        "release": Target(buffer.release, {}, {}, uses=name),
        "check": Target(buffer.check, {}, {}, uses=name),
        "stream": Target(buffer.get_comm_stream, {}, {}, uses=name),
        "internode": Target(buffer.internode_dispatch, {"x": world.x}, {"x": "unused"}, uses=name),
    }  # fmt: skip


def low_latency_verbs(world: World) -> dict[str, Target]:
    name = "low latency"
    buffer, handle = world.buffers[name], tuple(world.low_latency_handle)
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
            {"x": "tensor", "topk_idx": "tensor", "topk_weights": "tensor", "handle": "tuple",
             "use_logfmt": "flag", "zero_copy": "unused", "async_finish": "flag",
             "return_recv_hook": "flag", "out": "optional tensor",
             "combine_wait_recv_cost_stats": "optional tensor"},
            lambda result: finish(result)[0],
            name,
        ),
        "next combine buffer": Target(
            buffer.get_next_low_latency_combine_buffer,
            {"handle": handle},
            {"handle": "tuple"},
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
    del good["buffer"]
    del kinds["buffer"]
    found["method layer"] = Target(
        world.buffers["normal"].moe_ffn,
        {**good, "async_finish": False},
        {**kinds, "async_finish": "flag"},
        lambda result: result[0],
        "normal",
    )
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
             "num_copy_programs": 2, "num_return_programs": 2, "own_apart": False, "group_m": 8},
            {"num_stages": "any int", "num_return_stages": "any int",
             "num_push_programs": "any int", "num_copy_programs": "any int",
             "num_return_programs": "any int", "own_apart": "flag", "group_m": "any int"},
            made,
        ),
        "allocate": Target(
            symm.allocate,
            {"group": world.group, "num_bytes": 64, "backend": "auto", "device": "cpu"},
            {"num_bytes": "int", "backend": "word", "device": "word"},
            lambda block: block.local,
        ),
    }  # fmt: skip


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
            lambda num_stages, own_apart: api.LayerConfig(num_stages, own_apart=own_apart).check(),
            {"num_stages": 2, "own_apart": False},
            {"num_stages": "any int", "own_apart": "flag"},
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
            api.EventOverlap().register_hook_after_wait, {"hook": print}, {"hook": "object"}
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
