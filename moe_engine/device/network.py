"""The transport to ranks of other nodes, whose memory is not mapped: asynchronous sends.

All arguments are scalars. Addresses are int64, this rank's own addresses of things in symmetric
blocks, as in `lang.notify`; sizes are in bytes. `rank` must be of another node: what lies on ranks
of this node is reached by stores through `lang.symm_at`. Two sends may overtake each other, unless
a `fence` stands between them. What was sent has been delivered once the destination says so, by a
flag of its own, or after `quiet`.

Under the interpreter the verbs are posted to an emulated network (`symm/nic.py`), and a wrong rank
or address raises BackendError. On a GPU they are those of `nvshmem.py`.
"""

import ctypes
from typing import Any

import triton.language as tl

from .context import NETWORK, PEERS, RANK, TIMEOUT_NS
from .ptx import INTERPRETED, device_function

nics: dict[int, Any] = {}
"""The emulated networks of this process, by the address that `context.NETWORK` holds."""

if INTERPRETED:

    def _post(verb, context, *arguments):
        """Let the emulated network do a verb."""
        fields = ctypes.cast(_number(context), ctypes.POINTER(ctypes.c_int64))
        network = fields[NETWORK.value]
        if network not in nics:
            raise LookupError(f"{verb}: this rank has no ranks of other nodes; see context.NETWORK")
        own = fields[PEERS.value + fields[RANK.value]]
        getattr(nics[network], verb)(own, fields[TIMEOUT_NS.value], *map(_number, arguments))

    def _number(value):
        """A scalar of the interpreter as an int."""
        if isinstance(value, tl.tensor):
            return int(value.handle.data.item())
        return int(getattr(value, "value", value))

    @device_function
    def send(to, source, num_bytes, flag, value, rank, context):
        """Begin to copy `num_bytes` > 0 from `source`, in this rank's block, to `to` on `rank`, and
        then set the int64 `flag` there to `value`.

        All stores of this program before the call are seen by the copy. A `wait` on `rank` that
        sees the flag sees these bytes, and nothing else that was sent. The source must stay as it
        is until the destination has said that it got the bytes, or until `quiet`.
        """
        tl.debug_barrier()
        _post("send", context, to, source, num_bytes, flag, value, rank)

    @device_function
    def send_bytes(to, source, num_bytes, rank, context):
        """`send` without a flag. Only a `fence` and what is sent after it tells `rank` that the
        bytes are there."""
        tl.debug_barrier()
        _post("send_bytes", context, to, source, num_bytes, rank)

    @device_function
    def send_word(to, value, rank, context):
        """Begin to set the int64 at `to` on `rank` to `value`, in one piece. It orders nothing: the
        word may arrive before what was sent earlier, and after what is sent later."""
        _post("send_word", context, to, value, rank)

    @device_function
    def fence(rank, context):
        """What this program sends to `rank` from now on arrives after all that it sent there
        before."""
        _post("fence", context, rank)

    @device_function
    def quiet(context):
        """Wait until all that this rank has sent is delivered; its sources may then be
        overwritten."""
        _post("quiet", context)

else:
    from .nvshmem import fence as fence
    from .nvshmem import quiet as quiet
    from .nvshmem import send as send
    from .nvshmem import send_bytes as send_bytes
    from .nvshmem import send_word as send_word
