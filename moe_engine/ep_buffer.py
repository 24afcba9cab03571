"""EPBuffer: DeepEP V2.5's calls, on an ElasticBuffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from . import checks
from .elastic import DEFAULT_TIMEOUT_S, ElasticBuffer
from .elastic_checks import Payload, check_deferred, check_flags
from .elastic_handle import EPHandle
from .engines.kernel_verbs import KernelVerbs
from .errors import BackendError, ShapeError
from .lifecycle import verb
from .options import MAX_NUM_SMS
from .streams import EventHandle, EventOverlap, current_stream, record


class EPBuffer(ElasticBuffer):
    """Expert-parallel dispatch and combine over the ranks of `group`, with DeepEP V2.5's interface.

    It is an `ElasticBuffer` with the arguments of V2.5, and its attributes are the same. What
    differs:

    lb_allocation_plan_or_num_bytes must be 0: redundant experts are not there yet. sl_idx may be
    None. num_sms of a call is rounded up to an even number. Handles keep `topk_idx` itself, and
    do_handle_copy must be False. There is no previous_event_before_epilogue.

    Raises what `ElasticBuffer` raises, and BackendError for memory of redundant experts.
    """

    num_lb_bytes = 0

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = DEFAULT_TIMEOUT_S,
        explicitly_destroy: bool = False,
    ):
        self._lb_memory = lb_allocation_plan_or_num_bytes
        super().__init__(
            group,
            num_bytes,
            0,
            num_max_tokens_per_rank,
            hidden,
            num_topk,
            use_fp8_dispatch,
            deterministic,
            allow_hybrid_mode,
            allow_multiple_reduction,
            prefer_overlap_with_compute,
            0 if sl_idx is None else sl_idx,
            num_allocated_qps,
            num_cpu_timeout_secs,
            num_gpu_timeout_secs,
            explicitly_destroy,
        )

    def _check_arguments(self) -> None:
        if type(self._lb_memory) is not int or self._lb_memory:
            raise BackendError(
                "lb_allocation_plan_or_num_bytes is "
                f"{checks.shown(self._lb_memory)}; redundant experts are not there yet. Pass 0."
            )

    @property
    def main_context(self) -> KernelVerbs | None:
        """`runtime`."""
        return self.runtime

    def print_memory_usage(self) -> None:
        """Print how many bytes of memory for calls this rank has."""
        size = f"{self.num_bytes / 2**20:.1f} MiB of memory for calls"
        print(f"EPBuffer of rank {self.rank_idx} of {self.num_ranks}: {size}", flush=True)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """See `ElasticBuffer.get_theoretical_num_sms`."""
        return super().get_theoretical_num_sms(num_experts, num_topk, num_scaleout_topk)

    # --- Calls -------------------------------------------------------------------------------

    @verb
    def dispatch(  # type: ignore[override]
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> (
        tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]
        | EventOverlap
    ):
        """`ElasticBuffer.dispatch`; the handle keeps `topk_idx` itself, which must not change while
        the handle is in use.

        With defer_epilogue, which needs async_with_compute_stream, it returns the event alone. Its
        first wait returns (recv_x, recv_topk_idx, recv_topk_weights, handle), for use on the stream
        that waits. The whole call is launched at once all the same: with do_cpu_sync the host waits
        for the counts in this call.
        """
        check_deferred(defer_epilogue, async_with_compute_stream)
        check_flags(do_handle_copy=do_handle_copy)
        if do_handle_copy:
            raise ShapeError("do_handle_copy is True; an EPBuffer's handle keeps topk_idx itself.")
        recv_x, ids, weights, new_handle, event = super().dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            cumulative_local_expert_recv_stats=cumulative_local_expert_recv_stats,
            num_experts=num_experts,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            expert_alignment=expert_alignment,
            num_sms=_even(num_sms),
            num_qps=num_qps,
            previous_event=previous_event,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
            handle=handle,
            do_handle_copy=False,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
            use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        )
        if not defer_epilogue:
            return recv_x, ids, weights, new_handle, event
        rows = recv_x if isinstance(recv_x, tuple) else (recv_x,)
        tensors = *rows, ids, weights, *new_handle.places, *new_handle.sent
        result = recv_x, ids, weights, new_handle
        event.register_hook_after_wait(self._give(result, (*tensors, new_handle.recv_topk_idx)))
        return event

    @verb
    def combine(  # type: ignore[override]
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap] | EventOverlap:
        """`ElasticBuffer.combine`. With defer_epilogue it returns the event alone, see `dispatch`;
        its first wait returns (out, weights)."""
        check_deferred(defer_epilogue, async_with_compute_stream)
        out, weights, event = super().combine(
            x,
            handle,
            topk_weights=topk_weights,
            bias=bias,
            num_sms=_even(num_sms),
            num_qps=num_qps,
            previous_event=previous_event,
            async_with_compute_stream=async_with_compute_stream,
            allocate_on_comm_stream=allocate_on_comm_stream,
        )
        if not defer_epilogue:
            return out, weights, event
        event.register_hook_after_wait(self._give((out, weights), (out, weights)))
        return event

    @verb
    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
    ) -> None:
        """Let what the current stream holds from now on begin after all ranks have come to this
        call. It always waits for the Buffer's last call, also on `get_comm_stream()`.
        with_cpu_sync: the host waits for the device before and after. sequential changes nothing;
        context_idx is 0 or None, as there is one context."""
        check_flags(wait_comm_stream=wait_comm_stream)
        if context_idx is not None:
            checks.check_int("context_idx", context_idx, 0, 0)
        super().barrier(False, with_cpu_sync, sequential)

    def _give(
        self, result: tuple[Any, ...], tensors: Sequence[torch.Tensor | None]
    ) -> Callable[[], tuple[Any, ...]]:
        """A hook that returns this result, whose memory the stream that waits then uses."""

        def give() -> tuple[Any, ...]:
            record(tensors, current_stream(self.device))
            return result

        return give


def _even(num_sms: int) -> int:
    """num_sms, or one more."""
    num_sms = checks.check_int("num_sms", num_sms, 0, MAX_NUM_SMS)
    return num_sms + num_sms % 2


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """A call for redundant experts."""
    raise BackendError(f"EPBuffer.{name} is not there yet: it needs redundant experts.")


for _name in ("lb_prefetch_weights", "lb_reduce_grads", "lb_get_theoretical_num_sms"):
    setattr(EPBuffer, _name, staticmethod(partial(_refuse, _name)))
