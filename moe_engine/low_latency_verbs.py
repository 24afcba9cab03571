"""DeepEP V1's low-latency calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from . import checks
from .call_memory import leaves
from .debug_checks import check_low_latency_values
from .dispatch.low_latency import LowLatencyTokens
from .engines.hooked_calls import HookedCalls
from .engines.low_latency import LowLatency
from .errors import BackendError, CapacityError, ShapeError
from .handles import (
    MAX_HIDDEN,
    AnyLowLatencyHandle,
    as_low_latency_handle,
    check_low_latency_handle,
    fields_of,
)
from .lifecycle import BufferLifecycle, local_verb, verb
from .low_latency_handle import LowLatencySizes
from .options import low_latency_size_hint
from .streams import EventOverlap, record

Hook = Callable[[], None]


class LowLatencyVerbs(BufferLifecycle):
    """Dispatch and combine at decode sizes, in tens of microseconds.

    They need a Buffer made with low_latency_mode=True and num_rdma_bytes of
    `get_low_latency_rdma_size_hint`. T may differ per rank, up to num_max_dispatch_tokens_per_rank
    (M), which must be equal on all. All shapes are static and nothing waits for the host, so calls
    can be captured in a CUDA graph and replayed with other tokens and routing.

    With return_recv_hook only the sending half of a call is launched; the hook launches the rest on
    the then current stream, and no SM is held in between. Up to `Options.num_slots` calls may wait
    for their hooks. What a call returns may be read once its hook was called. A graph that is
    captured holds both halves of its calls, and a replay counts as calls that were made after those
    whose hooks are missing.

    A hook reads nothing of the caller's but `out` and the stats, whose sizes are those of the call:
    x, topk_idx and topk_weights may change before it. On several nodes rows in bf16 that a rank
    sends to itself are read in x, which must not change before the hook.

    On several nodes a token crosses the network once for each node, and layers of few tokens run by
    these calls. Ranks then also forward for one another in the second halves: all ranks call their
    hooks in the same order among their calls, and replay no graph while a hook is missing.

    If a rank is masked after its counts have arrived and before its rows have, its rows are counted
    and not written. Calls of two Buffers must not run at once on a GPU: each may hold what the
    other waits for.
    """

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,
        num_experts: int,
        num_slots: int = 2,
    ) -> int:
        """Bytes that low-latency calls of this size need; see `low_latency_size_hint`."""
        sizes = num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts, num_slots
        return low_latency_size_hint(*sizes)

    @verb
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        torch.Tensor,
        AnyLowLatencyHandle,
        EventOverlap,
        Hook | None,
    ]:
        """Send each token x[t], bf16 [T, H], once to every rank that holds one of its experts.

        topk_idx int64 [T, K], -1 = not routed. Returns (recv_x, recv_count int32 [L], handle,
        event, hook or None): recv_x [L, R * M, H], of which the first recv_count[e] rows of expert
        e are written, by source rank, then token. A token that names an expert twice has one row.

        use_fp8: recv_x is a pair of e4m3 [L, R * M, H], cast on the way, and its scales per 128
        columns, float32 [L, R * M, H / 128], column-major; round_scale: scales are powers of 2;
        use_ue8m0 (with round_scale): only their exponents, four to an int32 [L, R * M, H / 512].

        cumulative_local_expert_recv_stats int32 [L] grows by recv_count,
        dispatch_wait_recv_cost_stats int64 [R] by the nanoseconds waited for each rank's counts.
        """
        engine = self._low_latency_ready()
        described = engine.describe(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8,
            round_scale,
            use_ue8m0,
            async_finish,
            return_recv_hook,
        )
        stats = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        kind = described.kind
        if not kind.is_checked:
            _check_hook(async_finish, return_recv_hook)
            most, form = num_max_dispatch_tokens_per_rank, (use_fp8, round_scale, use_ue8m0)
            sizes = self._check_dispatch_tokens(x, topk_idx, most, num_experts)
            kind.choice = self._check_row_format(sizes.hidden, *form), sizes
            self._check_stats(sizes.num_local, *stats)
        row_format, sizes = kind.choice
        with self._streams.call(None, async_finish) as call:
            if call.is_async:
                call.reads(x, topk_idx, *stats)
            got, receive = None if return_recv_hook else engine.again(described), None
            if got is None:
                rows = sent, ids = described.packed(x, topk_idx)
                most, experts = sizes.max_tokens, sizes.num_experts
                tokens = LowLatencyTokens(sent, ids, None, most, experts, row_format)
                hooked, decided = return_recv_hook, described.if_packed
                got, receive = engine.dispatch(tokens, *stats, hooked, decided)
            handle = engine.new_handle(got, sizes)
            if call.is_async:
                call.returns(*got)
        kind.is_checked = True
        recv_x = got.x if got.scales is None else (got.x, got.scales)
        hook = None
        if receive is not None:
            used = rows, stats, got
            hook = partial(self._receive, receive, call.stream, used)
        return recv_x, got.counts, handle, call.event, hook

    def _check_dispatch_tokens(
        self, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, num_experts: int
    ) -> LowLatencySizes:
        """The sizes of a low-latency dispatch of these tokens, or refuse them."""
        checks.check_tensor("x", x, ["T", "H"], [torch.bfloat16], self.device)
        checks.check_no_grad(x=x)
        num_tokens, hidden = x.shape
        checks.check_int("hidden", hidden, 1, MAX_HIDDEN)
        checks.check_topk(topk_idx, num_tokens, self.device)
        num_experts = checks.check_experts(num_experts, self.group_size)
        max_tokens = checks.check_max_dispatch_tokens(max_tokens, num_tokens)
        num_topk = topk_idx.shape[1]
        return LowLatencySizes(max_tokens, hidden, num_experts, self.group_size, num_topk)

    def _check_row_format(self, hidden: int, *form: bool) -> str:
        """The format of rows, see `_row_format`, if this device has it."""
        row_format = _row_format(hidden, *form)
        if row_format != "bf16":
            checks.check_fp8(self.device)
        return row_format

    @verb
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: AnyLowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Return the experts' rows x, bf16 [L, R * M, H], placed as low_latency_dispatch placed its
        rows, and add up those of each token times topk_weights float32 [T, K]: (out bf16 [T, H],
        event, hook).

        Sums are in fp32: each rank adds its rows of a token in order of k and rounds once; the
        token's rank adds the results in order of each rank's largest k and rounds once. topk_idx is
        that of the dispatch. A slot of the top-k that is -1 only now counts with weight 0; for one
        that was -1 only in the dispatch, the call waits until its deadline. In debug mode ids that
        the handle refutes, as it knows those of this rank's own experts, are refused. x is read
        where it lies, so zero_copy changes nothing. use_logfmt is not offered. A handle may be
        combined any number of times.
        combine_wait_recv_cost_stats int64 [R] grows by the ns waited for each rank, all tokens'.

        On several nodes each node adds up its ranks' results, in their order, and rounds once more;
        the token's rank adds those of the nodes in order of each node's largest k. T is that of the
        dispatch, a slot that was -1 there counts nothing, and the ns are those waited for weights.
        """
        engine = self._low_latency_ready()
        stats, how = combine_wait_recv_cost_stats, (use_logfmt, async_finish, return_recv_hook)
        fields = fields_of(handle, self.num_nodes)
        described = engine.describe(x, topk_idx, topk_weights, out, stats, *how, *fields)
        kind = described.kind
        if not kind.is_checked:
            _check_hook(async_finish, return_recv_hook)
            checks.check_flag("use_logfmt", use_logfmt)
            if use_logfmt:
                raise BackendError("use_logfmt is not offered: rows return as bf16. Leave it out.")
            handle = self._check_low_latency_handle(handle)
            self._check_combine(x, topk_idx, topk_weights, handle, out)
            self._check_stats(0, None, stats, "combine_wait_recv_cost_stats")
            kind.choice = checks.extent(x), 0 if out is None else checks.extent(out)
        if out is not None:  # at each call, as where tensors lie is no part of its kind
            of_x, of_out = kind.choice
            if -of_out < out.data_ptr() - x.data_ptr() < of_x:
                checks.check_apart(out, x=x)
        engine.check_received(fields[0])
        with self._streams.call(None, async_finish) as call:
            # What a masked rank would have sent is not written, and can hold anything.
            if self.options.debug and not self.enable_shrink:
                check_low_latency_values(as_low_latency_handle(handle), topk_idx, self.rank)
            if call.is_async:
                call.reads(x, topk_idx, topk_weights, out, stats, *leaves(fields))
            found, receive = None if return_recv_hook else engine.again(described), None
            if found is not None:
                result, made = found
            else:
                y, ids, weights = described.packed(x, topk_idx, topk_weights)
                handle = as_low_latency_handle(handle)
                rows = engine.expert_rows(y, ids, weights, handle, out)
                num_experts = int(handle.sizes.num_experts)
                more = num_experts, stats, return_recv_hook, described.if_packed
                result, made, receive = engine.combine(rows, *more)
            if call.is_async:
                call.returns(result)
        kind.is_checked = True
        hook = None
        if receive is not None:
            used = rows, stats, result, made
            hook = partial(self._receive, receive, call.stream, used)
        return result, call.event, hook

    def _check_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: AnyLowLatencyHandle,
        out: torch.Tensor | None,
    ) -> None:
        """Refuse tensors of a low-latency combine that do not fit its handle."""
        sizes, shape = handle.sizes, self._expert_rows_shape(handle)
        checks.check_tensor("x", x, shape, [torch.bfloat16], self.device)
        num_topk = sizes.num_topk
        checks.check_tensor("topk_idx", topk_idx, ["T", num_topk], [torch.int64], self.device)
        num_tokens = topk_idx.shape[0]
        weights_shape = num_tokens, num_topk
        checks.check_tensor(
            "topk_weights", topk_weights, weights_shape, [torch.float32], self.device
        )
        checks.check_no_grad(x=x, topk_weights=topk_weights)
        checks.check_max_dispatch_tokens(sizes.max_tokens, num_tokens)
        if out is not None:
            out_shape = num_tokens, sizes.hidden
            checks.check_tensor("out", out, out_shape, [torch.bfloat16], self.device)
            if not out.is_contiguous() or out.data_ptr() % 16:
                raise ShapeError(
                    f"out has strides {tuple(out.stride())} and starts at {out.data_ptr():#x}; it "
                    "must be contiguous and start at a multiple of 16 bytes."
                )

    def get_next_low_latency_combine_buffer(self, handle: AnyLowLatencyHandle) -> torch.Tensor:
        """A new bf16 [L, R * M, H] for the experts' rows, to be given to `low_latency_combine`. Any
        other tensor serves as well, as x is read where it lies."""
        self._low_latency_ready()
        handle = self._check_low_latency_handle(handle)
        shape = self._expert_rows_shape(handle)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device)

    def _expert_rows_shape(self, handle: AnyLowLatencyHandle) -> tuple[int, int, int]:
        """[L, R * M, H] of what a dispatch returned."""
        sizes = handle.sizes
        return sizes.num_local, self.group_size * sizes.max_tokens, sizes.hidden

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: low-latency calls have memory of their own, and their flags only grow.
        CapacityError where calls of this size do not fit, as in DeepEP."""
        engine = self._low_latency_ready()
        max_tokens = checks.check_max_dispatch_tokens(num_max_dispatch_tokens_per_rank)
        sizes = hidden, self.group_size, num_experts, engine.num_slots
        needed = self.get_low_latency_rdma_size_hint(max_tokens, *sizes)
        if not engine.fits(max_tokens, 1, 2 * hidden):
            raise CapacityError(
                f"low-latency calls of {max_tokens} tokens and hidden {hidden} need about {needed} "
                f"bytes; this Buffer has {engine.num_bytes}. Make it with that many "
                "num_rdma_bytes."
            )

    # --- Masked ranks ------------------------------------------------------------------------

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out of this rank's low-latency calls from now on (mask=True), or no longer.
        Needs enable_shrink, with which a rank that is silent past the deadline is masked as
        well."""
        engine = self._shrinkable()
        rank_to_mask = checks.check_int("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        checks.check_flag("mask", mask)
        with self._streams.call():
            engine.mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for masked ranks and 0 for the others to mask_status int32 [R]."""
        engine = self._shrinkable()
        sizes = [self.group_size]
        checks.check_tensor("mask_status", mask_status, sizes, [torch.int32], self.device)
        checks.check_contiguous("mask_status", mask_status)
        with self._streams.call():
            mask_status.copy_(engine.masked())

    def low_latency_clean_mask_buffer(self) -> None:
        """Let all ranks take part again."""
        engine = self._shrinkable()
        with self._streams.call():
            for rank in range(self.group_size):
                engine.mask(rank, False)

    def _warm_low_latency(self, x: torch.Tensor, topk_idx: torch.Tensor, num_experts: int) -> None:
        """Dispatch and combine no tokens in each way: x [0, H], topk_idx [0, K]."""
        forms = (False, True) if x.shape[1] % 128 == 0 else (False,)
        num_local, (_, hidden) = num_experts // self.group_size, x.shape
        y, weights = x.new_empty(num_local, self.group_size, hidden), topk_idx.float()
        for use_fp8, hooked in product(forms, (False, True)):
            _, _, handle, _, receive = self.low_latency_dispatch(
                x, topk_idx, 1, num_experts, use_fp8=use_fp8, return_recv_hook=hooked
            )
            if receive is not None:
                receive()
            _, _, add_up = self.low_latency_combine(
                y, topk_idx, weights, handle, return_recv_hook=hooked
            )
            if add_up is not None:
                add_up()

    # --- Checks ------------------------------------------------------------------------------

    def _low_latency_ready(self) -> HookedCalls:
        self._ready()
        if self._low_latency is None:
            raise BackendError(
                "this Buffer has no low-latency memory; make it with low_latency_mode=True and the "
                "num_rdma_bytes of Buffer.get_low_latency_rdma_size_hint(...), not as a collective "
                "one."
            )
        return self._low_latency

    def _shrinkable(self) -> LowLatency:
        engine = self._low_latency_ready()
        if not self.enable_shrink or not isinstance(engine, LowLatency):
            raise BackendError("ranks are masked only by a Buffer with enable_shrink=True.")
        return engine

    def _check_low_latency_handle(self, handle: Any) -> AnyLowLatencyHandle:
        return check_low_latency_handle(handle, self.group_size, self.device, self.num_nodes)

    @local_verb
    def _receive(
        self,
        receive: Hook,
        stream: torch.cuda.Stream | None,
        used: tuple[Any, ...],
    ) -> None:
        """The receiving half of a call, on the stream that is current now. If that is not the
        `stream` of the first half, it keeps the memory of the tensors in `used`, which both halves
        use, from being reused before it has ended; they live until then."""
        self._check_process()
        engine = self._low_latency
        if engine is None:
            raise BackendError("this Buffer was destroyed, and its memory with it.")
        self._with_bad_ids = [engine] if engine.check() else []
        with self._streams.call() as call:
            if call.stream is not stream:
                record(leaves(used), call.stream)
            receive()

    def _check_stats(
        self,
        num_local: int,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
        wait_name: str = "dispatch_wait_recv_cost_stats",
    ) -> None:
        """Refuse what cannot be added to: int32 [L] and int64 [R]."""
        for name, stats, size, dtype in (
            ("cumulative_local_expert_recv_stats", recv_stats, num_local, torch.int32),
            (wait_name, wait_stats, self.group_size, torch.int64),
        ):
            if stats is not None:
                checks.check_tensor(name, stats, [size], [dtype], self.device)
                checks.check_contiguous(name, stats)


def _check_hook(async_finish: bool, return_recv_hook: bool) -> None:
    checks.check_flag("async_finish", async_finish)
    checks.check_flag("return_recv_hook", return_recv_hook)
    if async_finish and return_recv_hook:
        raise ShapeError(
            "async_finish and return_recv_hook are both set; choose one: the hook runs on the "
            "stream that is current when it is called."
        )


def _row_format(hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> str:
    """The format in which rows are sent, see `low_latency_dispatch_kernel`."""
    checks.check_flag("use_fp8", use_fp8)
    checks.check_flag("round_scale", round_scale)
    checks.check_flag("use_ue8m0", use_ue8m0)
    if (round_scale and not use_fp8) or (use_ue8m0 and not round_scale):
        raise ShapeError(
            f"use_fp8 is {use_fp8}, round_scale {round_scale}, use_ue8m0 {use_ue8m0}; round_scale "
            "needs use_fp8, and use_ue8m0 needs round_scale."
        )
    multiple = 512 if use_ue8m0 else 128 if use_fp8 else 1
    if hidden % multiple:
        raise ShapeError(
            f"x has {hidden} columns; with {'use_ue8m0' if use_ue8m0 else 'use_fp8'} they must be "
            f"a multiple of {multiple}. Pad x, or pass use_fp8=False."
        )
    if not use_fp8:
        return "bf16"
    return "ue8m0" if use_ue8m0 else "rounded" if round_scale else "fp8"
