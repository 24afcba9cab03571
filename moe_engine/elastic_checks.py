"""Checks of the arguments of ElasticBuffer's calls, by their metadata."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import checks
from .elastic_handle import EPHandle
from .engines.expanded import Numbers, RowsWanted
from .errors import DtypeError, ShapeError, TooManyTokens
from .options import MAX_NUM_SMS
from .streams import EventHandle
from .symm.slots import SlotLayout

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Routing = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""topk_idx, topk_weights and cumulative_local_expert_recv_stats."""
Events = tuple[EventHandle | None, EventHandle | None]
"""previous_event and previous_event_before_epilogue."""


class DispatchOptions(NamedTuple):
    """What a dispatch is called with besides tensors, events and a handle, under its own names."""

    num_experts: int | None
    num_max_tokens_per_rank: int | None
    expert_alignment: int | None
    do_cpu_sync: bool | None
    do_handle_copy: bool
    do_expand: bool
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool
    num_sms: int
    num_qps: int
    async_with_compute_stream: bool
    allocate_on_comm_stream: bool


class CombineOptions(NamedTuple):
    """Those of a combine."""

    num_sms: int
    num_qps: int
    async_with_compute_stream: bool
    allocate_on_comm_stream: bool


FLAGS = {
    *("do_cpu_sync", "do_handle_copy", "do_expand", "do_zero_padding"),
    *("use_tma_aligned_col_major_sf", "async_with_compute_stream", "allocate_on_comm_stream"),
}


def check_flags(**flags: bool) -> None:
    """Each must be True or False."""
    for name, flag in flags.items():
        checks.check_flag(name, flag)


def check_deferred(defer_epilogue: bool, is_async: bool) -> None:
    """A call that returns its results by its event must be asynchronous."""
    check_flags(defer_epilogue=defer_epilogue, async_with_compute_stream=is_async)
    if defer_epilogue and not is_async:
        raise ShapeError(
            "defer_epilogue needs async_with_compute_stream=True: without it the call returns no "
            "event, whose wait could return the results."
        )


def check_unset(**arguments: object) -> None:
    """None of these goes with a handle."""
    for name, value in arguments.items():
        if value is not None:
            raise ShapeError(
                f"{name} is given with a handle, with which tokens go where they went before. "
                "Leave it out, or leave out the handle."
            )


def check_events(
    previous_event: EventHandle | None,
    previous_event_before_epilogue: EventHandle | None,
    allocate_on_comm_stream: bool,
) -> None:
    """Both must be EventHandles, and the first needs allocate_on_comm_stream, as in DeepEP."""
    events = dict(
        previous_event=previous_event,
        previous_event_before_epilogue=previous_event_before_epilogue,
    )
    for name, event in events.items():
        if event is not None and not isinstance(event, EventHandle):
            raise DtypeError(
                f"{name} is a {type(event).__name__}; it must be an EventHandle, such as "
                "ElasticBuffer.capture() returns, or None."
            )
    if previous_event is not None and not allocate_on_comm_stream:
        raise ShapeError(
            "previous_event needs allocate_on_comm_stream=True: what the current stream holds "
            "after that event may still use memory that was given back."
        )


def check_options(options: DispatchOptions | CombineOptions) -> None:
    """Flags must be True or False, do_cpu_sync may be None, and they must fit one another."""
    flags = {name: flag for name, flag in options._asdict().items() if name in FLAGS}
    if flags.get("do_cpu_sync") is None:
        flags.pop("do_cpu_sync", None)
    check_flags(**flags)
    if flags.get("do_zero_padding") and not flags["do_expand"]:
        raise ShapeError("do_zero_padding needs do_expand: rows by token have no padding.")


def check_x(x: Payload, device: torch.device) -> None:
    """Rows must be bf16, or e4m3 with scales."""
    rows, scales = checks.check_payload(x, device=device)
    if scales is None:
        checks.check_tensor("x", rows, None, [torch.bfloat16])


def check_sms(num_sms: int, num_qps: int, num_allocated_qps: int) -> int:
    """num_sms as an int, 0 for any; QPs must be among the allocated ones."""
    checks.check_int("num_qps", num_qps, 0, num_allocated_qps)
    return checks.check_int("num_sms", num_sms, 0, MAX_NUM_SMS)


def check_most_tokens(max_tokens: int) -> int:
    """num_max_tokens_per_rank, 0 for any."""
    return checks.check_int("num_max_tokens_per_rank", max_tokens, 0, SlotLayout.most_rows)


def check_new(
    x: Payload,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    stats: torch.Tensor | None,
    options: DispatchOptions,
    num_ranks: int,
) -> Numbers:
    """The numbers of a dispatch without a handle, whose arguments must fit one another."""
    rows, (num_experts, max_tokens, alignment) = x[0] if isinstance(x, tuple) else x, options[:3]
    if topk_idx is None or num_experts is None:
        missing = "topk_idx" if topk_idx is None else "num_experts"
        raise ShapeError(f"{missing} is None; pass topk_idx and num_experts, or a handle.")
    num_local = checks.check_experts(num_experts, num_ranks) // num_ranks
    checks.check_topk(topk_idx, len(rows), rows.device)
    if topk_weights is not None:
        checks.check_routing(rows, topk_idx, topk_weights)
    if stats is not None:
        name = "cumulative_local_expert_recv_stats"
        checks.check_tensor(name, stats, [num_local], [torch.int32], rows.device)
        checks.check_contiguous(name, stats)
    max_tokens = check_most_tokens(max_tokens or 0)
    if max_tokens == 0:
        raise ShapeError(
            "num_max_tokens_per_rank is 0; pass the most tokens of any rank, here or to the "
            "ElasticBuffer."
        )
    if len(rows) > max_tokens:
        raise TooManyTokens(
            f"{len(rows)} tokens came with num_max_tokens_per_rank = {max_tokens}; it must be the "
            "most that any rank brings, the same on all ranks. Other ranks may be in the call, so "
            "make a new ElasticBuffer."
        )
    alignment = 1 if alignment is None else alignment
    # The rows of all experts, with padding, are numbered in 32 bits.
    alignment = checks.check_int("expert_alignment", alignment, 1, 2**28 // num_experts)
    return Numbers(num_local, alignment, max_tokens, num_ranks)


def check_handle(handle: EPHandle, num_ranks: int) -> None:
    """A handle must be what a dispatch of so many ranks returned."""
    if not isinstance(handle, EPHandle):
        raise DtypeError(
            f"handle is a {type(handle).__name__}; it must be the EPHandle that dispatch returned."
        )
    of_ranks = handle.numbers.num_ranks
    if of_ranks != num_ranks:
        raise ShapeError(
            f"handle is of a dispatch of {of_ranks} ranks; this ElasticBuffer has {num_ranks}. "
            "Pass what its own dispatch returned."
        )


def check_same_ids(handle: EPHandle) -> None:
    """The ids that a handle keeps, which travel with weights, must be those of its dispatch."""
    if not handle.has_same_topk_idx:
        raise ShapeError(
            "topk_idx of handle was written to after the dispatch, so weights would go with other "
            "ids. Keep it unchanged, or let ElasticBuffer.dispatch copy it (do_handle_copy=True)."
        )


def check_cached(handle: EPHandle, options: DispatchOptions, wanted: RowsWanted) -> None:
    """A handle must be that of a dispatch like this one."""
    known = handle.num_experts, handle.num_max_tokens_per_rank, handle.expert_alignment
    for name, value, of_handle in zip(options._fields[:3], options[:3], known, strict=True):
        if value is not None and value != of_handle:
            raise ShapeError(
                f"{name} is {checks.shown(value)}, and {of_handle} in handle; leave it out."
            )
    if wanted.expand and not handle.do_expand:
        raise ShapeError(
            "do_expand is set, and handle is of a dispatch without it, which has no places by "
            "expert. Pass do_expand=handle.do_expand."
        )
