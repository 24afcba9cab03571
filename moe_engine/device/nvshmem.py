"""The verbs of `network.py` on GPUs. There is no transport yet: kernels that use them do not
compile."""

import triton.language as tl

from .ptx import device_function

MISSING = tl.constexpr("GPUs reach no ranks of other nodes yet: use ranks of one host")


@device_function
def send(to, source, num_bytes, flag, value, rank, context):
    """See `network.send`."""
    tl.static_assert(False, MISSING)


@device_function
def send_bytes(to, source, num_bytes, rank, context):
    """See `network.send_bytes`."""
    tl.static_assert(False, MISSING)


@device_function
def send_word(to, value, rank, context):
    """See `network.send_word`."""
    tl.static_assert(False, MISSING)


@device_function
def fence(rank, context):
    """See `network.fence`."""
    tl.static_assert(False, MISSING)


@device_function
def quiet(context):
    """See `network.quiet`."""
    tl.static_assert(False, MISSING)
