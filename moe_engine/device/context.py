"""The fields that host and kernels share: the device context, the report, what waits are for."""

from enum import IntEnum
from typing import Any, NamedTuple

import triton.language as tl


class ContextField(IntEnum):
    """Index of each int64 field of the device context; set once by the host, except where said."""

    EPOCH = 0  # last finished epoch, advanced by the last program of each call; in low-latency
    # memory the last one that has begun
    BROKEN = 1  # not 0: this rank's calls have ended, and kernels return at once; bit 0: the host
    # is told why; TOLD_BIT: set by the host of a rank that abandoned a call
    FINISHED = 2  # programs of the running kernel that are done; 0 between kernels
    BAD_IDS = 3  # routing ids outside -1 .. E-1 seen so far; layout and low-latency dispatch add
    TIMEOUT_NS = 4
    REPORT = 5  # address of the report in host memory, see `Report`
    RANK = 6
    NUM_RANKS = 7
    NUM_SLOTS = 8
    REGION_BYTES = 9  # one source's part of one slot
    DONE = 10  # offsets into the symmetric block, in bytes
    COUNT_FLAGS = 11
    CHUNK_FLAGS = 12
    MAX_CHUNKS = 13
    SLOTS = 14
    CLAIMED = 15  # pieces of work of the running call that programs have taken
    PUSHED = 16  # programs of the running call that have pushed their share
    PACE = 17  # picoseconds that 1024 bytes to other ranks should take; 0: unpaced
    METADATA_FLAGS = 18  # as COUNT_FLAGS
    STAGE_FLAGS = 19  # as COUNT_FLAGS
    TRACE = 20  # address of this GPU's spans, see `ptx.write_span`; 0: they are not recorded
    MASKED = 21  # bit r: rank r is left out of low-latency calls
    STARTED = 22  # programs of the running launch that have read the epoch; see `_begin_send`
    OWN = 23  # address of this rank's symmetric block
    BUFFER = 24  # a number that all ranks of a Buffer have, and other Buffers have not
    NETWORK = 25  # address of what the transport to other nodes keeps on this rank: emulated ranks
    # have the queue of their network there, see `symm/nic.py`, NVSHMEM int32 [R], the ranks'
    # processing elements; 0: there are no other nodes
    NODE_RANKS = 26  # ranks of a node
    NUM_REGIONS = 27  # regions of a slot
    HEADERS = 28  # offset into the symmetric block, in bytes
    HEADER_BYTES = 29  # of one of them
    REFUSED = 30  # calls of this rank that were refused before they sent anything, in the low half;
    # the host adds, between calls
    PEERS = 32  # R addresses of the ranks' symmetric blocks, as mapped here; 16 bytes hold two, so
    # this number is even. 0 for a rank of another node


class Report(IntEnum):
    """Index of each int64 field of the report to the host, written once by what fails first."""

    VALID = 0
    PEER = 1
    PHASE = 2
    EPOCH = 3
    ROWS = 4  # most rows from one rank to another, after Phase.CAPACITY in the exchange
    THEIRS = 4  # what the peer called with, after Phase.SIGNATURE and FIELDS: up to 16 words
    OURS = 20  # what this rank called with, likewise
    BAD_IDS = 36  # routing ids outside -1 .. E-1 seen so far; no failure


class Phase(IntEnum):
    """What a wait was for; SIGNATURE, FIELDS: a peer's call did not match; OVERFLOW: more rows
    came than the caller has room for; CAPACITY: more rows than a region holds; ABANDONED: a peer
    broke its call off; HANDLE: the handle is not one of this Buffer; ROUTING: other rows came in a
    backward than in its forward."""

    SLOT_FREE = 0
    COUNTS = 1
    ROWS = 2
    RETURNED_ROWS = 3
    SIGNATURE = 4
    OVERFLOW = 5
    CAPACITY = 6
    METADATA = 7
    TILES = 8
    CLOCKS = 9
    FIELDS = 10
    ABANDONED = 11
    HANDLE = 12
    ROUTING = 13


class Kind(IntEnum):
    """The first field of a signature: which verb began a call."""

    REFUSED_HANDLE = 0
    DISPATCH = 1
    CACHED_DISPATCH = 2
    COMBINE = 3
    MOE_FFN = 4
    LOW_LATENCY_DISPATCH = 5
    LOW_LATENCY_COMBINE = 6
    MOE_FFN_DISPATCH = 7  # the two of a layer of few tokens, whose weights travel with the rows
    MOE_FFN_COMBINE = 8
    MOE_FFN_BACKWARD = 9


DISPATCH_OF_HANDLE = "call of the handle's dispatch"
CALLER = "caller"
"""The layer that a call is of, or the forward that a backward is of; see `callers.Callers`."""
REFUSED_CALLS = "refused calls"
SAVED = "save"
SAVE_POLICIES = "no gradients", "none", "pre", "rows", "all"
"""What a layer saves for its backward; a signature has the `saved_number` of one of them."""
FROZEN = ", without the gradient of w_gate_up"


def saved_number(save: str, wants_gate_up: bool = True) -> int:
    """The number of a policy; in a backward also of whether it computes the gradient of w_gate_up,
    for which x may be sent again."""
    return SAVE_POLICIES.index(save) + (0 if wants_gate_up else len(SAVE_POLICIES))


def saved_name(number: int) -> str:
    """What a `saved_number` means."""
    is_frozen, policy = divmod(number, len(SAVE_POLICIES))
    return SAVE_POLICIES[policy] + FROZEN * is_frozen


SIGNATURE = (
    *("verb", "bytes per token", "top-k", "experts", "bytes per item", "scales"),
    *("stages of dispatch", "stages of combine", "whether memory may grow"),
    *(DISPATCH_OF_HANDLE, "Buffer", SAVED, "most tokens", "alignment of rows by expert"),
    *(CALLER, REFUSED_CALLS),
)
"""What all ranks must begin a call with alike: the fields of a signature, int32 [SIGNATURE_WORDS],
see `device/signature.py`."""


class Role(IntEnum):
    """What a program of a layer or of a low-latency call does in a span of a trace. A span in a
    wait has its Phase for a role."""

    EXCHANGE = 16
    PUSH = 17
    COPY = 18
    UP = 19
    RETURN_METADATA = 20
    DOWN = 21
    RETURN = 22
    SUM = 23
    OPEN = 24  # until a low-latency call's program knows its slot
    COUNTS = 25
    SEND = 26
    PACK = 27
    DGRAD_DOWN = 28
    DGRAD_UP = 29
    WGRAD_DOWN = 30
    WGRAD_UP = 31
    KEEP = 32  # expert rows, in memory of this rank alone
    ACTIVATION_GRADIENT = 33


class TracedRole(NamedTuple):
    """Where a kernel that takes no device context records its spans, and as what."""

    context: Any
    role: Any


TOLD_BIT = 32
"""The bit of `ContextField.BROKEN` that peers set by storing or sending a byte: so they
clear no bit that this rank sets."""
SIGNATURE_WORDS = tl.constexpr(16)
MAX_STAGES = tl.constexpr(16)
"""Parts that a layer's rows are sent in, and returned in."""

# Kernels can read module globals only as constexpr.
EPOCH = tl.constexpr(int(ContextField.EPOCH))
BROKEN = tl.constexpr(int(ContextField.BROKEN))
FINISHED = tl.constexpr(int(ContextField.FINISHED))
BAD_IDS = tl.constexpr(int(ContextField.BAD_IDS))
TIMEOUT_NS = tl.constexpr(int(ContextField.TIMEOUT_NS))
REPORT = tl.constexpr(int(ContextField.REPORT))
RANK = tl.constexpr(int(ContextField.RANK))
NUM_RANKS = tl.constexpr(int(ContextField.NUM_RANKS))
NUM_SLOTS = tl.constexpr(int(ContextField.NUM_SLOTS))
REGION_BYTES = tl.constexpr(int(ContextField.REGION_BYTES))
DONE = tl.constexpr(int(ContextField.DONE))
COUNT_FLAGS = tl.constexpr(int(ContextField.COUNT_FLAGS))
CHUNK_FLAGS = tl.constexpr(int(ContextField.CHUNK_FLAGS))
MAX_CHUNKS = tl.constexpr(int(ContextField.MAX_CHUNKS))
SLOTS = tl.constexpr(int(ContextField.SLOTS))
CLAIMED = tl.constexpr(int(ContextField.CLAIMED))
PUSHED = tl.constexpr(int(ContextField.PUSHED))
PACE = tl.constexpr(int(ContextField.PACE))
METADATA_FLAGS = tl.constexpr(int(ContextField.METADATA_FLAGS))
STAGE_FLAGS = tl.constexpr(int(ContextField.STAGE_FLAGS))
TRACE = tl.constexpr(int(ContextField.TRACE))
MASKED = tl.constexpr(int(ContextField.MASKED))
STARTED = tl.constexpr(int(ContextField.STARTED))
OWN = tl.constexpr(int(ContextField.OWN))
BUFFER = tl.constexpr(int(ContextField.BUFFER))
NETWORK = tl.constexpr(int(ContextField.NETWORK))
NODE_RANKS = tl.constexpr(int(ContextField.NODE_RANKS))
NUM_REGIONS = tl.constexpr(int(ContextField.NUM_REGIONS))
HEADERS = tl.constexpr(int(ContextField.HEADERS))
HEADER_BYTES = tl.constexpr(int(ContextField.HEADER_BYTES))
REFUSED = tl.constexpr(int(ContextField.REFUSED))
PEERS = tl.constexpr(int(ContextField.PEERS))
PHASE_SLOT_FREE = tl.constexpr(int(Phase.SLOT_FREE))
PHASE_COUNTS = tl.constexpr(int(Phase.COUNTS))
PHASE_ROWS = tl.constexpr(int(Phase.ROWS))
PHASE_RETURNED_ROWS = tl.constexpr(int(Phase.RETURNED_ROWS))
PHASE_SIGNATURE = tl.constexpr(int(Phase.SIGNATURE))
PHASE_OVERFLOW = tl.constexpr(int(Phase.OVERFLOW))
PHASE_CAPACITY = tl.constexpr(int(Phase.CAPACITY))
REPORT_THEIRS = tl.constexpr(int(Report.THEIRS))
REPORT_OURS = tl.constexpr(int(Report.OURS))
REPORT_ROWS = tl.constexpr(int(Report.ROWS))
REPORT_BAD_IDS = tl.constexpr(int(Report.BAD_IDS))
PHASE_METADATA = tl.constexpr(int(Phase.METADATA))
PHASE_TILES = tl.constexpr(int(Phase.TILES))
PHASE_CLOCKS = tl.constexpr(int(Phase.CLOCKS))
PHASE_FIELDS = tl.constexpr(int(Phase.FIELDS))
PHASE_ABANDONED = tl.constexpr(int(Phase.ABANDONED))
PHASE_HANDLE = tl.constexpr(int(Phase.HANDLE))
PHASE_ROUTING = tl.constexpr(int(Phase.ROUTING))
KIND_DISPATCH = tl.constexpr(int(Kind.DISPATCH))
KIND_CACHED_DISPATCH = tl.constexpr(int(Kind.CACHED_DISPATCH))
KIND_COMBINE = tl.constexpr(int(Kind.COMBINE))
KIND_MOE_FFN = tl.constexpr(int(Kind.MOE_FFN))
KIND_LOW_LATENCY_DISPATCH = tl.constexpr(int(Kind.LOW_LATENCY_DISPATCH))
KIND_LOW_LATENCY_COMBINE = tl.constexpr(int(Kind.LOW_LATENCY_COMBINE))
KIND_MOE_FFN_DISPATCH = tl.constexpr(int(Kind.MOE_FFN_DISPATCH))
KIND_MOE_FFN_COMBINE = tl.constexpr(int(Kind.MOE_FFN_COMBINE))
ROLE_EXCHANGE = tl.constexpr(int(Role.EXCHANGE))
ROLE_PUSH = tl.constexpr(int(Role.PUSH))
ROLE_COPY = tl.constexpr(int(Role.COPY))
ROLE_UP = tl.constexpr(int(Role.UP))
ROLE_RETURN_METADATA = tl.constexpr(int(Role.RETURN_METADATA))
ROLE_DOWN = tl.constexpr(int(Role.DOWN))
ROLE_RETURN = tl.constexpr(int(Role.RETURN))
ROLE_SUM = tl.constexpr(int(Role.SUM))
ROLE_OPEN = tl.constexpr(int(Role.OPEN))
ROLE_COUNTS = tl.constexpr(int(Role.COUNTS))
ROLE_SEND = tl.constexpr(int(Role.SEND))
ROLE_PACK = tl.constexpr(int(Role.PACK))
ROLE_DGRAD_DOWN = tl.constexpr(int(Role.DGRAD_DOWN))
ROLE_DGRAD_UP = tl.constexpr(int(Role.DGRAD_UP))
ROLE_WGRAD_UP = tl.constexpr(int(Role.WGRAD_UP))
ROLE_KEEP = tl.constexpr(int(Role.KEEP))
