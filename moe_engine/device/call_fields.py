"""What a low-latency call was begun with: fields that each rank sends to all others, to compare.

Each travels together with the call's epoch (`device.ring.count_at`), so that nothing that waits for
rows waits for the fields.
"""

import triton
import triton.language as tl

from .context import PHASE_FIELDS, REPORT_OURS, REPORT_THEIRS
from .lang import device_function, report_failure, report_pointer
from .ring import COUNT_BITS, COUNT_MASK, FIELDS


@triton.constexpr_function
def is_cast(row_format):
    """Whether rows are cast to e4m3 before they are sent; "bf16" and "fp32" are sent as they
    are."""
    return row_format in ("fp8", "rounded", "ue8m0")


@triton.constexpr_function
def item_bytes(row_format, vec_bytes):
    """Bytes of an item of a row on the wire; in a combine, without a format, those of a vector."""
    if row_format is None:
        return vec_bytes
    return 4 if row_format == "fp32" else 2 if row_format == "bf16" else 1


@device_function
def num_scales(num_vecs, FORMAT: tl.constexpr):
    """Scales, 4 bytes each, of a row of `num_vecs` vectors, which hold 4 columns if it was cast."""
    count = num_vecs * 0
    if FORMAT == "ue8m0":
        count = num_vecs // 128
    elif is_cast(FORMAT):
        count = num_vecs // 32
    return count


@device_function
def call_fields(field, num_tokens, dispatched, slot, CONFIG: tl.constexpr):
    """The values of fields number `field` (a block), 16 bits each: the tokens of a rank, then what
    must be the same on all ranks, see `device_context.low_latency_fields`. Field 7 is the number of
    scales, or in a combine `dispatched`, the epoch of the handle's dispatch; the fields from 11 on
    are 0."""
    VEC_BYTES: tl.constexpr = CONFIG.VEC.primitive_bitwidth // 8
    num_vecs = slot.rows.num_vecs
    payload_bytes = num_vecs * VEC_BYTES
    last = num_scales(num_vecs, CONFIG.FORMAT)
    if CONFIG.FORMAT is None:
        last = (dispatched & COUNT_MASK).to(tl.int32)
    values = tl.where(field == 0, num_tokens, tl.where(field == 1, slot.max_tokens, 0))
    values = tl.where(field == 2, payload_bytes & COUNT_MASK, values)
    values = tl.where(field == 3, payload_bytes >> COUNT_BITS, values)
    values = tl.where(field == 4, CONFIG.NUM_TOPK, tl.where(field == 5, CONFIG.NUM_EXPERTS, values))
    mixed: tl.constexpr = CONFIG.KIND * 16 + item_bytes(CONFIG.FORMAT, VEC_BYTES)
    values = tl.where(field == 6, mixed, values)
    values = tl.where(field == 7, last, values)
    values = tl.where(field == 8, slot.caller & COUNT_MASK, values)
    values = tl.where(field == 9, (slot.caller >> COUNT_BITS) & COUNT_MASK, values)
    return tl.where(field == 10, slot.refused & COUNT_MASK, values)


@device_function
def report_fields(other, theirs, ours, index, slot):
    """Tell the host that rank `other` began another call than this one: the fields of both are the
    first of `theirs` and `ours`, blocks that `index` numbers."""
    report = report_pointer(slot.context)
    tl.store(report + REPORT_THEIRS + index, theirs.to(tl.int64), mask=index < FIELDS)
    tl.store(report + REPORT_OURS + index, ours.to(tl.int64), mask=index < FIELDS)
    report_failure(other, slot.epoch, slot.context, PHASE_FIELDS)
