"""Buffers of every kind with good inputs, on which `test_fuzz` makes calls, and what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import torch

import moe_engine as api
from moe_engine import low_latency_reference, reference

TOKENS, HIDDEN, EXPERTS, TOPK, COLUMNS = 4, 16, 4, 2, 8
TIMEOUT_S = 15.0
OPTIONS = {"timeout_s": TIMEOUT_S, "decode_tokens": 0}


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
