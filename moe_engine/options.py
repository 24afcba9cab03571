"""`Options` of a Buffer, DeepEP's `Config`, and how much memory a Buffer needs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from numbers import Real

import torch

from .checks import (
    MAX_EXPERTS,
    PAYLOAD_DTYPES,
    check_at_least,
    check_dtype,
    check_experts,
    check_flag,
    check_int,
    check_max_dispatch_tokens,
    shown,
)
from .deadline import MOST_S, timeout_seconds
from .device.ring import MAX_SLOTS
from .errors import CapacityError, DtypeError, ShapeError
from .layer_config import LayerConfig
from .symm.ring import HINT_TOPK as HINT_TOPK_LOW_LATENCY
from .symm.ring import RingLayout, region_bytes
from .symm.slots import (
    ReturnRowLayout,
    SlotLayout,
    header_bytes,
    num_passes,
)
from .utils import round_up

HINT_TOKENS = 4096
HINT_TOPK = 16
HINT_EXPERTS = 1024
"""`Config.get_nvl_buffer_size_hint` makes room for so many tokens per rank, top-k and experts."""
ELASTIC_TOPK, ELASTIC_ALIGNMENT = 32, 2 << 20
"""ElasticBuffer takes num_topk = 0 for the first, its size hint is a multiple of the second."""
MAX_NUM_SMS = 4096
"""More than any GPU has."""
MOST_TOKENS = 64 * SlotLayout.most_rows
"""The most that a rank may bring to a layer; a number of bytes, given by mistake, is larger."""


@dataclass(frozen=True, slots=True)
class Options:
    """Less common choices of a Buffer, equal on all ranks.

    num_slots: calls that may be in flight before a writer waits for its reader, 2 or more.
    max_tokens: the most tokens per rank; it sizes the work space of `moe_ffn`. More than a call
    takes, `SlotLayout.most_rows`, go in sub-batches (`passes.py`).
    max_experts: the most experts of all ranks that a layer may have, None for any number. Like
    max_tokens it is what `Buffer.for_tokens` was given: whoever passes all experts where those of
    one rank belong is told.
    timeout_s: the deadline of every wait, and of a layer's products, which wait for rows; None
    stands for MOE_ENGINE_TIMEOUT_S (100 s).
    debug: synchronise before every call and check the values of its handle and counts
    (`debug_checks.py`), synchronise after it and raise at once. Such a check ends the call on one
    rank alone. MOE_ENGINE_DEBUG=1, when the Buffer is made, sets it too.
    layer: how `moe_ffn` runs; None chooses by shape what was measured, or else what is predicted.
    decode_tokens: `moe_ffn` runs by low-latency calls up to so many tokens per rank; 0 for never.
    capacity_factor: the work space of `moe_ffn` is for so many times the expert rows that a rank
    gets in balanced routing, max_tokens * K; a batch that needs more runs in passes (`passes.py`).
    None: for all that can come, R * max_tokens * K.
    """

    num_slots: int = 2
    max_tokens: int | None = None
    timeout_s: float | None = None
    debug: bool = False
    layer: LayerConfig | None = None
    decode_tokens: int = 512
    capacity_factor: float | None = None
    max_experts: int | None = None

    def capacity(self, num_ranks: int) -> float:
        """For how many times the rows of balanced routing there is room; R times are all."""
        return min(num_ranks, self.capacity_factor or num_ranks)

    def num_passes(self, num_ranks: int) -> int:
        """See `slots.num_passes`."""
        return num_passes(num_ranks, self.capacity(num_ranks))


DEFAULT_OPTIONS = Options()


def check_options(options: Options) -> Options:
    """ShapeError and DtypeError for values out of range or of another type. Returns the Options
    with timeout_s filled in, and with `debug` where MOE_ENGINE_DEBUG is set."""
    if not isinstance(options, Options):
        raise DtypeError(
            f"options is a {type(options).__name__}; it must be a moe_engine.Options(...)."
        )
    most, seconds, layer = options.max_tokens, options.timeout_s, options.layer
    experts = options.max_experts
    check_flag("debug", options.debug)
    if layer is not None:
        if not isinstance(layer, LayerConfig):
            raise DtypeError(
                f"layer is a {type(layer).__name__}; it must be a LayerConfig or None."
            )
        layer.check()
    if seconds is None:
        seconds = check_seconds("MOE_ENGINE_TIMEOUT_S", timeout_seconds())
    return replace(
        options,
        num_slots=check_int("num_slots", options.num_slots, 2, MAX_SLOTS.value),
        max_tokens=None if most is None else check_int("max_tokens", most, 0, MOST_TOKENS),
        timeout_s=check_seconds("timeout_s", seconds),
        debug=bool(options.debug) or os.environ.get("MOE_ENGINE_DEBUG", "0") not in ("", "0"),
        decode_tokens=check_int("decode_tokens", options.decode_tokens, 0),
        capacity_factor=_check_capacity_factor(options.capacity_factor),
        max_experts=None if experts is None else check_int("max_experts", experts, 1, MAX_EXPERTS),
    )


def _check_capacity_factor(factor: float | None) -> float | None:
    if factor is None:
        return None
    if not isinstance(factor, Real) or isinstance(factor, bool):
        raise DtypeError(
            f"capacity_factor is a {type(factor).__name__}; it must be a number, or None."
        )
    if not 1 <= factor < math.inf:  # nan fails this too
        raise ShapeError(
            f"capacity_factor is {shown(factor)}; it must be at least 1, the rows of balanced "
            "routing. None makes room for all rows that can come."
        )
    return float(factor)


def check_seconds(name: str, seconds: float) -> float:
    """A deadline must be positive, and no longer than a kernel can count. Returns it."""
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        raise DtypeError(f"{name} is a {type(seconds).__name__}; it must be a number of seconds.")
    if not 0 < seconds <= MOST_S:  # nan fails this too
        raise ShapeError(
            f"{name} is {shown(seconds)}; it must be positive, and at most {MOST_S:g} "
            "seconds. None stands for MOE_ENGINE_TIMEOUT_S."
        )
    return float(seconds)


def check_num_sms(num_sms: int) -> int:
    """num_sms must be even and positive, as in DeepEP. Returns it as an int."""
    num_sms = check_int("num_sms", num_sms, 1, MAX_NUM_SMS)
    if num_sms % 2:
        raise ShapeError(f"num_sms is {num_sms}; it must be positive and even.")
    return num_sms


def size_hint(
    max_tokens: int,
    hidden_bytes: int,
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    num_slots: int = 2,
) -> int:
    """Bytes of symmetric memory per rank: num_slots * num_ranks * max_tokens rows, counts and
    flags. A row has the payload, 8 bytes per slot of the top-k, and 64 for a layer.

    No call needs more, but for the expert rows of `moe_ffn`, which are allocated beyond them:
    num_ranks * max_tokens * num_topk payloads and 8 bytes each. CapacityError beyond 65,536 tokens,
    as there are flags for no more; layers of more go in sub-batches, each a call.
    """
    max_tokens = check_int("max_tokens", max_tokens, 0)
    hidden_bytes = check_int("hidden_bytes", hidden_bytes, 1)
    num_ranks = check_int("num_ranks", num_ranks, 1)
    num_experts = check_int("num_experts", num_experts, 1, MAX_EXPERTS)
    num_topk = check_int("num_topk", num_topk, 1)
    num_slots = check_int("num_slots", num_slots, 2, MAX_SLOTS.value)
    if max_tokens > SlotLayout.most_rows:
        raise CapacityError(
            f"max_tokens is {max_tokens}; one call takes at most {SlotLayout.most_rows}. Send "
            "larger batches in parts, as a layer does by itself in a Buffer of Buffer.for_tokens."
        )
    row = ReturnRowLayout(hidden_bytes, num_topk)  # larger than a dispatch's
    region = header_bytes(num_experts, num_ranks) + max(1, max_tokens) * row.num_bytes
    return SlotLayout(num_ranks, region, num_slots).num_bytes


def low_latency_size_hint(
    num_max_dispatch_tokens_per_rank: int,
    hidden: int,
    num_ranks: int,
    num_experts: int,
    num_slots: int = 2,
) -> int:
    """Bytes of num_rdma_bytes for low-latency calls of up to so many tokens per rank, with bf16
    rows of `hidden` columns and a top-k of up to 32: num_slots * num_ranks * tokens *
    (2 * hidden + 512) and flags. For 128 tokens, hidden 7168, 4 ranks and 256 experts these are
    16 MB. num_slots is that of Options.
    """
    hidden, num_ranks = check_int("hidden", hidden, 1), check_int("num_ranks", num_ranks, 1)
    num_slots = check_int("num_slots", num_slots, 2, MAX_SLOTS.value)
    max_tokens = check_max_dispatch_tokens(num_max_dispatch_tokens_per_rank)
    check_experts(num_experts, num_ranks)
    region = region_bytes(max_tokens, HINT_TOPK_LOW_LATENCY, 2 * hidden)
    return RingLayout(num_ranks, region, num_slots).num_bytes


def elastic_size_hint(
    num_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """See `ElasticBuffer.get_buffer_size_hint`. A row returns as bf16, or as fp32 where it must not
    be rounded before the end; it is sent as bf16, or as e4m3 with up to hidden / 32 scales."""
    check_at_least(1, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden)
    num_topk = check_int("num_topk", num_topk, 0) or ELASTIC_TOPK
    row_bytes = hidden * (2 if allow_multiple_reduction else 4)
    if use_fp8_dispatch:
        row_bytes = max(row_bytes, hidden + 4 * -(-hidden // 32))
    num_bytes = size_hint(num_max_tokens_per_rank, row_bytes, num_ranks, MAX_EXPERTS, num_topk)
    return round_up(num_bytes, ELASTIC_ALIGNMENT)


def sizes_for_tokens(
    options: Options,
    max_tokens: int,
    hidden: int,
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype,
    num_ranks: int,
) -> tuple[int, int, Options]:
    """(bytes, bytes of low-latency memory, options) of a Buffer for so many tokens: for the most of
    them that a call takes. Layers of up to `options.decode_tokens` use the low-latency memory."""
    num_slots, decode_tokens = check_options(options).num_slots, options.decode_tokens
    check_dtype("dtype", dtype, (*PAYLOAD_DTYPES, torch.float8_e4m3fn))
    num_experts = check_experts(num_experts, num_ranks)
    row_bytes = check_int("hidden", hidden, 1) * dtype.itemsize
    of_call = min(check_int("max_tokens", max_tokens, 0), SlotLayout.most_rows)
    num_bytes = size_hint(of_call, row_bytes, num_ranks, num_experts, num_topk, num_slots)
    ring_bytes = 0
    if decode_tokens:
        region = region_bytes(min(max(1, max_tokens), decode_tokens), num_topk, row_bytes)
        ring_bytes = RingLayout(num_ranks, region, num_slots).num_bytes
    options = replace(options, max_tokens=max_tokens, max_experts=num_experts)
    return num_bytes, ring_bytes, options


@dataclass(frozen=True, slots=True)
class Config:
    """DeepEP's tuning object: `num_sms` programs communicate in the call that gets it.

    The four chunk sizes are accepted and unused: each row is written directly to its row of the
    peer's memory, so there is no queue to cut into chunks. ShapeError unless num_sms is positive
    and even.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_sms", check_num_sms(self.num_sms))

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for 4096 tokens per rank of `hidden_bytes` each, a top-k of up to 16 and up to 1024
        experts, by the formula of `Buffer.size_hint`, which takes the real numbers."""
        num_bytes = size_hint(HINT_TOKENS, hidden_bytes, num_ranks, HINT_EXPERTS, HINT_TOPK)
        return round_up(num_bytes, 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0: what normal calls send between nodes lies in the memory of num_nvl_bytes, to
        which a Buffer of ranks on several nodes adds 2 / L of it, for L ranks per node."""
        check_at_least(1, hidden_bytes=hidden_bytes, num_ranks=num_ranks)
        return 0
