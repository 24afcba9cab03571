"""What a rank tells the ranks of other nodes when its calls have ended, see `notices.py`."""

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, PEERS
from ..device.lang import own_block
from ..device.network import fence, send_bytes
from ..device.nvshmem import uses_nvshmem


@uses_nvshmem
@triton.jit(do_not_specialize=["notice"])
def tell_far_ranks_kernel(
    context,
    notice,  # offset of this rank's notice in all blocks, in bytes
    NOTICE_BYTES: tl.constexpr,
    TOLD_BYTE: tl.constexpr,  # offset of the byte of BROKEN that peers set, or None
):
    """Send this rank's notice to each rank of another node, straight to it, and after it the byte
    by which that rank learns that a notice has come; None: no byte, as it is a refusal. One
    program.

    What is sent lies at the same places of this rank's own block, where launches or copies before
    this one have stored it, and stays as it is.

    Publish: the fence lets a rank's notice arrive before its byte, so a rank that sees the byte
    reads the whole notice; and one that sees the signature of a later call reads the whole refusal.
    Only that byte of BROKEN is written: others of it belong to that rank
    alone. Ranks are told in their order, whichever else can be reached.
    """
    own = own_block(context)
    text = own + notice
    for rank in range(0, tl.load(context + NUM_RANKS).to(tl.int32)):
        if tl.load(context + PEERS + rank) == 0:
            send_bytes(text, text, NOTICE_BYTES, rank, context)
            fence(rank, context)
            if TOLD_BYTE is not None:
                told = own + TOLD_BYTE
                send_bytes(told, told, 1, rank, context)
