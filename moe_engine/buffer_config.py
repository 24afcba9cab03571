"""What a Buffer can be told: `Options`, DeepEP's `Config`, and how much memory it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .checks import check_at_least, check_experts, check_max_dispatch_tokens
from .errors import CapacityError, DtypeError, ShapeError
from .layer_config import LayerConfig
from .ring import HINT_TOPK as HINT_TOPK_LOW_LATENCY
from .ring import RingLayout, region_bytes
from .ring_kernels import MAX_SLOTS
from .slots import BLOCK_ROWS, MAX_CHUNKS, SlotLayout, header_bytes, layer_row
from .utils import round_up

HINT_TOKENS = 4096
HINT_TOPK = 16
HINT_EXPERTS = 1024
"""What `Config.get_nvl_buffer_size_hint` makes room for: tokens per rank, lanes, experts."""


@dataclass(frozen=True, slots=True)
class Options:
    """Less common choices of a Buffer, equal on all ranks.

    num_slots: calls in flight before a writer waits for its reader (2 or more). max_tokens: most
    tokens per rank, which sizes the work space of `moe_ffn`. timeout_s: deadline of every wait,
    None for MOE_ENGINE_TIMEOUT_S (100 s). debug: synchronise after every call and raise at once.
    layer: how `moe_ffn` runs, None to choose by shape: what was measured, else what is predicted.
    decode_tokens: up to so many tokens per rank, `moe_ffn` takes the low-latency way; 0: never.
    """

    num_slots: int = 2
    max_tokens: int | None = None
    timeout_s: float | None = None
    debug: bool = False
    layer: LayerConfig | None = None
    decode_tokens: int = 512


DEFAULT_OPTIONS = Options()


def check_options(options: Options, all_ranks: Sequence[tuple[tuple[int, int], Options]]) -> None:
    """ShapeError for values out of range, or if ranks gave other bytes, slots, max_tokens,
    decode_tokens or layer configs, whose numbers of programs may differ."""
    if options.num_slots < 2:
        raise ShapeError(f"num_slots is {options.num_slots}; it must be 2 or more.")
    if options.num_slots > MAX_SLOTS.value:
        raise ShapeError(f"num_slots is {options.num_slots}; it must be {MAX_SLOTS.value} or less.")
    if options.max_tokens is not None and options.max_tokens < 0:
        raise ShapeError(f"max_tokens is {options.max_tokens}; it must not be negative.")
    if options.timeout_s is not None and options.timeout_s <= 0:
        raise ShapeError(f"timeout_s is {options.timeout_s}; it must be positive, or None.")
    if options.decode_tokens < 0:
        raise ShapeError(f"decode_tokens is {options.decode_tokens}; it must not be negative.")
    if options.layer is not None:
        options.layer.check()
    shapes = [
        (
            *(num_bytes, other.num_slots, other.max_tokens, other.decode_tokens),
            other.layer and other.layer.shared(),
        )
        for num_bytes, other in all_ranks
    ]
    if len(set(shapes)) > 1:
        found = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
        raise ShapeError(
            f"(bytes, num_slots, max_tokens, decode_tokens, layer) differ: {found}. Give all the "
            "same."
        )


def check_num_sms(num_sms: int) -> None:
    """Even and positive, as in DeepEP; ShapeError otherwise."""
    if num_sms <= 0 or num_sms % 2:
        raise ShapeError(f"num_sms is {num_sms}; it must be positive and even.")


def size_hint(
    max_tokens: int,
    hidden_bytes: int,
    num_ranks: int,
    num_experts: int,
    num_topk: int,
    num_slots: int = 2,
) -> int:
    """Bytes of symmetric memory per rank: num_slots * num_ranks * max_tokens * row bytes, a
    row being the payload, 8 bytes per top-k lane and 64 for a layer, plus counts and flags. Never
    exceeded, but by the expert rows of `moe_ffn`: num_ranks * max_tokens * num_topk payloads and 8
    bytes each.
    CapacityError beyond 65,536 tokens, for which there are no flags."""
    if max_tokens > BLOCK_ROWS * MAX_CHUNKS:
        raise CapacityError(
            f"max_tokens is {max_tokens}; one call takes at most {BLOCK_ROWS * MAX_CHUNKS}. Send "
            "larger batches in parts."
        )
    row = layer_row(hidden_bytes, num_topk)  # larger than a dispatch's
    region = header_bytes(num_experts, num_ranks) + max(1, max_tokens) * row.num_bytes
    return SlotLayout(num_ranks, region, num_slots).num_bytes


def low_latency_size_hint(
    num_max_dispatch_tokens_per_rank: int,
    hidden: int,
    num_ranks: int,
    num_experts: int,
    num_slots: int = 2,
) -> int:
    """Bytes of num_rdma_bytes for low-latency calls of up to so many tokens per rank, bf16 rows of
    `hidden` columns and up to 32 lanes: num_slots * num_ranks * tokens * (2 * hidden + 512), and
    flags. 16 MB for 128 tokens, hidden 7168, 4 ranks, 256 experts; num_slots is that of Options.
    """
    check_at_least(1, hidden=hidden, num_ranks=num_ranks)
    check_max_dispatch_tokens(num_max_dispatch_tokens_per_rank)
    check_experts(num_experts, num_ranks)
    region = region_bytes(num_max_dispatch_tokens_per_rank, HINT_TOPK_LOW_LATENCY, 2 * hidden)
    return RingLayout(num_ranks, region, num_slots).num_bytes


def decode_bytes(options: Options, row_bytes: int, num_ranks: int, num_topk: int) -> int:
    """Bytes of low-latency memory of a Buffer for `options.max_tokens` tokens of `row_bytes`: for
    layers of up to `options.decode_tokens` of them."""
    if not options.decode_tokens:
        return 0
    most = min(max(1, options.max_tokens or 1), options.decode_tokens)
    region = region_bytes(most, num_topk, row_bytes)
    return RingLayout(num_ranks, region, options.num_slots).num_bytes


@dataclass(frozen=True, slots=True)
class Config:
    """DeepEP's tuning object: `num_sms` programs communicate in the call that gets it.

    The four chunk sizes are accepted and unused: rows go straight to their place in the peer's
    memory, so there is no queue to cut into chunks. ShapeError unless num_sms is positive and even.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        check_num_sms(self.num_sms)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes for 4096 tokens per rank of `hidden_bytes` each, up to 16 lanes and 1024 experts.

        By the formula of `Buffer.size_hint`, which takes the real numbers.
        """
        if hidden_bytes <= 0 or num_ranks <= 0:
            raise ShapeError(
                f"hidden_bytes is {hidden_bytes} and num_ranks {num_ranks}; both must be positive."
            )
        num_bytes = size_hint(HINT_TOKENS, hidden_bytes, num_ranks, HINT_EXPERTS, HINT_TOPK)
        return round_up(num_bytes, 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: there is no network transport that would need memory of its own."""
        return 0


class Programs:
    """How many programs communicate: `default()`, or what the running call's Config says."""

    def __init__(self, default: Callable[[], int]):
        self._default = default
        self._config: Config | None = None

    def __call__(self) -> int:
        return self._default() if self._config is None else self._config.num_sms

    @contextmanager
    def of(self, config: Config | None) -> Iterator[None]:
        """Let `config` (None: the default) decide within the block."""
        self._config = config
        try:
            yield
        finally:
            self._config = None


def check_config(config: Config | None) -> None:
    """DtypeError for anything but a Config or None."""
    if config is not None and not isinstance(config, Config):
        raise DtypeError(
            f"config is a {type(config).__name__}; it must be a moe_engine.Config or None."
        )
