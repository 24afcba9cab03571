"""The transport verbs through NVSHMEM, whose device functions are linked into the kernel.

Addresses are int64 scalars in this rank's own symmetric block, as NVSHMEM takes them: it finds the
same offset on the other rank by its processing element (PE). The context field NETWORK holds the
address of an int32 [R] table of the ranks' PEs. All verbs work on ranks of this node, too.

A call on scalars is made by every thread of a program. Functions of NVSHMEM whose names end in
`_block` need that, and begin and end with a CTA barrier; the others are called by thread 0 alone.
So a program calls each verb with all its threads, under conditions that are the same to all of
them, and never in a part that is specialised by warps.

NVSHMEM has no deadlines. A verb returns once its request is queued, but waits while the queue is
full, and `quiet` (and in some transports `fence`) waits until the network is done: should the
network never be, so does the kernel. Waits for flags are `lang.wait`, which has a deadline. It
polls with acquire loads, and makes no further read to order what the network adapter writes: a host
whose adapter may write data after the flag that follows them (GPU_DIRECT_RDMA_WRITES_ORDERING of
the driver below "owner") is not supported.
"""

import triton.language as tl
from triton.language import core

from .context import NETWORK
from .ptx import as_pointer, device_function

SIGNAL_SET = tl.constexpr(9)  # NVSHMEM_SIGNAL_SET


def uses_nvshmem(kernel):
    """Mark a kernel (under @triton.jit) that calls these verbs: its launches link NVSHMEM."""
    kernel.uses_nvshmem = True
    return kernel


def _extern(name, arguments, kinds, _semantic):
    """A call of one of NVSHMEM's functions, none of which returns anything. Triton has no name for
    that; what it takes for the result is not used. Nor does its cache see these names: clear it
    (TRITON_CACHE_DIR) after a change here."""
    call = {kinds: (name, core.dtype("int32"))}
    return core.extern_elementwise("", "", arguments, call, is_pure=False, _semantic=_semantic)


I32, I64 = core.dtype("int32"), core.dtype("int64")


@core.extern
def _put_signal_block(to, source, num_bytes, flag, value, operation, pe, _semantic=None):
    arguments = [to, source, num_bytes, flag, value, operation, pe]
    kinds = I64, I64, I64, I64, I64, I32, I32
    return _extern("nvshmemx_putmem_signal_nbi_block", arguments, kinds, _semantic)


@core.extern
def _put_block(to, source, num_bytes, pe, _semantic=None):
    kinds = I64, I64, I64, I32
    return _extern("nvshmemx_putmem_nbi_block", [to, source, num_bytes, pe], kinds, _semantic)


@core.extern
def _signal(to, value, operation, pe, _semantic=None):
    kinds = I64, I64, I32, I32
    return _extern("nvshmemx_signal_op", [to, value, operation, pe], kinds, _semantic)


@core.extern
def _fence(_semantic=None):
    return _extern("nvshmem_fence", [], (), _semantic)


@core.extern
def _quiet(_semantic=None):
    return _extern("nvshmem_quiet", [], (), _semantic)


@device_function
def thread():
    """The number of this thread in its program, int32: a scalar that threads see differently."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@device_function
def processing_element(rank, context):
    """The PE of a rank of the group, int32."""
    return tl.load(as_pointer(tl.load(context + NETWORK), tl.int32) + rank)


@device_function
def send(to, source, num_bytes, flag, value, rank, context):
    """Copy `num_bytes` from `source`, in this rank's block, to `to` on `rank`, then set the int64
    `flag` there to `value`. Returns at once: the source may not change before the copy has ended,
    which `quiet`, or an answer of `rank` to these bytes, shows.

    Publish: what this program wrote to the source comes before the barrier in which the call
    begins, and so before the copy; the bytes are in memory of `rank` before the flag is, so a
    `lang.wait` for it sees them. The flag says nothing of other sends, nor of `send_bytes`.
    """
    pe = processing_element(rank, context)
    size = tl.cast(num_bytes, tl.int64)
    value = tl.cast(value, tl.int64)
    _put_signal_block(to, source, size, flag, value, SIGNAL_SET, pe)


@device_function
def send_word(to, value, rank, context):
    """Set the int64 at `to` on `rank` to `value`, in one piece. It orders nothing: what was sent
    before may arrive after it, and two words to one place in either order."""
    pe = processing_element(rank, context)
    value = tl.cast(value, tl.int64)
    if thread() == 0:
        _signal(to, value, SIGNAL_SET, pe)


@device_function
def send_bytes(to, source, num_bytes, rank, context):
    """Copy `num_bytes` from `source`, in this rank's block, to `to` on `rank`; `send` without its
    flag. Nothing says when the bytes have arrived but a flag that is sent after a `fence`."""
    _put_block(to, source, tl.cast(num_bytes, tl.int64), processing_element(rank, context))


@device_function
def fence(rank, context):
    """Let what this program has sent to `rank` arrive before what it sends there from now on. With
    NVSHMEM that holds for all ranks, and in some transports waits for all that was sent."""
    tl.debug_barrier()  # what other threads have sent comes before thread 0's fence
    if thread() == 0:
        _fence()
    tl.debug_barrier()  # and what they send next after it


@device_function
def quiet(context):
    """Wait until all that this program has sent is in the memory of its ranks. The sources may
    change then."""
    tl.debug_barrier()
    if thread() == 0:
        _quiet()
    tl.debug_barrier()
